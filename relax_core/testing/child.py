# SPDX-License-Identifier: Apache-2.0
"""The process behind `run_apart`: reads a pickled suite from stdin, imports its component, exercises it and answers.

With the descriptor of a socket as its argument, the process is a fork server for such processes.
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import sys
import threading
from typing import Any

import cloudpickle

from relax_core.registry.error_text import innermost, plugin_frames, said
from relax_core.testing.apart import READY, serve


def main() -> None:
    """Run the suite from stdin and write its answer to stdout; output of the component goes to stderr."""
    forked = len(sys.argv) > 1
    if forked:
        serve(socket.socket(fileno=int(sys.argv.pop())))
    answers = os.dup(1)
    os.dup2(2, 1)
    suite = cloudpickle.loads(sys.stdin.buffer.read())
    suite.target()
    suite.prepare()
    os.write(answers, READY)
    with os.fdopen(answers, "wb") as pipe:
        pipe.write(_answer(suite))
    if forked:
        _end()


def _end() -> None:
    """Exit like an interpreter but free no modules, since freeing them takes longer than most exercises."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _answer(suite: Any) -> bytes:
    try:
        return pickle.dumps(([suite.exercise(suite.make()) for _ in range(2)], "", False))
    except AssertionError as error:
        return pickle.dumps((None, str(error) or plugin_frames(error), False))
    except Exception as error:
        place = innermost(error)
        return pickle.dumps((None, f"{said(error)} ({place})" if place else said(error), True))


if __name__ == "__main__":
    main()
