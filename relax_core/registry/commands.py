# SPDX-License-Identifier: Apache-2.0
"""The commands of all installed distributions, read from metadata; a command's module is imported when it is called.

A name belongs to the core if the core has it, else to the only distribution that offers it. Every other command is called
as `DISTRIBUTION:NAME`. A name of two words, such as `plugins check`, is a verb of another command.
"""

from __future__ import annotations

import os
import pkgutil
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from relax_core.api.command import COMMANDS, RelaxCommand
from relax_core.api.errors import ConfigError, InfrastructureError, PluginError, RelaxError
from relax_core.registry.handshake import CORE, PluginState, Record
from relax_core.registry.installed import installed

if TYPE_CHECKING:
    from typer.core import TyperCommand, TyperGroup

    Command: TypeAlias = TyperCommand | TyperGroup


class OfferedCommand(NamedTuple):
    """A command with the record of its distribution."""

    command: RelaxCommand
    record: Record

    def parser(self, name: str, group: type[TyperGroup] | None = None) -> Command:
        """Import the target and return typer's parser of it, called `name`. Raises PluginError for a fault of a plugin.

        `group`: class of the parser of several verbs, unless the target names its own.
        """
        import typer

        parent = typer.Typer(rich_markup_mode=None)
        try:
            target = pkgutil.resolve_name(self.command.target)
            if not isinstance(target, typer.Typer):
                parent.command(name)(target)
            elif target.registered_callback or target.registered_groups or len(target.registered_commands) > 1:
                own_class = target.info.cls if isinstance(target.info.cls, type) else None
                parent.add_typer(target, name=name, cls=own_class or group)
            else:  # one command, with settings that only a `typer.Typer` can have
                parent.registered_commands = target.registered_commands
            (parser,) = typer.main.get_group(parent).commands.values()
        except (Exception, SystemExit) as error:
            raise self.charged(error, f"no command can be made of {self.command.target}: ") from error
        return cast("Command", parser)

    def charged(self, error: BaseException, failed: str = "") -> BaseException:
        """Return the error to report for an exception in this command; a plugin's fault is charged to its distribution."""
        if self.record.distribution == CORE or isinstance(error, RelaxError):
            return error
        from relax_core.registry.catalogue import extra_for
        from relax_core.registry.error_text import plugin_frames, said

        title = f"command {self.command.name!r} of {self.record.title}"
        if extra := extra_for(self.record.distribution, error):
            return ConfigError(title, f"no package {error.name}", f"pip install '{extra}'")  # type: ignore[attr-defined]
        return PluginError(title, f"{failed}{said(error)}", plugin_frames(error))


class Commands:
    """The commands that can be called, by the name that follows `relax`."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ

    @cached_property
    def core(self) -> dict[str, OfferedCommand]:
        """The core's own commands. Raises InfrastructureError if the installation lists none."""
        try:
            own_commands = _offered(installed(self._environ, distribution(CORE).entry_points.select(group=COMMANDS)))
        except PackageNotFoundError:
            own_commands = []
        if not own_commands:
            raise InfrastructureError(f"the metadata of {CORE} lists no commands; install {CORE} again")
        return {offered.command.name: offered for offered in own_commands}

    @cached_property
    def _others(self) -> list[OfferedCommand]:
        """The commands of all other distributions, also of those that are skipped."""
        all_offered = _offered(installed(self._environ, entry_points(group=COMMANDS)))
        return [offered for offered in all_offered if offered.record.distribution != CORE]

    @cached_property
    def by_name(self) -> dict[str, OfferedCommand]:
        """All commands that can be called, by the name that calls each."""
        others = [offered for offered in self._others if offered.record.state is PluginState.OK]
        times = Counter([*self.core, *(offered.command.name for offered in others)])
        return self.core | {
            name if times[name] == 1 else offered.command.qualified(offered.record.distribution): offered
            for offered in others
            for name in [offered.command.name]
        }

    def below(self, parent: str) -> dict[str, OfferedCommand]:
        """Return the verbs that distributions add to the command `parent`, by word; "": the commands of `relax`."""
        return {
            name.rpartition(" ")[2]: offered
            for name, offered in self.by_name.items()
            if offered.command.parent == parent
        }

    def find(self, name: str, also: Iterable[str] = ()) -> OfferedCommand:
        """Return the command with this name, or `DISTRIBUTION:NAME`. Raises ConfigError with the cause for other names.

        `also`: further words that the error may suggest in place of the last word of the name.
        """
        if name in self.core:
            return self.core[name]
        parent, _, word = name.rpartition(" ")
        wanted, _, word = word.rpartition(":")
        bare = f"{parent} {word}".lstrip()
        matches = [
            offered
            for offered in (*self.core.values(), *self._others)
            if offered.command.name == bare and wanted in ("", offered.record.distribution)
        ]
        usable = [offered for offered in matches if offered.record.state is PluginState.OK]
        if len(usable) == 1:
            return usable[0]
        if usable:
            written = " or ".join(f"relax {each.command.qualified(each.record.distribution)}" for each in usable)
            fix = f"several plugins have this command; write {written}"
        elif matches:
            fix = f"{matches[0].record.title} offers it but was skipped: {matches[0].record.reason}"
        else:
            from relax_core.registry.catalogue import installable
            from relax_core.registry.error_text import did_you_mean

            home = installable().get("command", {}).get(bare, "")
            is_absent = home and wanted in ("", home)
            install = f"its plugin is not installed; pip install {home}"
            fix = install if is_absent else did_you_mean(word, {*self.below(parent), *also})
        raise ConfigError("command", repr(name), fix)


def _offered(records: Iterable[Record]) -> list[OfferedCommand]:
    return [OfferedCommand(command, record) for record in records for command in record.commands]
