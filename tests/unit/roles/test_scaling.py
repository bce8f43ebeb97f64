# SPDX-License-Identifier: Apache-2.0
"""Engines that join and leave a run in virtual time: every sample is accounted for, every served version is proved."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from relax_core.api.events import Logged, RoleFailed
from relax_core.api.run_commands import ScaleRequest
from relax_core.engines.scaler import file_of, role_of
from relax_core.engines.scaling import PoolScaling
from tests.ascii_tokenizer import save_ascii_tokenizer
from tests.unit.roles.simulated_run import RunOutcome, SimulatedRun
from tests.unit.roles.test_role_restarts import failing

BALANCE: dict[str, Any] = {"autoscale": {"name": "balance", "max_engines": 4}}
HYBRID: dict[str, Any] = {"placement": {"mode": "hybrid"}, "max_staleness": 1}


class Operator:
    """A person who scales a pool of a simulated run, and waits for the end of each operation."""

    def __init__(self, simulation: SimulatedRun, pool: str = "rollout", role: str = "rollout") -> None:
        self._simulation, self._pool, self._role, self._asked = simulation, pool, role, 0

    async def scaling(self) -> PoolScaling:
        """Return the machine as the run's status shows it."""
        while True:
            beats = {beat.role: beat for beat in await self._simulation.run_status.heartbeats()}
            if found := beats[self._role].facts.get("scaling"):  # a role that starts shows none
                return PoolScaling.of(json.loads(json.dumps(found[self._pool])))
            await self._simulation.clock.sleep(0.5)

    async def ask(self, **request: Any) -> str:
        """Send a request; return its key."""
        self._asked += 1
        key = f"key-{self._asked}"
        asked = ScaleRequest(key, **{"pool": self._pool, **request})
        await self._simulation.run_status.command(self._role, asked)
        return key

    async def do(self, **request: Any) -> str:
        """Send a request; return the state in which its operation ends."""
        key = await self.ask(**request)
        while True:
            await self._simulation.clock.sleep(0.5)
            found = (await self.scaling()).find(key)
            if found is not None and not found.open:
                return found.state


def told(outcome: RunOutcome) -> list[str]:
    """Return what the run said about its operations: id and state."""
    operations = [event.fields for event in outcome.told(Logged) if event.message.startswith("scaling")]
    return [f"{one['id']} {one['state']}" for one in operations]


def test_a_run_grows_shrinks_and_drains_an_engine_and_accounts_for_every_sample(tmp_path: Path) -> None:
    states = []

    async def operate(simulation: SimulatedRun) -> None:
        await simulation.until_call("generate")
        operator = Operator(simulation)
        states.append(await operator.do(target=3))
        await simulation.clock.sleep(5.0)  # under load
        states.append(await operator.do(engine="engine-1"))
        states.append(await operator.do(target=1))

    outcome = SimulatedRun(tmp_path, steps=12, engine={"name": "scripted-engine", "start_s": 0.7}, **HYBRID).run(
        operate
    )
    assert states == ["active", "completed", "completed"]
    outcome.assert_whole(12, 1)
    for engine in ("engine-1", "engine-2"):
        first = min(span.start for span in outcome.of(engine, "generate"))
        assert first >= min(span.end for span in outcome.of(engine, "update_weights"))
    assert len(outcome.of("engine-", "start")) == 3 and not outcome.told(RoleFailed)
    seen = dict.fromkeys(told(outcome))
    assert [one for one in seen if one.split()[1] in ("active", "completed")] == [
        "rollout-1 active", "rollout-2 completed", "rollout-3 completed",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("count", "steps", "seed"),
    [(10, 16, 5), *(pytest.param(50, 70, seed, marks=pytest.mark.faults) for seed in range(4))],
)
def test_operations_among_kills_lose_nothing(tmp_path: Path, count: int, steps: int, seed: int) -> None:
    """Engines die at any time: before they join, while they serve and while they leave."""
    ends: list[str] = []

    async def operate(simulation: SimulatedRun) -> None:
        await simulation.until_call("generate")
        operator, random = Operator(simulation), Random(seed)
        while len(ends) < count:
            engines = (await operator.scaling()).engines
            free = [name for name in engines if name != "engine-0"]
            request = (
                {"engine": random.choice(free)} if free and random.random() < 0.3 else {"target": random.randint(1, 4)}
            )
            key = await operator.ask(**request, keep_partial=random.random() < 0.5)
            for _ in range(random.randint(0, 2)):
                await simulation.clock.sleep(random.random())
                alive = [
                    one for name, one in simulation.workers.alive.items() if name.startswith("engine") and not one.dead
                ]
                if alive:
                    await random.choice(alive).kill()
            while (found := (await operator.scaling()).find(key)) is None or found.open:
                await simulation.clock.sleep(0.5)
            ends.append(found.state)

    engine = {"name": "scripted-engine", "start_s": 0.7}
    simulation = SimulatedRun(tmp_path, steps=steps, engine=engine, **HYBRID)
    outcome = simulation.run(operate)
    outcome.assert_whole(steps, 1)
    assert len(ends) == count and {"active", "completed"} <= set(ends)
    failures = outcome.told(RoleFailed)
    assert failures and not any(event.fatal for event in failures)


