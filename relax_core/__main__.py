# SPDX-License-Identifier: Apache-2.0
"""Run the command line: `python -m relax_core` is the same as `relax`."""

import signal


def main() -> None:
    """Run `relax`. Until its modules are imported, Ctrl-C ends the process at once and without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from relax_core.cli.main import main as run_verb

    run_verb()


if __name__ == "__main__":
    main()
