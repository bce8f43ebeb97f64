# SPDX-License-Identifier: Apache-2.0
"""The command `relax`: its commands by name, from the metadata of all installed distributions, and its exit.

`relax --help` imports no command. A call imports the module of its own command only.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import metadata
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from relax_core.api.command import GROUPS
from relax_core.api.errors import printable
from relax_core.cli.terminal import INTERRUPTED, STOPPING, Interrupted, UsageError, fail, say, stop_command
from relax_core.observe.console import EVERY_S, INTERRUPTS, Interrupts, print_waits
from relax_core.registry.commands import Commands, OfferedCommand

ROOT = "relax"


class LazyCommands(Mapping[str, Any]):
    """Parsers of commands by name; each is made on first use. Raises ConfigError for a name that no command has.

    `parent`: name of the command whose verbs these are; empty for the commands of `relax`. `own`: parsers of the verbs
    that the command itself has, which keep their names.
    """

    def __init__(self, parent: str, own: Mapping[str, Any]) -> None:
        self._known = Commands()
        self._parent = parent
        self._parsers = dict(own)
        self.own = dict(own)

    @cached_property
    def offered(self) -> dict[str, OfferedCommand]:
        """All commands but `own`, by the word that calls each."""
        return {name: each for name, each in self._known.below(self._parent).items() if name not in self.own}

    def find(self, name: str) -> OfferedCommand:
        return self._known.find(f"{self._parent} {name}".lstrip(), self.own)

    def __getitem__(self, name: str) -> Any:
        if name not in self._parsers:
            self._parsers[name] = self.find(name).parser(name, CommandGroup)
        return self._parsers[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*self.own, *sorted(self.offered)])

    def __len__(self) -> int:
        return len(self.own) + len(self.offered)

    def __contains__(self, name: object) -> bool:
        return name in self._parsers or (not self._parent and name in self._known.core) or name in self.offered


class CommandGroup(TyperGroup):
    """The parser of `relax`, or of a command with verbs, to which other distributions add verbs."""

    def __init__(self, *, commands: Any = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = LazyCommands("" if self.name == ROOT else self.name or "", commands or {})

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return None if ctx.resilient_parsing and cmd_name not in self.commands else self.commands[cmd_name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a panel for each group of commands; for verbs, write one list."""
        if self.name != ROOT:
            self._listed().format_commands(ctx, formatter)
            return
        panels: dict[str, list[tuple[str, str]]] = {title: [] for title in GROUPS.values()}
        for name, offered in sorted(self.commands.offered.items()):
            panels.setdefault(offered.command.panel, []).append((name, printable(offered.command.help)))
        for title, rows in panels.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete the names of commands without importing the commands."""
        listed = self._listed()
        return listed.shell_complete(listed.make_context(self.name, [], resilient_parsing=True), incomplete)

    def _listed(self) -> TyperGroup:
        """Return a group with the name and help of each command, without importing the commands."""
        listed = TyperGroup(name=self.name, params=self.params, commands=dict(self.commands.own))
        for name, offered in sorted(self.commands.offered.items()):
            listed.add_command(TyperCommand(name, help=offered.command.help))
        return listed

    def invoke(self, ctx: Any) -> object:
        """Run the command; charge an unexpected exception in a plugin's command to the plugin."""
        try:
            return super().invoke(ctx)
        except (UsageError, typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if ctx.invoked_subcommand is None or ctx.invoked_subcommand in self.commands.own:
                raise
            charged = self.commands.find(ctx.invoked_subcommand).charged(error)
            if charged is error:
                raise
            raise charged from error


app = typer.Typer(
    name=ROOT,
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