@pytest.mark.parametrize("at", [4.1, 4.6])
def test_an_operation_is_finished_after_the_rollout_has_restarted(tmp_path: Path, at: float) -> None:
    """The role loses its engines while more of them start, or when they have just joined."""
    found: list[PoolScaling] = []

    async def operate(simulation: SimulatedRun) -> None:
        operator = Operator(simulation)
        await simulation.clock.sleep(3.5)
        await operator.ask(target=3)
        await simulation.clock.sleep(3.0)
        while (scaling := await operator.scaling()).open or len(scaling.engines) < 3:
            await simulation.clock.sleep(0.5)
        found.append(scaling)

    engine = {"name": "scripted-engine", "start_s": 0.7}
    outcome = SimulatedRun(tmp_path, steps=12, engine=engine, **HYBRID).run(operate, failing("rollout", at))
    outcome.assert_whole(12, 1)
    (scaling,) = found
    assert (len(scaling.engines), scaling.open, outcome.recovered) == (3, None, ["rollout"])
    assert "restart" in list(scaling.operations.values())[-1].detail
    names = {span.worker for span in outcome.of("engine-", "start")}
    assert names == {f"engine-{number}" for number in range(5)}, "a name is used once"
    kept = json.loads((tmp_path / file_of("rollout")).read_text())["pools"]["rollout"]
    assert (kept["engines"], kept["target"]) == (scaling.engines, 3)


def test_requests_that_can_not_be_done_are_answered_and_leave_the_run_alone(tmp_path: Path) -> None:
    found: list[PoolScaling] = []

    async def operate(simulation: SimulatedRun) -> None:
        await simulation.until_call("generate")
        operator = Operator(simulation)
        assert await operator.do(target=2) == "failed"
        assert await operator.do(target=0) == "refused"
        await operator.ask(pool="judge", target=2)
        await simulation.clock.sleep(2.0)
        found.append(await operator.scaling())

    engine = {"name": "scripted-engine", "refuses": "engine-1"}
    outcome = SimulatedRun(tmp_path, steps=6, engine=engine, **HYBRID).run(operate)
    outcome.assert_whole(6, 1)
    failed, refused = found[0].operations.values()
    assert (failed.detail, found[0].engines) == ("engine-1: no memory", ["engine-0"])
    assert refused.detail == "target: got 0; the pool rollout keeps its first 1 engines: give 1 to 1024"
    ignored = [event.message for event in outcome.told(Logged) if "was ignored" in event.message]
    assert ignored == ["a request to scale was ignored: pool: got 'judge'; name one of rollout"]


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"placement": "colocate"}, ["placement", "engines that take turns on their devices with actor", "give them"]),
        ({"deterministic": True}, ["deterministic", "true", "results depend on the number of engines"]),
    ],
)
def test_a_pool_whose_size_is_fixed_says_why(tmp_path: Path, settings: dict[str, Any], refusal: list[str]) -> None:
    found: list[PoolScaling] = []

    async def operate(simulation: SimulatedRun) -> None:
        await simulation.until_call("generate")
        await simulation.clock.sleep(1.0)
        operator = Operator(simulation)
        assert await operator.do(target=2) == "refused"
        found.append(await operator.scaling())

    SimulatedRun(tmp_path, steps=3, **settings).run(operate).assert_whole(3, 0)
    assert found[0].refusal is not None
    assert all(have.startswith(want) for have, want in zip(found[0].refusal, refusal, strict=True))


TEACHER = """
import asyncio
from dataclasses import replace
from tests.unit.roles.scripted_components import ScriptedEngine

class ScoringEngine(ScriptedEngine):
    capabilities = replace(ScriptedEngine.capabilities, score=True)

    async def score(self, sequences, temperature=1.0):
        await asyncio.sleep(0.2 * len(sequences))
        return [[0.0] + [-1.0] * (len(tokens) - 1) for tokens in sequences]

class OtherEngine(ScoringEngine):
    async def start(self, spec):
        facts = dict(await super().start(spec))
        return facts | {"fingerprint": "two"} if spec.name == "taught-engine-1" else facts

class NamelessEngine(ScoringEngine):
    async def start(self, spec):
        return {**await super().start(spec), "fingerprint": ""}
"""


def taught(folder: Path, engine: str, steps: int = 6) -> SimulatedRun:
    """Make a run whose teacher is a pool of these engines."""
    folder.mkdir(exist_ok=True)
    (folder / "scoring.py").write_text(TEACHER)
    save_ascii_tokenizer(folder / "teacher")
    pool = {"name": "taught", "path": str(folder / "teacher"), "engine": {"name": f"{engine}-engine", "start_s": 0.7}}
    return SimulatedRun(
        folder, [str(folder / "scoring.py")], steps=steps, engines=[pool], teachers=[{"engine": "taught"}],
        algorithm="distillation", placement="async", max_staleness=1,
    )  # fmt: skip


