# SPDX-License-Identifier: Apache-2.0
"""Commands to a live run. A command keeps its type from the command line, through run directory and controller, to a role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Pause:
    """Pause the run after the current step."""


@dataclass(frozen=True, slots=True)
class Continue:
    """Continue a paused run."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Save a checkpoint and end the run."""


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Save a checkpoint after the current step."""


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate the policy on the run's evaluation sets after the current step."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Record profiles of the next steps."""

    steps: int


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """Change the number of a pool's engines, or cancel such a change."""

    key: str
    """The caller's idempotency key, new for each change."""
    pool: str = "rollout"
    target: int | None = None
    """Number of engines that the pool is to have; None if `engine`, `node`, `address` or `cancel` is given."""
    engine: str = ""
    """Engine that is to leave."""
    address: str = ""
    """Address, `HOST:PORT`, of an engine that was started elsewhere and is to join."""
    cancel: str = ""
    """Operation to cancel."""
    node: str = ""
    """Address of a machine: all engines of the pool there are to leave, except protected ones."""
    ending: str = ""
    """Address of a machine that is about to end: its engines are to leave every pool of the role, also a busy one, later."""
    keep_partial: bool = False
    """True: if an engine can't join, the engines that did join stay. False: they leave again."""


Command: TypeAlias = Pause | Continue | Stop | SaveCheckpoint | Evaluate | Profile | ScaleRequest
COMMANDS: Mapping[str, type[Command]] = {
    "pause": Pause, "continue": Continue, "stop": Stop, "checkpoint": SaveCheckpoint, "evaluate": Evaluate,
    "profile": Profile, "scale": ScaleRequest,
}  # fmt: skip
"""Name of each command in files and in the control API -> its type."""
NAMES: Mapping[type[Command], str] = {kind: name for name, kind in COMMANDS.items()}


def named_command(name: str, **fields: Any) -> Command:
    """Return a command by its name. Raises KeyError for an unknown name, TypeError for a missing or unknown field."""
    kind: Any = COMMANDS[name]
    command: Command = kind(**fields)
    return command
