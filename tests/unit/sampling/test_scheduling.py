# SPDX-License-Identifier: Apache-2.0
"""What is in play at once, environments that start ahead, and where a sample's time went: whole runs in virtual time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from relax_core.api.events import RolloutMeasured
from tests.unit.roles.simulated_run import RunOutcome, SimulatedRun

TOOLS = '''
"""An environment whose start and whose tool take their time; what happens when is written down."""
import asyncio, json
from relax_core.api import Environment, Observation, Options, Step

class ToolsOptions(Options):
    log: str
    start_s: float = 0.0
    tool_s: float = 0.0
    turns: int = 2

class Tools(Environment[ToolsOptions]):
    in_process = True
    gives_reward = True
    def note(self, what):
        with open(self.options.log, "a") as file:
            file.write(json.dumps([what, asyncio.get_running_loop().time()]) + "\\n")
    async def reset(self, task, seed):
        self.note("reset")
        self.turn = 0
        await asyncio.sleep(self.options.start_s)
        return Observation("begin")
    async def step(self, action):
        self.turn += 1
        self.note(f"turn {self.turn}")
        await asyncio.sleep(self.options.tool_s)
        return Step(Observation("on"), self.turn == self.options.turns, 1.0)
    async def close(self):
        self.note("close")

class Driving(Tools):
    async def run(self, task, seed, session):
        await self.reset(task, seed)
        for _ in range(self.options.turns):
            await session.generate()
            await asyncio.sleep(self.options.tool_s)
        session.reward(1.0)
'''
STEPS, GROUPS, SIZE = 3, 4, 4


@dataclass
class Played:
    """A run with what its environments wrote down."""

    outcome: RunOutcome
    told: list[tuple[str, float]]

    def most(self, begins: str, ends: str) -> int:
        """Samples between two happenings at once."""
        now = most = 0
        for what, _ in self.told:
            now += (what == begins) - (what == ends)
            most = max(most, now)
        return most

    def mean(self, metric: str) -> float:
        found = [event.metrics[metric] for event in self.outcome.events if isinstance(event, RolloutMeasured)]
        return sum(found) / len(found)


def played(folder: Path, environment: dict[str, object], rollout: dict[str, object], **more: object) -> Played:
    folder.mkdir(parents=True, exist_ok=True)
    plugin, log = folder / "tools.py", folder / "log"
    plugin.write_text(TOOLS)
    settings = {"max_staleness": 0, "steps": STEPS, **more}
    simulation = SimulatedRun(
        folder / "run", [str(plugin)], environment={"name": "tools", "log": str(log)} | environment,
        placement={"mode": "hybrid", "rollout": rollout},
        rollout={"groups_per_step": GROUPS, "group_size": SIZE, "max_new_tokens": 8}, **settings,
    )  # fmt: skip
    outcome = simulation.run()
    assert outcome.account.balanced
    assert outcome.account.trained == STEPS * GROUPS * SIZE
    return Played(outcome, [tuple(json.loads(line)) for line in log.read_text().splitlines()])


def test_samples_in_play_never_exceed_the_sessions(tmp_path: Path) -> None:
    free = played(tmp_path / "free", {"tool_s": 5.0}, {})
    assert free.most("reset", "close") == GROUPS * SIZE
    bound = played(tmp_path / "bound", {"tool_s": 5.0}, {"sessions": 9})
    assert SIZE < bound.most("reset", "close") <= 9
    assert played(tmp_path / "small", {}, {"sessions": 1}).most("reset", "close") == SIZE, "one group always may"


def test_samples_that_wait_for_tools_keep_no_group_from_beginning_and_those_at_engines_do(tmp_path: Path) -> None:
    """The cache holds two requests; a tool takes far longer than a turn."""
    cache = {"kv_tokens_per_engine": 30, "kv_reserve": 1.0}
    waiting = played(tmp_path / "tools", {"tool_s": 30.0}, cache)
    assert waiting.most("reset", "close") == GROUPS * SIZE
    working = played(tmp_path / "none", {}, cache)
    assert working.most("reset", "close") < GROUPS * SIZE


def test_environments_of_the_next_groups_start_ahead_and_nothing_is_sampled_before_the_grant(tmp_path: Path) -> None:
    slow = {"start_s": 30.0}
    plain = played(tmp_path / "plain", slow, {})
    ahead = played(tmp_path / "ahead", slow, {"prelaunch": GROUPS * SIZE})
    assert plain.outcome.seconds > STEPS * 30.0
    assert ahead.outcome.seconds < plain.outcome.seconds - 30.0
    assert ahead.most("reset", "close") <= 2 * GROUPS * SIZE
    for run in (plain, ahead):
        happened = [what for what, _ in run.told]
        assert happened.count("reset") == happened.count("close"), "all were closed"
        steps = [step.metrics["lag/max"] for step in run.outcome.steps]
        assert max(steps) == 0, "no token is of weights before the grant"
    half = played(tmp_path / "half", slow, {"prelaunch": SIZE + 1})
    assert plain.most("reset", "close") < half.most("reset", "close") <= GROUPS * SIZE + SIZE


def test_prelaunch_is_off_in_deterministic_runs(tmp_path: Path) -> None:
    runs = [
        played(tmp_path / str(number), {"start_s": 3.0}, {"prelaunch": number}, deterministic=True)
        for number in (0, GROUPS * SIZE)
    ]
    assert runs[0].most("reset", "close") == runs[1].most("reset", "close") == GROUPS * SIZE, "nothing starts ahead"


def test_the_time_of_a_sample_is_reported_by_activity(tmp_path: Path) -> None:
    run = played(tmp_path, {"start_s": 3.0, "tool_s": 5.0}, {"requests_per_engine": 2})
    assert run.mean("time/sample/environment_s") == pytest.approx(3.0 + 2 * 5.0)
    assert 0.2 <= run.mean("time/sample/generate_s") <= 2 * 0.8
    assert run.mean("time/sample/queue_s") > 0.1
    assert run.mean("time/sample/queue_max_s") >= run.mean("time/sample/queue_s")
    calm = played(tmp_path / "calm", {"start_s": 3.0, "tool_s": 5.0}, {})
    assert calm.mean("time/sample/queue_s") == pytest.approx(0.0, abs=1e-6)


def test_environments_that_started_ahead_wait_in_no_part_of_a_sample_s_time(tmp_path: Path) -> None:
    trainer = {"name": "scripted-trainer", "train_s": 60.0}
    run = played(tmp_path, {"start_s": 1.0}, {"prelaunch": GROUPS * SIZE}, trainer=trainer)
    assert run.mean("time/sample/environment_s") == pytest.approx(1.0)
    assert run.mean("time/sample/queue_s") == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("held", [{"requests_per_engine": 1}, {"prelaunch": GROUPS * SIZE}], ids=["queue", "grant"])
def test_the_deadline_of_an_environment_that_drives_counts_no_wait_for_engines_nor_for_the_grant(
    tmp_path: Path, held: dict[str, object]
) -> None:
    """Its own time is 2 s a stretch; a turn waits for longer, and so does what was started ahead."""
    own = {"name": "driving", "start_s": 2.0, "tool_s": 2.0, "timeout_s": 2.5}
    run = played(tmp_path, own, held, trainer={"name": "scripted-trainer", "train_s": 20.0})
    assert run.mean("time/sample/environment_s") == pytest.approx(2.0 + 2 * 2.0)
