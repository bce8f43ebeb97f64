# SPDX-License-Identifier: Apache-2.0
"""Core tables of how the experiment is run: placement, checkpoints, the run itself, notifications.

They may change on resume; the experiment's tables (`training.py`) may not.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator
from pydantic_core import PydanticCustomError

from relax_core.api.options import Options
from relax_core.api.secret import LITERAL, Secret

CREDENTIALS = frozenset({"TOKEN", "SECRET", "PASSWORD", "KEY"})


Share = Literal["", "own", "actor", "rollout"]
SHARES: dict[str, dict[str, Share]] = {
    "colocate": {"rollout": "actor", "actor_fwd": "actor", "reference": "actor", "teacher": "actor",
                 "critic": "actor"},
    "hybrid": {"actor_fwd": "actor", "reference": "actor", "teacher": "actor", "critic": "actor"},
    "async": {},
}  # fmt: skip
"""Modes are presets: whose devices each role uses; one that is not named has its own."""


class EnginePlacement(Options):
    """Where the engines run."""

    engines: PositiveInt = 1
    """Engine processes."""
    gpus_per_engine: NonNegativeFloat | None = None
    """Devices of one engine; 0: none; absent: where there are any, as many as the engine's options spread it over."""
    threads: NonNegativeInt = 0
    """CPU threads of one engine; 0: an equal share of the cores."""
    share: Share = ""
    """Whose devices the engines use, in turns: a role's, or `own`; empty: as the mode says."""
    requests_per_engine: PositiveInt = 1024
    """Requests that one engine is given at once; others wait for the first engine that has room."""
    backlog: PositiveInt = 1024
    """Requests that may wait beyond those that the engines run; while it is full no group is begun, and turns wait."""
    silence_s: PositiveFloat = 20.0
    """An engine that does not answer for so long is asked whether it lives; one that does not say so in as long is replaced."""


class RankPlacement(Options):
    """Where the ranks of a training role run."""

    ranks: PositiveInt = 1
    """Processes."""
    gpus_per_rank: NonNegativeFloat | None = None
    """Devices of one rank; 0: none; absent: 1 where there are any."""
    threads: NonNegativeInt = 0
    """CPU threads of one rank; 0: an equal share of the cores."""
    share: Share = ""
    """Whose devices the ranks use, in turns: a role's, or `own`; empty: as the mode says. The actor has its own."""


class PlacementTable(Options):
    """Who runs where; `placement = "async"` is short for the mode alone."""

    mode: Literal["colocate", "hybrid", "async"] = "colocate"
    """`colocate`: rollout and trainer take turns on the same devices; `hybrid`: rollout has its own;
    `async`: the forward roles have their own too."""
    rollout: EnginePlacement = EnginePlacement()
    """Engines."""
    actor: RankPlacement = RankPlacement()
    """Ranks that train the policy."""
    actor_fwd: RankPlacement = RankPlacement()
    """Ranks that compute log-probs under the step's starting weights; on the actor's devices it does so itself."""
    reference: RankPlacement = RankPlacement()
    """Ranks that compute log-probs under the reference."""
    critic: RankPlacement = RankPlacement()
    """Ranks that train the critic and compute values."""
    teacher: RankPlacement = RankPlacement()
    """Ranks of each teacher; several teachers take turns on the same devices."""
    check_memory: bool = True
    """Refuse at the start what surely can't fit into the memory that is free; `--anyway` is short for false."""

    def home(self, role: str) -> str:
        """The role whose devices a role is on: its own name where they are its own."""
        if role == "actor":
            return role
        share: str = getattr(self, role).share or SHARES[self.mode].get(role, "own")
        return role if share in ("own", role) else self.home(share)


class CheckpointTable(Options):
    """What a run continues from."""

    every: NonNegativeInt = 50
    """Steps between checkpoints, and one at the end or at Ctrl-C; 0: only those."""
    keep: PositiveInt = 2
    """Checkpoints kept; older ones are deleted."""
    background: bool = True
    """Write them while training goes on, from a copy in the host's memory; false: training waits until they are on disk.
    With a critic it always waits."""


class RunTable(Options):
    """The run's name and surroundings."""

    name: str = ""
    """Shown in reports and sinks; empty: from the file's name."""
    tags: tuple[str, ...] = ()
    """Words to find it by."""
    notes: str = ""
    """Free text for the report."""
    runner: Literal["ray", "local"] = "local"
    """`local`: child processes of this one; `ray`: Ray Serve, on one machine or many."""
    env: dict[str, Annotated[Secret | str, Field(union_mode="left_to_right")]] = {}
    """Environment variables of the workers; credentials as `"env:NAME"` or `"file:PATH"`."""

    @field_validator("env")
    @classmethod
    def _no_literal_credentials(cls, env: dict[str, Secret | str]) -> dict[str, Secret | str]:
        for name, value in env.items():
            if isinstance(value, str) and CREDENTIALS & set(name.upper().split("_")):
                raise PydanticCustomError(LITERAL, f'write {name} as "env:NAME" or "file:PATH", never the value itself')
        return env

    def revealed_env(self) -> dict[str, str]:
        """The variables with their secrets read, for the process that gets them."""
        return {name: value.reveal() if isinstance(value, Secret) else value for name, value in self.env.items()}


class NotifyTable(Options):
    """Who is told when a run ends or fails."""

    urls: tuple[Secret, ...] = ()
    """Apprise addresses, each as `"env:NAME"` or `"file:PATH"`: they hold credentials."""
