# SPDX-License-Identifier: Apache-2.0
"""The other end of `run_apart`: unpickle a suite from stdin, import its component, say so, exercise it, answer.

With the number of a socket as its argument it is a server, which forks such processes.
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
    """Run the suite from stdin and write its answer to stdout; whatever the component prints goes to stderr."""
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
    """End as an interpreter does, but free nothing: freeing the server's modules takes longer than most exercises."""
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
