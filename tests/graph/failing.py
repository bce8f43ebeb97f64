# SPDX-License-Identifier: Apache-2.0
"""Components that kill their own process once, at a named point of a run, so that a test of a fault needs no timing.

The engine dies with requests on it, a reward process while it scores, and a trainer rank in the middle of a step. Each leaves
a mark beside the copy of this file that the run loads, and does not die again. `failing(folder)` gives the arguments of
`relax train` that choose the components; `failing_engine(folder)` chooses the engine alone.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from relax_plugin_rewards.exact import Exact
from relax_plugin_torch.rank import Rank
from relax_plugin_transformers.engine import TransformersEngine

from relax_core.api import Chunk, Delta, GenerateRequest, Manifest, Task, Trajectory, Version

ENGINE_DIES_AT, RANK_DIES_AT = 2, 3
"""Steps of the weights that the engine serves, and that the rank trains, when each dies."""


def failing(folder: Path) -> tuple[str, ...]:
    """Make the folder for the marks, outside of the working directory: there a reward's process may not write."""
    return (*failing_engine(folder), "trainer=failing-trainer", 'rewards=["failing-reward"]')


def failing_engine(folder: Path) -> tuple[str, ...]:
    folder.mkdir()
    copy = shutil.copy(__file__, folder / "failing_components.py")
    return (f'plugins=["{copy}"]', "engine=failing-engine")


def die_once(name: str) -> None:
    """Kill this process, unless the mark `name` shows that one was killed before."""
    try:
        os.close(os.open(Path(__file__).with_name(f"{name}.died"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


class FailingEngine(TransformersEngine):
    """Generate as `transformers` does, and die with the first requests after `ENGINE_DIES_AT` steps."""

    _step = 0

    def _load(self, thread: Any, manifest: Manifest, staged: Any) -> None:
        super()._load(thread, manifest, staged)
        self._step = manifest.version.step

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Sequence[Delta]]:
        if self._step >= ENGINE_DIES_AT:
            die_once("engine")
        return super().generate(requests)


class FailingReward(Exact):
    """Score as `exact` does, and die at the first sample after the engine has died."""

    def score(self, task: Task, trajectory: Trajectory) -> float:
        if Path(__file__).with_name("engine.died").exists():
            die_once("reward")
        return super().score(task, trajectory)


class FailingTrainer(Rank):
    """Train as `torch` does; the first rank that accumulates in the step after `RANK_DIES_AT` dies."""

    _step = 0

    def begin_step(self, version: Version) -> None:
        super().begin_step(version)
        self._step = version.step

    def accumulate(self, chunk: Chunk, last: bool) -> None:
        super().accumulate(chunk, last)
        if self._step >= RANK_DIES_AT:
            die_once("rank")
