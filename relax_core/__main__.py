# SPDX-License-Identifier: Apache-2.0
"""Run the command line: `python -m relax_core` is the same as `relax`."""

from relax_core.cli.main import main

if __name__ == "__main__":
    main()
