# SPDX-License-Identifier: Apache-2.0
"""A process that ends with its parent: its standard input is a pipe that the parent holds, and never writes to.

`python -m relax_core.runners.local.parent_death MODULE ARGUMENTS...` runs any module so, in a session of its own.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import shutil
import signal
import sys
import threading

PARENTS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that the parent alone obeys."""


def end_with_parent(scratch: str = "") -> None:
    """From now on, kill this process and whatever it forked when standard input closes, and delete its scratch folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we end
    # A scheduler may send these to every process of a job, and the parent needs us to save. What we start decides for
    # itself: a handler does not outlive exec, as SIG_IGN would, and after a fork it is taken back.
    for number in PARENTS:
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    os.register_at_fork(after_in_child=_restore_signals)
    threading.Thread(target=_end_with_parent, args=(scratch,), daemon=True).start()


def _restore_signals() -> None:
    for number in PARENTS:
        signal.signal(number, signal.SIG_DFL)


def _end_with_parent(scratch: str) -> None:
    # Not through sys.stdin: its lock, held by this thread, would abort the interpreter at its end.
    while os.read(0, 4096):
        pass
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(os.getpgrp(), signal.SIGKILL)  # the session is ours alone: whatever we forked ends too


def main() -> None:
    """Run a module as its own command line would."""
    end_with_parent()
    module, *sys.argv[1:] = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
