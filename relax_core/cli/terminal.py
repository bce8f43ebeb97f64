# SPDX-License-Identifier: Apache-2.0
"""Arguments that several verbs take, and the forms that all of them print: JSON, tables, failures.

A verb that fails ends with a line on stderr, an exit code, and with `--json` one document on stdout:
`{"schema": "relax.error/1", "error": ..., "type": ..., "exit_code": ...}`, with `field`, `got`, `fix` where the
configuration is wrong and `errors` where several things are. Only frames of a plugin are shown; `RELAX_TRACEBACK=1`
shows the core's own too.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from relax_core.api.errors import ConfigError, PluginError, RelaxError

INTERRUPTED = 130
_TRACEBACK = "RELAX_TRACEBACK"
UsageError: type[Any] = typer.BadParameter.__bases__[0]
"""Typer's error for words that the command line does not understand."""

Sources = Annotated[list[str], typer.Argument(help="TOML files or a recipe, then overrides.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


class Interrupted(BaseException):
    """SIGINT, SIGTERM or SIGHUP, where no run listens for them."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Separate files and recipes from overrides, which contain '='."""
    return [item for item in arguments if "=" not in item], [item for item in arguments if "=" in item]


def say(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print text, its control characters made visible: whoever wrote it, it can't steer the terminal."""
    from relax_core.api.errors import printable

    try:
        typer.echo(printable(str(text)), err=err, nl=nl)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        # The terminal was closed: nobody reads it, and what a run has still to write goes on.


def print_json(document: object) -> None:
    """Print the one document that stdout carries, in a line and with plain text for what JSON does not know."""
    from relax_core.observe.documents import encode

    say(encode(document))


def print_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print columns as wide as their widest cell."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def fail(error: BaseException) -> int:
    """Print what is wrong; return the exit code."""
    document = error_document(error)
    if isinstance(error, UsageError):
        error.show()
    else:
        if isinstance(error, PluginError) and error.frames:
            say(error.frames.rstrip(), err=True)
        elif os.environ.get(_TRACEBACK) and not isinstance(error, Interrupted):
            say("".join(traceback.format_exception(error)), err=True)
        say(f"relax: {document['error']}", err=True)
    if "--json" in sys.argv[1:]:
        print_json(document)
    return int(document["exit_code"])


def error_document(error: BaseException) -> dict[str, Any]:
    """Describe an error as plain data."""
    kind, exit_code = type(error).__name__, 1
    more: dict[str, Any] = {}
    if isinstance(error, RelaxError):
        text, exit_code = str(error), error.exit_code
        if isinstance(error, ConfigError):
            more = {"field": error.field, "got": str(error.got), "fix": error.fix}
        if several := getattr(error, "errors", ()):
            more["errors"] = [error_document(one) for one in several]
        if isinstance(error, PluginError):
            more = {"component": error.component, "frames": error.frames}
    elif isinstance(error, UsageError):
        kind, text, exit_code = "UsageError", error.format_message(), 2
    elif isinstance(error, Interrupted):
        text, exit_code = "interrupted", INTERRUPTED
    else:
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
        text = (
            f"unexpected {kind}: {error}{place}; this is a fault of relax: "
            f"run it again with {_TRACEBACK}=1 and report what it prints"
        )
    return {"schema": "relax.error/1", "error": text, "type": kind, "exit_code": exit_code, **more}
