# SPDX-License-Identifier: Apache-2.0
"""A process that ends with its parent: its standard input is a pipe that the parent holds open.

`python -m relax_core.runners.local.parent_death MODULE ARGUMENTS...` runs any module this way. The caller must start it
in a session of its own.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import threading

PARENTS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that only the parent obeys."""


def end_with_parent() -> None:
    """When standard input closes, kill this process with its process group."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this process ends
    # A scheduler may send these signals to every process of a job, but the parent needs this process to save. Programs
    # that this process starts are not affected: a handler ends with exec, unlike SIG_IGN, and is removed after a fork.
    for number in PARENTS:
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    os.register_at_fork(after_in_child=_restore_signals)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _restore_signals() -> None:
    for number in PARENTS:
        signal.signal(number, signal.SIG_DFL)


def _end_with_parent() -> None:
    # Don't read sys.stdin: this thread would hold its lock and abort the interpreter at exit.
    while os.read(0, 4096):
        pass
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(os.getpgrp(), signal.SIGKILL)  # the session has only this process and its children


def main() -> None:
    """Run the module that the command line names, with the remaining arguments."""
    end_with_parent()
    module, *sys.argv[1:] = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
