# SPDX-License-Identifier: Apache-2.0
"""`relax`: every verb is a module beside this one with `add(app)`. Heavy imports happen inside a verb, never here."""

from __future__ import annotations

import importlib
import sys
from typing import NoReturn

import typer

from relax_core.api.errors import PluginError, RelaxError
from relax_core.cli import listing

VERBS = ("train", "try_", "graph", "config", "init", "data", "plugins", "new", "runs", "status", "why", "report")

app = typer.Typer(
    name="relax",
    help="Reinforcement-learning post-training of language and omni-modal models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for verb in VERBS:
    importlib.import_module(f"relax_core.cli.{verb}").add(app)


def main() -> NoReturn:
    """Run a verb; every error of ours ends as one line on stderr and its exit code."""
    try:
        if tuple(sys.argv[1:3]) == listing.WORDS:
            listing.run(sys.argv[3:])
        else:
            app(standalone_mode=True)
    except RelaxError as error:
        fail(error)
    sys.exit(0)


def fail(error: RelaxError) -> NoReturn:
    """Print an error of ours: frames only where they are the plugin's own."""
    if isinstance(error, PluginError) and error.frames:
        print(error.frames.rstrip(), file=sys.stderr)
    print(f"relax: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
