# SPDX-License-Identifier: Apache-2.0
"""`python -m relax_core` is `relax`."""

from relax_core.cli.main import main

if __name__ == "__main__":
    main()
