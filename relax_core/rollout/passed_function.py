# SPDX-License-Identifier: Apache-2.0
"""Rewards passed from Python: `relax.train(..., rewards=[fn])`. A function gets a name in the catalogue of every process
that reads the configuration; only the reward's own child process ever loads and calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from relax_core.api.errors import ConfigError
from relax_core.api.reward import Reward
from relax_core.api.task import Task
from relax_core.api.trajectory import Trajectory
from relax_core.plugins.catalogue import Catalogue


class PassedFunction(Reward):
    """Stands for a function where its name must be known."""

    def score(self, task: Task, trajectory: Trajectory) -> NoReturn:
        raise NotImplementedError("a reward passed from Python is called in its own process only")


def pack(functions: Iterable[Callable[..., Any]]) -> dict[str, bytes]:
    """Functions by name, as they travel over their parent's own pipe. Raises ConfigError for two of one name."""
    import cloudpickle

    packed: dict[str, bytes] = {}
    for function in functions:
        name = function.__name__.replace("_", "-").strip("-<>") or "function"
        if name in packed:
            raise ConfigError("rewards", f"two functions named {name!r}", "give each its own name")
        packed[name] = cloudpickle.dumps(function)
    return packed


def announce(names: Iterable[str], catalogue: Catalogue) -> None:
    """Let a configuration name them."""
    for name in names:
        catalogue.add("reward", name, type(PassedFunction.__name__, (PassedFunction,), {}))
