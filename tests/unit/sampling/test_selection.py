# SPDX-License-Identifier: Apache-2.0
"""Filters and samplers in a run: dropped groups are replaced and told, and what a sampler learned survives a stop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_core.api.batch import AttemptId
from relax_core.api.errors import RelaxError
from relax_core.api.events import RolloutMeasured, SamplesScored
from relax_core.api.role import SystemClock
from relax_core.api.source import Filter, Sampler
from relax_core.api.trajectory import Outcome
from relax_core.api.weights import Version
from relax_core.bus.service import open_bus
from relax_core.bus.store import InProcessBus
from relax_core.rewards.host import ScoredSample
from relax_core.runners.launch import bus_settings
from relax_core.sampling.groups import Selection
from tests.unit.roles.simulated_run import SimulatedRun

CHOOSY = '''
# SPDX-License-Identifier: Apache-2.0
"""A filter and a sampler."""
from relax_core.api import Filter, Options, Sampler


class ChoosyOptions(Options):
    every: int = 3


class Choosy(Filter[ChoosyOptions]):
    def reject(self, task, attempts, trajectories, rewards):
        return "" if attempts[0].group % self.options.every else "not to my taste"


class Counting(Sampler):
    seen = 0

    def open(self, tasks):
        self.tasks = tasks

    def pick(self, group, num_tasks, seed):
        assert len(self.tasks) == num_tasks
        return group % num_tasks

    def learned(self, group, task, rewards):
        self.seen += 1

    def state(self):
        return {"seen": self.seen}

    def load(self, state):
        self.seen = state["seen"]

'''
STEPS, SAMPLES = 6, 16


@pytest.fixture
def choosy(tmp_path: Path) -> str:
    path = tmp_path / "choosy.py"
    path.write_text(CHOOSY)
    return str(path)


def simulation(folder: Path, plugin: str, **settings: object) -> SimulatedRun:
    return SimulatedRun(folder / "run", more=(plugin,), **{"steps": STEPS, **settings})


def test_rejected_groups_are_replaced_counted_and_reported(tmp_path: Path, choosy: str) -> None:
    outcome = simulation(tmp_path, choosy, filters=["choosy"]).run()
    assert outcome.account.trained == STEPS * SAMPLES and outcome.account.balanced
    assert outcome.account.dropped["filtered"] >= STEPS * SAMPLES // 3
    told = sum(e.metrics.get("samples/filtered/choosy", 0.0) for e in outcome.events if isinstance(e, RolloutMeasured))
    records = [record for event in outcome.events if isinstance(event, SamplesScored) for record in event.samples]
    filtered = [record for record in records if "filtered" in record]
    assert told == len(filtered) == outcome.account.dropped["filtered"]
    assert {record["filtered"] for record in filtered} == {"choosy: not to my taste"}
    assert all(record["group_id"] % 3 == 0 for record in filtered)


def test_a_run_whose_groups_are_all_rejected_ends_with_the_reason(tmp_path: Path, choosy: str) -> None:
    settings = {"filters": [{"name": "choosy", "every": 1}], "rollout": {"refill_limit": 2, "groups_per_step": 4}}
    with pytest.raises(BaseExceptionGroup) as failed:
        simulation(tmp_path, choosy, **settings).run()
    assert failed.group_contains(RelaxError, match=r"rejected the last 8 groups \(choosy \(not to my taste\): 8\)")


def test_spare_groups_are_dropped_and_never_waited_for(tmp_path: Path, choosy: str) -> None:
    engine = {"name": "scripted-engine", "straggler": 40}
    rollout = {"groups_per_step": 4, "group_size": 4, "max_new_tokens": 64}
    plain = simulation(tmp_path / "plain", choosy, engine=engine, max_staleness=0, rollout=rollout).run()
    spared = simulation(
        tmp_path / "spare", choosy, engine=engine, max_staleness=0, rollout={**rollout, "spare_groups": 2}
    ).run()
    assert spared.account.trained == plain.account.trained == STEPS * SAMPLES
    assert spared.account.dropped.get("spare", 0) > 0 and spared.account.balanced
    assert spared.seconds < plain.seconds


def test_a_samplers_state_is_restored_when_the_run_continues(tmp_path: Path, choosy: str) -> None:
    """As of the version that it continues at: what was learned later is learned again."""
    simulation_ = simulation(tmp_path, choosy, sampler="counting", deterministic=True, max_staleness=0)
    groups = simulation_.run().account.trained // 4

    async def seen(step: int) -> int:
        settings = bus_settings(simulation_.launch)
        bus = await open_bus(
            InProcessBus(), settings, simulation_.launch.run_dir, Version("actor", 0, step), SystemClock()
        )
        kept = await bus.kept("selection")
        await bus.close()
        return kept["state"]["seen"] if kept else 0

    found = [asyncio.run(seen(step)) for step in (STEPS, STEPS - 2, 0)]
    assert found == [groups, groups - 2 * groups // STEPS, 0]


class Heard(Sampler):
    """Remembers the rewards that it is given."""

    rewards: Sequence[float] = ()

    def pick(self, group: int, num_tasks: int, seed: int) -> int:
        return num_tasks - 1

    def learned(self, group: int, task: int, rewards: Sequence[float]) -> None:
        self.rewards = rewards


class Asked(Filter):
    """Remembers the rewards that it is asked about, and rejects the groups of even numbers."""

    rewards: Sequence[float] = ()

    def reject(self, task: Any, attempts: Any, trajectories: Any, rewards: Sequence[float]) -> str:
        self.rewards = rewards
        return "" if attempts[0].group % 2 else "even"


def _scored(number: int) -> Any:
    """A finished group of two samples, of which one has no verdict."""
    scores = [ScoredSample(0.0), ScoredSample(0.5, outcome=Outcome.REWARD_TIMEOUT)]
    issue = SimpleNamespace(group=number, attempts=[AttemptId(number, 0, 0)])
    return SimpleNamespace(issue=issue, scores=scores, unfit="", task=None, trajectories=(), rejected_by="", reason="")


def test_samples_without_a_verdict_teach_a_sampler_nothing_and_are_nan_to_a_filter() -> None:
    sampler, rule = Heard(), Asked()
    selection = Selection(sampler, {"asked": rule}, [], [3, 5], 0, 2)  # type: ignore[arg-type]
    assert selection.task(1) == 5, "the pick is an index into the tasks to train on"
    group = _scored(1)
    selection.take([group])
    assert list(sampler.rewards) == [0.0] and group.rejected_by == ""
    assert rule.rewards[0] == 0.0 and math.isnan(rule.rewards[1])


def test_a_group_that_is_kept_ends_a_series_of_rejections() -> None:
    selection = Selection(Heard(), {"asked": Asked()}, [], [3, 5], 0, 2)  # type: ignore[arg-type]
    for number in range(5):
        selection.task(number)
        selection.take([_scored(number)])
    selection.task(6)
    with pytest.raises(RelaxError, match=r"rejected the last 2 groups \(asked \(even\): 2\)"):
        selection.take([_scored(6)])