def test_a_pool_of_teachers_grows_and_shrinks_and_has_its_size_again_after_a_restart(tmp_path: Path) -> None:
    found: list[Any] = []

    async def operate(simulation: SimulatedRun) -> None:
        await simulation.until_call("score")
        operator = Operator(simulation, "taught", "teacher")
        found.append(await operator.do(target=4))
        await simulation.clock.sleep(1.0)  # under load
        found.append(await operator.do(engine="taught-engine-1"))
        await simulation.lose_role("teacher")
        again = {"taught-engine-0", "taught-engine-4", "taught-engine-5"}  # a name is used once
        while set((scaling := await operator.scaling()).engines) != again:
            await simulation.clock.sleep(0.5)
        found.append(scaling)

    outcome = taught(tmp_path, "scoring", steps=12).run(operate)
    outcome.assert_whole(12, 1)
    grown, drained, scaling = found
    assert (grown, drained) == ("active", "completed")
    assert scaling.protected == ("taught-engine-0",)
    for engine in ("taught-engine-4", "taught-engine-5"):  # the rows of a claim are divided among all engines
        assert min(span.start for span in outcome.of(engine, "score")) >= outcome.of(engine, "health")[0].end
    kept = json.loads((tmp_path / file_of("teacher")).read_text())["pools"]["taught"]
    assert (kept["engines"], kept["target"]) == (scaling.engines, 3)
    assert role_of(SimulatedRun(tmp_path / "other").config, "taught") == "rollout"


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ("other", "an engine has the fingerprint two, the first of its pool one; give all machines the same"),
        (
            "nameless",
            "taught-engine-1: nothing proves that it has the model of its pool; return the fact `fingerprint`",
        ),
    ],
)
def test_a_teacher_with_another_or_an_unproved_model_does_not_join(tmp_path: Path, engine: str, why: str) -> None:
    found: list[PoolScaling] = []

    async def operate(simulation: SimulatedRun) -> None:
        await simulation.until_call("score")
        operator = Operator(simulation, "taught", "teacher")
        assert await operator.do(target=2) == "failed"
        found.append(await operator.scaling())

    simulation = taught(tmp_path, engine)
    outcome = simulation.run(operate)
    outcome.assert_whole(6, 1)
    (failed,) = found[0].operations.values()
    assert why in failed.detail and found[0].engines == ["taught-engine-0"]
    assert not outcome.of("taught-engine-1", "score")
    assert role_of(simulation.config, "taught") == "teacher" and role_of(simulation.config, "rollout") == "rollout"


@pytest.mark.parametrize(("asked", "policy"), [("ending", {}), ("ending", BALANCE), ("node", {})])
def test_the_engines_of_a_machine_leave_and_their_requests_continue_elsewhere(
    tmp_path: Path, asked: str, policy: dict[str, Any]
) -> None:
    """A machine that ends is replaced, unless a policy decides; after a request by a person, the pool stays smaller."""
    found: list[PoolScaling] = []

    async def operate(simulation: SimulatedRun) -> None:
        await simulation.until_call("generate")
        operator = Operator(simulation)
        assert await operator.do(target=4) == "active"
        for engine in ("engine-0", "engine-1", "engine-3"):  # engine-0 is protected: it ends with its machine
            simulation.workers.alive[engine].host = "10.0.0.9"
        await simulation.clock.sleep(2.0)  # under load
        await operator.ask(**{asked: "10.0.0.9"})
        while (scaling := await operator.scaling()).open or {"engine-1", "engine-3"}.intersection(scaling.engines):
            await simulation.clock.sleep(0.5)
        refills = asked == "ending" and not policy
        while refills and len(scaling.engines) < 4:
            scaling = await operator.scaling()
            await simulation.clock.sleep(0.5)
        found.append(scaling)

    engine = {"name": "scripted-engine", "start_s": 0.7}
    outcome = SimulatedRun(tmp_path, steps=12, engine=engine, **HYBRID, **policy).run(operate)
    outcome.assert_whole(12, 1)
    assert not outcome.told(RoleFailed)
    _, left, *others = found[0].operations.values()
    assert (left.state, set(left.engines)) == ("completed", {"engine-1", "engine-3"})
    assert left.node == ("10.0.0.9" if asked == "node" else "")
    if asked == "node" or policy:
        assert found[0].engines == ["engine-0", "engine-2"]
        assert {one.split()[0] for one in told(outcome)} == {"rollout-1", "rollout-2"}
    else:
        assert set(found[0].engines) == {"engine-0", "engine-2", "engine-4", "engine-5"}
        assert [(one.before, one.target) for one in others] == [(2, 4)]
