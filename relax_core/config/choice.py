# SPDX-License-Identifier: Apache-2.0
"""A component table in its resolved form: the chosen component, and the core's own keys of that table.

`CHOICES` says which tables have core keys; every other table holds a name and the component's options only.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from relax_core.api.options import Options
from relax_core.api.trainer import Chosen
from relax_core.config.annotation import PathText


class Choice(Options):
    """One component, chosen."""

    chosen: Chosen
    """Kind, name and options as plain data."""

    @property
    def name(self) -> str:
        return self.chosen.name

    def dump(self) -> dict[str, Any]:
        """The table as a person writes it: name, core keys, options."""
        keys = self.model_dump(mode="json", exclude={"chosen"}, exclude_none=True)
        return {"name": self.chosen.name, **keys, **self.chosen.options}


class BackendKeys(Options):
    """The core's keys of an engine or a trainer."""

    python: PathText = ""
    """Interpreter it runs in, such as `venvs/sglang/bin/python`; empty: this one."""


class RewardKeys(Options):
    """The core's keys of a reward."""

    weight: float = 1.0
    """Factor in the sum of rewards."""
    timeout_s: PositiveFloat = 10.0
    """Longest time for one sample; then it is killed and the sample's outcome is `reward_timeout`."""
    memory_mb: NonNegativeInt = 0
    """Memory limit of its process; 0: none."""
    only: str = Field("", pattern=r"^$|^[^=]+=")
    """Judge only tasks in which a column has this value, `source=algebra`; a dot goes into a table of the column."""


class MediaKeys(Options):
    """The core's keys of a modality processor."""

    timeout_s: PositiveFloat = 30.0
    """Longest time for one medium, reading it included; then it is killed and the outcome of its samples is `media_error`."""
    memory_mb: NonNegativeInt = 4096
    """Memory limit of its process; 0: none."""
    max_mb: PositiveInt = 256
    """Larger files, and longer answers of a URL, are refused."""
    preview_kb: NonNegativeInt = 512
    """Largest copy of a medium that is kept for the report page, where samples are shown; 0: none."""


class WeightKeys(Options):
    """The core's keys of the weight service."""

    payload: Literal["full", "delta"] = "full"
    """What is published: all tensors, or only the bytes that changed. Adapters (`model.lora`) travel alone
    where engine and transport take them, whatever stands here."""
    full_every: PositiveInt = 16
    """delta: a full version this often, so that a new engine has few deltas to load on top of it."""
    proof: Literal["auto", "wire", "resident", "behaviour"] = "auto"
    """What an engine must prove before it serves: the bytes that arrived, those in its memory, or that it gives a short
    sequence the trainer's log-probs too; `auto` is the bytes in its memory where it can tell, else those that arrived."""
    tolerance: PositiveFloat = 0.05
    """behaviour: largest difference of a log-prob."""
    timeout_s: PositiveFloat = 300.0
    """Deadline of a publish for one engine; one that is slower is replaced, the others go on."""


class WeightChoice(WeightKeys, Choice):
    """The transport of weights."""


class BackendChoice(BackendKeys, Choice):
    """An engine or a trainer."""


class RewardChoice(RewardKeys, Choice):
    """A reward."""


class MediaChoice(MediaKeys, Choice):
    """A modality processor."""


class EnvironmentKeys(Options):
    """The core's keys of a further environment."""

    algorithm: dict[str, Any] = {}
    """What learns from tasks of this environment: a name, or a table with a name and its options. Empty: the run's."""


class EnvironmentChoice(EnvironmentKeys, Choice):
    """An environment for the tasks that name it."""

    @property
    def learner(self) -> Chosen | None:
        """Its own algorithm."""
        options = dict(self.algorithm)
        return Chosen("algorithm", options.pop("name"), options) if options else None


CHOICES: dict[str, type[Choice]] = {
    "environments": EnvironmentChoice,
    "engine": BackendChoice,
    "trainer": BackendChoice,
    "rewards": RewardChoice,
    "media": MediaChoice,
    "weights": WeightChoice,
}
KEYS: dict[str, type[Options]] = {
    "environments": EnvironmentKeys,
    "engine": BackendKeys,
    "trainer": BackendKeys,
    "rewards": RewardKeys,
    "media": MediaKeys,
    "weights": WeightKeys,
}
OUTLIVE_NAME = frozenset({"weight", "timeout_s", "memory_mb", "only", *WeightKeys.model_fields})
"""Core keys that say nothing about the component, and so stay when another one is chosen."""
DEFAULT_NAMES = {
    "engine": "transformers",
    "trainer": "torch",
    "algorithm": "grpo",
    "environment": "single-turn",
    "family": "chat",
    "source": "files",
    "sampler": "shuffle",
    "weights": "shared-memory",
}
RUNNER_BUS = {"local": "in-process", "inline": "in-process", "ray": "ray"}


def choice_model(table: str) -> type[Choice]:
    """The resolved form of a component table."""
    return CHOICES.get(table, Choice)


def keys_model(table: str) -> type[Options]:
    """The core's own keys of a component table."""
    return KEYS.get(table, Options)


def core_keys(table: str) -> tuple[str, ...]:
    """Their names; `name` is not among them."""
    return tuple(keys_model(table).model_fields)
