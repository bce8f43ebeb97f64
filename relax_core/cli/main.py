# SPDX-License-Identifier: Apache-2.0
"""The command `relax`: its commands by name, from the metadata of all installed distributions, and its exit.

`relax --help` imports no command. A call imports the module of its own command only.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from relax_core.api.command import GROUPS
from relax_core.api.errors import printable
from relax_core.cli.terminal import INTERRUPTED, STOPPING, Interrupted, UsageError, fail, say, stop_command
from relax_core.observe.console import EVERY_S, INTERRUPTS, Interrupts, print_waits
from relax_core.registry.commands import Commands


class LazyCommands(Mapping[str, Any]):
    """Parsers of commands by name; each is made on first use. Raises ConfigError for a name that no command has."""

    def __init__(self) -> None:
        self.known = Commands()
        self._parsers: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._parsers:
            self._parsers[name] = self.known.find(name).parser(name)
        return self._parsers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.known.by_name))

    def __len__(self) -> int:
        return len(self.known.by_name)

    def __contains__(self, name: object) -> bool:
        return name in self.known.core or name in self.known.by_name


class CommandGroup(TyperGroup):
    """The parser of `relax`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = LazyCommands()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return None if ctx.resilient_parsing and cmd_name not in self.commands else self.commands[cmd_name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a panel for each group of commands."""
        panels: dict[str, list[tuple[str, str]]] = {title: [] for title in GROUPS.values()}
        for name, offered in sorted(self.commands.known.by_name.items()):
            panels.setdefault(offered.command.panel, []).append((name, printable(offered.command.help)))
        for title, rows in panels.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete the names of commands without importing the commands."""
        known = self.commands.known.by_name
        listed = TyperGroup(name=self.name, params=self.params)
        for name, offered in known.items():
            listed.add_command(TyperCommand(name, help=offered.command.help))
        return listed.shell_complete(listed.make_context(self.name, [], resilient_parsing=True), incomplete)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; charge an unexpected exception in a plugin's command to the plugin."""
        try:
            return super().invoke(ctx)
        except (UsageError, typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if ctx.invoked_subcommand is None:
                raise
            charged = self.commands.known.find(ctx.invoked_subcommand).charged(error)
            if charged is error:
                raise
            raise charged from error


app = typer.Typer(
    name="relax",
    cls=CommandGroup,
    help="Reinforcement-learning post-training of language and omni-modal models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        say(f"relax {metadata.version('relax-core')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None: ...


def main() -> NoReturn:
    """Run a verb and exit; print any error as one line on stderr and exit with its code."""
    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP:  # `nohup` ignores SIGHUP
            signal.signal(number, stop_command)
    signal.signal(signal.SIGUSR1, lambda *_: None)  # a live run saves a checkpoint; it must never end the process
    INTERRUPTS.set(interrupts := Interrupts())
    ended = threading.Event()
    threading.Thread(target=_print_waits_until, args=(ended,), daemon=True).start()
    try:
        if sys.argv[1:3] == ["plugins", "list"]:
            # Typer imports pydantic to convert values, which takes longer than this whole verb.
            from relax_core.cli import plugins

            code = plugins.list_without_typer(sys.argv[3:])
        else:
            code = int(app(standalone_mode=False, prog_name="relax") or 0)
    except (Exception, KeyboardInterrupt) as error:
        code = fail(Interrupted() if interrupts.sent else error)
    else:
        code = fail(Interrupted()) if interrupts.sent and code == INTERRUPTED else code  # typer turns it into a code
    finally:
        ended.set()
    sys.exit(code)


def _print_waits_until(ended: threading.Event) -> None:
    while not ended.wait(EVERY_S):
        print_waits()
