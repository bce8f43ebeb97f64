# SPDX-License-Identifier: Apache-2.0
"""Arguments shared by several commands, and the output formats of all commands: JSON, tables, errors.

This module is public: commands of plugins use it too.

A failed verb prints one line on stderr and sets an exit code. With `--json` it also prints one document on stdout:
`{"schema": "relax.error/1", "error": ..., "type": ..., "exit_code": ...}`. A configuration error adds `field`, `got`
and `fix`; several errors are listed in `errors`. With `RELAX_TRACEBACK=1` the traceback comes first; for an error in a
plugin, it has only the plugin's frames.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from relax_core.api.errors import ConfigError, PluginError, RelaxError
from relax_core.observe.console import INTERRUPTS, run_to_end as run_to_end, say_stopping

if TYPE_CHECKING:
    from relax_core.control_api.client import ControlClient

INTERRUPTED = 130
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop a command."""
_TRACEBACK = "RELAX_TRACEBACK"
UsageError: type[Any] = typer.BadParameter.__bases__[0]
"""Typer's error for an invalid command line."""

Sources = Annotated[list[str], typer.Argument(help="TOML files or a recipe name, then overrides KEY=VALUE.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Arguments = Annotated[
    list[str], typer.Argument(help="TOML files or a recipe name, then overrides such as optimizer.lr=1e-5.")
]
Run = Annotated[
    str | None, typer.Argument(metavar="RUN", help="A run directory, or a name under ./runs; default: the latest run.")
]


def complete_name(incomplete: str) -> list[str]:
    """Return the names of components, commands and distributions that start with `incomplete`, for shell completion."""
    from relax_core.registry import Catalogue

    records = Catalogue.load().records
    names = {component.name for record in records for _, component in record.components}
    names |= {command.name for record in records for command in record.commands}
    return sorted(n for n in names | {record.distribution for record in records} if n.startswith(incomplete))


Named = Annotated[
    str,
    typer.Argument(
        help="A component, distribution:component, distribution, or ./file.py.", autocompletion=complete_name
    ),
]
Address = Annotated[
    str, typer.Option(help="Ask the control API at http://HOST:PORT or unix:PATH instead of a run here.")
]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with the token of the control API; default: the variable RELAX_TOKEN.")
]


class Interrupted(KeyboardInterrupt):
    """The arrival of SIGINT, SIGTERM or SIGHUP while no run handles the signal."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number


def stop_command(number: int, _: object = None) -> None:
    """Handle a signal: print that the command stops, and cancel its coroutine, or raise Interrupted.

    A second Ctrl-C ends the process at once.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    say_stopping(number)
    interrupts = INTERRUPTS.get(None)
    if interrupts is None or not interrupts.send():
        raise Interrupted(number)


@contextmanager
def asking() -> Iterator[None]:
    """Let signals of the body only raise Interrupted, however often: the body watches another process, or asks."""

    def interrupt(number: int, _: object) -> NoReturn:
        raise Interrupted(number)

    before = {number: signal.getsignal(number) for number in STOPPING}
    for number in before:
        if before[number] is stop_command:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split arguments into (files and recipes, overrides); an argument with '=' is an override."""
    return [item for item in arguments if "=" not in item], [item for item in arguments if "=" in item]


def remote(address: str, token_file: Path | None, run: str | None = None) -> ControlClient:
    """Return the client of the control API at an address. Raises ConfigError, also for a `run`."""
    from relax_core.control_api.client import ControlClient, read_token

    if run is not None:
        raise ConfigError("run", f"{run}, and --address", "leave the run out: an address belongs to one run")
    return ControlClient(address, read_token(token_file))


def say(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print text with control characters escaped, since text of models and plugins must not control the terminal."""
    from relax_core.api.errors import printable

    try:
        typer.echo(printable(str(text)), err=err, nl=nl)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        # The terminal was closed; a run that still writes must continue.


def print_json(document: object) -> None:
    """Print a document as one line of JSON; values of unknown types become text."""
    from relax_core.observe.files import encode

    say(encode(document))


def print_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_operation(where: str, operation: Mapping[str, Any], as_json: bool) -> None:
    """Print a change of a run, as asked or as done; `where`: name or address of the run."""
    if as_json:
        print_json({"schema": "relax.operation/1", **operation})
    else:
        detail = f"; {operation['detail']}" if operation["detail"] else ""
        say(f"{where}: {operation['action']} is {operation['state']}{detail}")


def fail(error: BaseException) -> int:
    """Print an error; return its exit code."""
    document = error_document(error)
    if isinstance(error, UsageError):
        error.show()
    else:
        own = error.frames.rstrip() if isinstance(error, PluginError) else ""
        if own:
            say(own if os.environ.get(_TRACEBACK) else f"relax: {_TRACEBACK}=1 shows the traceback", err=True)
        elif os.environ.get(_TRACEBACK) and not isinstance(error, Interrupted):
            say("".join(traceback.format_exception(error)), err=True)
        say(f"relax: {document['error']}", err=True)
    if "--json" in sys.argv[1:]:
        print_json(document)
    return int(document["exit_code"])


def error_document(error: BaseException) -> dict[str, Any]:
    """Return an error as the `relax.error/1` document."""
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
            f"run the command again with {_TRACEBACK}=1 and report its output"
        )
    return {"schema": "relax.error/1", "error": text, "type": kind, "exit_code": exit_code, **more}
