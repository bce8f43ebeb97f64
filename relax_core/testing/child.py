# SPDX-License-Identifier: Apache-2.0
"""The process behind `run_apart`: reads a pickled suite from stdin, imports its component, exercises it and answers."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import sys
import threading
from typing import Any

import cloudpickle

from relax_core.registry.error_text import innermost, plugin_frames, said
from relax_core.runners.local.fork_server import IGNORED
from relax_core.testing.apart import READY


def main() -> None:
    """Run the suite from stdin and write its answer to stdout; output of the component goes to stderr."""
    answers = os.dup(1)
    os.dup2(2, 1)
    suite = cloudpickle.loads(sys.stdin.buffer.read())
    suite.target()
    suite.prepare()
    os.write(answers, READY)
    with os.fdopen(answers, "wb") as pipe:
        pipe.write(_answer(suite))


def exercise_forked(path: list[str], folder: str) -> None:
    """Run `main` in a child of a fork server, with the path and folder of its parent.

    Exit like an interpreter but free no modules, since freeing them takes longer than most exercises.
    """
    for number in IGNORED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    os.chdir(folder)
    main()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()


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
