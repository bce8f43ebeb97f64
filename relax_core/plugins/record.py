# SPDX-License-Identifier: Apache-2.0
"""A record: what is known of one plugin, loaded or not. Plain data, so that listing and workers can pass it on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from relax_core.api.component import Component


class State(StrEnum):
    """Where a plugin stands after discovery."""

    OK = "ok"
    SKIPPED = "skipped"
    """Never imported: switched off by the environment, or its API range does not hold this core."""
    BROKEN = "broken"
    """Its import or one of its hooks failed."""


class Offered(NamedTuple):
    """A component under the kind of the hook that returned it."""

    kind: str
    component: Component


@dataclass(frozen=True, slots=True)
class Record:
    """One entry point of one distribution, one single file, or what was passed from Python."""

    name: str
    """The entry point's name, or the file's."""
    distribution: str
    version: str
    module: str
    location: str
    """Where its code lies; for an editable installation the project's directory."""
    editable: bool = False
    file: bool = False
    """A single-file plugin: it has neither distribution nor version of its own."""
    api_range: str = ""
    """Which relax-core it was written for, as its own metadata says."""
    state: State = State.OK
    reason: str = ""
    frames: str = ""
    """The traceback inside the plugin, where it is broken."""
    components: tuple[Offered, ...] = ()
    hooks: tuple[str, ...] = ()
    """Observer hooks it implements."""
    notes: tuple[str, ...] = ()
    """What a person should know though it works: a name that another plugin has too."""

    @property
    def title(self) -> str:
        """The plugin as a sentence names it."""
        return f"{self.distribution} {self.version}".rstrip()

    def as_dict(self) -> dict[str, Any]:
        """The record as `relax plugins list --json` prints it."""
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "location": self.location,
            "editable": self.editable,
            "api_range": self.api_range,
            "state": str(self.state),
            "reason": self.reason,
            "frames": self.frames,
            "components": [
                {
                    "kind": kind,
                    "name": component.name,
                    "target": component.target,
                    "help": component.help,
                    "experimental": component.experimental,
                }
                for kind, component in self.components
            ],
            "hooks": list(self.hooks),
            "notes": list(self.notes),
        }
