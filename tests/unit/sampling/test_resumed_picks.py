# SPDX-License-Identifier: Apache-2.0
"""A group keeps its task when a run resumes, a role restarts or a step is undone, also if the sampler counts its picks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from relax_core.api.events import StepFinished
from relax_core.api.role import SystemClock
from relax_core.api.source import Sampler
from relax_core.api.weights import Version
from relax_core.bus.service import open_bus
from relax_core.bus.store import InProcessBus
from relax_core.runners.launch import bus_settings
from relax_core.sampling.groups import Selection
from tests.unit.roles.simulated_run import SimulatedRun

PLUGIN = '''
# SPDX-License-Identifier: Apache-2.0
"""Samplers that hand out the tasks in turn."""
from relax_core.api import Sampler


class InTurn(Sampler):
    """Its state is empty after each epoch."""

    taken = 0

    def pick(self, group, num_tasks, seed):
        self.taken = (self.taken + 1) % num_tasks
        return self.taken

    def state(self):
        return {"taken": self.taken} if self.taken else {}

    def load(self, state):
        self.taken = state["taken"]


class FromAnywhere(InTurn):
    """Each instance starts with another task, so only its state says which task follows."""

    instances = 0

    def __init__(self, options=None):
        super().__init__(options)
        FromAnywhere.instances += 1
        self.taken = 3 * self.instances

    def state(self):
        return {"taken": self.taken}
'''
TASKS, STEPS = 10, 6


def simulation(folder: Path, sampler: str, algorithm: str, **settings: Any) -> SimulatedRun:
    folder.mkdir(parents=True, exist_ok=True)
    data, plugin = folder / "data.jsonl", folder / "in_turn.py"
    plugin.write_text(PLUGIN)
    rows = [{"prompt": f"p{at}", "completion": "yes", "source": "abc"[at % 3]} for at in range(TASKS)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = {} if algorithm == "grpo" else {"rewards": []}
    table: dict[str, Any] = {"data": {"train": str(data)}, "steps": STEPS, **rewards, **settings}
    return SimulatedRun(folder / "run", (str(plugin),), algorithm=algorithm, sampler=sampler, **table)


def selection_of(run: SimulatedRun) -> Selection:
    """Return the picks of a new process of this run, without what an earlier process stored."""
    made: Any = run.catalogue.build(run.config.sampler.chosen, Sampler)
    kinds = [{"source": "abc"[at % 3]} for at in range(TASKS)]

    class Rows(list[Any]):
        def __getitem__(self, at: Any) -> Any:
            return type("Row", (), {"column": lambda self, name: kinds[at].get(name)})()

    return Selection(made, {}, Rows(range(TASKS)), range(TASKS), run.config.seed, 0)  # type: ignore[arg-type]


def uninterrupted(run: SimulatedRun, count: int = 100) -> dict[int, int]:
    selection = selection_of(run)
    return {group: selection.task(group) for group in range(count)}


async def resumed(run: SimulatedRun, step: int) -> dict[int, int]:
    """Return the tasks of all groups that a run resumed from `step` issues again, and of the next new ones."""
    bus = await open_bus(
        InProcessBus(), bus_settings(run.launch), run.launch.run_dir, Version("actor", 0, step), SystemClock()
    )
    try:
        selection = selection_of(run)
        await selection.restore(bus)
        ledger = bus.queue.ledger
        groups = [number for number, _, _ in ledger.pending] + [ledger.next_group + more for more in range(TASKS)]
        return {group: selection.task(group) for group in groups}
    finally:
        await bus.close()


RUNS: dict[str, dict[str, Any]] = {
    "rows ahead of the actor": {"algorithm": "sft"},
    "on policy": {"algorithm": "grpo", "deterministic": True},
    "ahead of the actor": {"algorithm": "grpo", "max_staleness": 2, "placement": "async"},
    "slow samples": {
        "algorithm": "grpo", "max_staleness": 2, "placement": "async",
        "engine": {"name": "scripted-engine", "straggler": 40},
        "rollout": {"groups_per_step": 3, "group_size": 2, "max_new_tokens": 64, "spare_groups": 1},
    },
}  # fmt: skip


@pytest.mark.parametrize("sampler", ["mixture", "in-turn"])
@pytest.mark.parametrize("kind", RUNS)
def test_a_resume_from_any_step_trains_the_tasks_of_the_uninterrupted_run(
    tmp_path: Path, kind: str, sampler: str
) -> None:
    run = simulation(tmp_path, sampler, **RUNS[kind])
    run.run()
    wanted = uninterrupted(run)
    for step in reversed(range(STEPS + 1)):  # opening the ledger at a step undoes the later ones
        found = asyncio.run(resumed(run, step))
        assert found == {group: wanted[group] for group in found}, f"resumed from step {step}"


def test_a_run_with_too_many_groups_since_its_checkpoint_stores_the_tasks_of_open_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_core.sampling.groups.STORED", 0)
    run = simulation(tmp_path, "mixture", **RUNS["ahead of the actor"])
    run.run()
    wanted = uninterrupted(run)
    found = asyncio.run(resumed(run, STEPS - 2))
    assert found == {group: wanted[group] for group in found}


def test_a_run_of_an_earlier_version_resumes_with_the_state_that_it_stored(tmp_path: Path) -> None:
    run = simulation(tmp_path, "in-turn", "sft")

    async def stored(step: int, name: str) -> None:
        version = Version("actor", 0, step)
        bus = await open_bus(InProcessBus(), bus_settings(run.launch), run.launch.run_dir, version, SystemClock())
        await bus.keep(name, {"taken": 4})
        bus.queue.version = version.next()
        await bus.checkpoint(version.step + 1, str(tmp_path))
        await bus.close()

    asyncio.run(stored(0, "sampler"))
    found = asyncio.run(resumed(run, 1))
    assert list(found.values())[:3] == [5, 6, 7]


async def loses_roles(run: SimulatedRun) -> None:
    """End the role that picks tasks, later the actor, which goes back to the checkpoint of step 5."""
    await run.until_event(StepFinished, 8)
    if "source" in run.roles:  # the scripted trainer goes back only in a run that publishes weights
        await run.lose_role("source")
        return
    await run.lose_role("rollout")
    await run.until_event(StepFinished, 9)
    await run.lose_role("actor")


@pytest.mark.parametrize("kind", RUNS)
def test_a_group_keeps_its_task_if_roles_restart_and_steps_are_undone(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []
    task = Selection.task

    def recorded(selection: Selection, group: int) -> int:
        given.append((group, task(selection, group)))
        return given[-1][1]

    monkeypatch.setattr(Selection, "task", recorded)
    run = simulation(tmp_path, "from-anywhere", checkpoint={"every": 5}, **{**RUNS[kind], "steps": 10})
    outcome = run.run(loses_roles)
    assert outcome.recovered == (["source"] if "source" in run.roles else ["rollout", "actor"])
    first = given[0][1]
    assert given == [(group, (first + group) % TASKS) for group, _ in given]
