# SPDX-License-Identifier: Apache-2.0
"""Commands of `relax`, which any installed distribution can add.

A command is one entry point of the group `relax.commands`. Its name holds the command's name, group and help, so that
`relax --help` reads metadata only and imports no plugin:

    [project.entry-points."relax.commands"]
    "greet | watch | Greet a run." = "my_package.greet:greet"

A name of two words adds a verb to another command: `"data greet | watch | Greet a run."` is called after `relax data`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from relax_core.api.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

COMMANDS = "relax.commands"
"""Group of the entry points."""
GROUPS: Mapping[str, str] = {
    "run": "Train and evaluate",
    "prepare": "Prepare a run",
    "watch": "Watch runs",
    "control": "Control a live run",
    "results": "Use results",
    "debug": "Debug and measure",
    "plugins": "Plugins",
}
"""Group of the core's commands -> title of its panel in `relax --help`, in the order of the panels."""


KEBAB = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
"""Form of the names of components, and of each word of a command's name."""
TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""Form of the strings that name the targets of commands and the classes of components."""


@dataclass(frozen=True, slots=True)
class RelaxCommand:
    """A command of `relax`, as the metadata of its distribution describes it."""

    name: str
    """Word that follows `relax`, in kebab-case; two words for a verb of another command, such as `plugins check`."""
    group: str
    """Key of GROUPS, or another word in kebab-case, which names a panel of its own."""
    help: str
    """First line of the documentation that `relax NAME --help` prints."""
    target: str
    """A function with typer annotations, or a `typer.Typer` for several verbs, as `package.module:name`."""

    @property
    def panel(self) -> str:
        """Title of the command's panel in `relax --help`."""
        return GROUPS.get(self.group, self.group.replace("-", " ").capitalize())

    @property
    def parent(self) -> str:
        """Name of the command that gets this command as a verb; empty for a command that follows `relax`."""
        return self.name.rpartition(" ")[0]

    def qualified(self, distribution: str) -> str:
        """Return the words that call this command of this distribution, such as `plugins DISTRIBUTION:check`."""
        parent, _, word = self.name.rpartition(" ")
        return f"{parent} {distribution}:{word}".lstrip()

    @classmethod
    def parse(cls, entry: EntryPoint) -> Self:
        """Return the command of an entry point. Raises ConfigError."""
        where = f"{entry.dist.name}: {COMMANDS}" if entry.dist is not None else COMMANDS
        name, group, text = ([field.strip() for field in entry.name.split("|", 2)] + ["", ""])[:3]
        words = [*name.split(" "), group]
        if not (all(map(KEBAB.fullmatch, words)) and len(words) <= 3 and text):
            fix = 'name the entry point "NAME | GROUP | HELP", the words of NAME and GROUP in kebab-case'
            raise ConfigError(where, repr(entry.name), fix)
        if not TARGET.fullmatch(entry.value):
            raise ConfigError(where, repr(entry.value), f"write the target of {name} as package.module:name")
        return cls(name, group, text, entry.value)
