# SPDX-License-Identifier: Apache-2.0
"""`relax`: every verb is a module beside this one with `add(app)`. Heavy imports happen inside a verb, never here."""

from __future__ import annotations

import importlib
import signal
import sys
from typing import NoReturn

import typer

from relax_core.cli import failure, listing

VERBS = (
    "train",
    "try_",
    "graph",
    "plan",
    "bench",
    "config",
    "doctor",
    "init",
    "data",
    "plugins",
    "new",
    "runs",
    "status",
    "why",
    "report",
)

USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="relax",
    help="Reinforcement-learning post-training of language and omni-modal models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for verb in VERBS:
    importlib.import_module(f"relax_core.cli.{verb}").add(app)


class Interrupted(BaseException):
    """SIGINT or SIGTERM, where no run listens for them."""


def main() -> NoReturn:
    """Run a verb; whatever goes wrong ends as one line on stderr and its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    sys.exit(_ran())


def _interrupt(*_: object) -> NoReturn:
    raise Interrupted


def _ran() -> int:
    try:
        if tuple(sys.argv[1:3]) == listing.WORDS:
            listing.run(sys.argv[3:])
            return 0
        return int(app(standalone_mode=False, prog_name="relax") or 0)
    except USAGE_ERROR as error:
        return failure.refuse(error)
    except Interrupted:
        return failure.interrupted()
    except Exception as error:
        return failure.fail(error)
