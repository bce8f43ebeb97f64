# SPDX-License-Identifier: Apache-2.0
"""Commands to a live run. A command keeps its type from the command line, through run directory and controller, to a role."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from relax_core.api.errors import ConfigError

USER = "user/"
"""Start of the name of every metric that a program logs, so that it never replaces a metric of the run."""
MAX_VALUES = 1000
"""Most values of one `LogMetrics`."""
MAX_TEXT, MAX_TRACEBACK = 2000, 16_000
"""Most characters of the message and of the traceback of a `LogError`; the rest is cut."""
_NAME = re.compile(r"user/[\w.:@%+-]+(/[\w.:@%+-]+)*", re.ASCII)
_MAX_NAME = 128


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
    """Engine that is to leave; several are separated by commas."""
    address: str = ""
    """Address, `HOST:PORT`, of an engine that was started elsewhere and is to join; several are separated by commas."""
    cancel: str = ""
    """Operation to cancel."""
    node: str = ""
    """Address of a machine: all engines of the pool there are to leave, except protected ones."""
    ending: str = ""
    """Address of a machine that is about to end: its engines are to leave every pool of the role, also a busy one, later."""
    keep_partial: bool = False
    """True: if an engine can't join, the engines that did join stay. False: they leave again."""
    timeout_s: float = 0.0
    """Seconds in which the engines that join must serve; else all of them leave again. 0: no limit."""


@dataclass(frozen=True, slots=True)
class LogMetrics:
    """Record values of a program that is not a role of the run, in `metrics.jsonl` and in every sink.

    Raises ConfigError for a name outside `user/`, for characters that a sink can't show, and for a value that is not finite.
    """

    values: Mapping[str, float]
    step: int | None = None
    """Step over all stages, 0 for a time before the first one; None: the step that is trained now."""

    def __post_init__(self) -> None:
        if not 0 < len(self.values) <= MAX_VALUES:
            raise ConfigError("metrics", f"{len(self.values)} values", f"give 1 to {MAX_VALUES} at once")
        if self.step is not None and self.step < 0:
            raise ConfigError("step", self.step, "give a step from 0, or none for the step that is trained now")
        for name, value in self.values.items():
            if not name.startswith(USER):
                raise ConfigError("metrics", repr(name[:_MAX_NAME]), f"log it as {f'{USER}{name}'[:_MAX_NAME]!r}")
            if len(name) > _MAX_NAME or not _NAME.fullmatch(name):
                fix = f"use at most {_MAX_NAME} letters, digits and . _ - : @ % + in parts divided by /"
                raise ConfigError("metrics", repr(name[:_MAX_NAME]), fix)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigError(name, repr(value)[:40], "log a finite number")


@dataclass(frozen=True, slots=True)
class ClearMetrics:
    """Forget logged values that wait for the end of their step. Recorded values stay."""

    step: int | None = None
    """Only the values of this step; None: of all steps."""


@dataclass(frozen=True, slots=True)
class LogError:
    """Record an error of a program that is not a role of the run, in the run's log."""

    message: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Autoscale:
    """Turn the scaling policy of `[autoscale]` on or off. A policy that is turned on starts anew."""

    enabled: bool


Command: TypeAlias = (
    Pause | Continue | Stop | SaveCheckpoint | Evaluate | Profile | ScaleRequest | LogMetrics | ClearMetrics | LogError
    | Autoscale
)  # fmt: skip
COMMANDS: Mapping[str, type[Command]] = {
    "pause": Pause, "continue": Continue, "stop": Stop, "checkpoint": SaveCheckpoint, "evaluate": Evaluate,
    "profile": Profile, "scale": ScaleRequest, "log-metrics": LogMetrics, "clear-metrics": ClearMetrics,
    "log-error": LogError, "autoscale": Autoscale,
}  # fmt: skip
"""Name of each command in files and in the control API -> its type."""
NAMES: Mapping[type[Command], str] = {kind: name for name, kind in COMMANDS.items()}


def named_command(name: str, **fields: Any) -> Command:
    """Return a command by its name. Raises KeyError for an unknown name, TypeError for a missing or unknown field."""
    kind: Any = COMMANDS[name]
    command: Command = kind(**fields)
    return command
