# SPDX-License-Identifier: Apache-2.0
"""Rollout, advantages and actor over many steps: lag within bounds, overlap where it is allowed, nothing lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from relax_core.api.errors import DeadlineExceeded
from relax_core.api.events import RoleFailed, RoleRecovered
from tests.unit.roles.simulated_run import RunOutcome, SimulatedRun

STEPS, SAMPLES = 16, 16


def whole(outcome: RunOutcome, steps: int = STEPS, staleness: int = 1) -> None:
    """What holds of every run, whatever happened in it."""
    assert [step.step for step in outcome.steps] == list(range(1, steps + 1))
    assert all(0 <= lag <= staleness for lag in outcome.metric("lag/max"))
    assert set(outcome.metric("samples/balanced")) == {1.0}
    for step in outcome.steps:
        row = step.metrics
        assert row["samples/issued"] == row["samples/trained"] + row["samples/dropped"] + row["samples/in_flight"]
    assert outcome.account.balanced, outcome.account.problem


def overlapping(outcome: RunOutcome) -> int:
    """Updates during which some engine generated."""
    generating = outcome.of("engine", "generate")
    return sum(any(update.overlaps(span) for span in generating) for update in outcome.of("actor", "accumulate"))


def test_of_whole_steps_only_staleness_lets_engines_generate_while_the_actor_trains(tmp_path: Path) -> None:
    whole_steps = {"steps": STEPS, "batch": {"stream": False}}
    outcome = [SimulatedRun(tmp_path / str(k), max_staleness=k, **whole_steps).run() for k in (0, 1, 2)]
    for staleness, one in enumerate(outcome):
        whole(one, STEPS, staleness)
        assert one.account.trained == STEPS * SAMPLES
        assert not any(one.metric("samples/dropped"))
    on_policy, one_behind, two_behind = outcome
    assert overlapping(on_policy) == 0
    assert overlapping(one_behind) >= STEPS - 2 and overlapping(two_behind) >= STEPS - 3
    assert one_behind.seconds < 0.8 * on_policy.seconds


def test_a_slow_publish_delays_but_never_exceeds_the_bound(tmp_path: Path) -> None:
    late = {
        "trainer": {"name": "scripted-trainer", "publish_s": 7.0},
        "engine": {"name": "scripted-engine", "update_s": 3.0},
    }
    whole(SimulatedRun(tmp_path, steps=STEPS, max_staleness=1, **late).run())


@pytest.mark.parametrize("seed", range(2))
def test_engines_that_die_at_any_time_lose_no_sample(tmp_path: Path, seed: int) -> None:
    random = Random(seed)

    async def deaths(simulation: SimulatedRun) -> None:
        while True:
            await asyncio.sleep(random.uniform(0.0, 9.0))
            await simulation.workers.alive[f"engine-{random.randrange(2)}"].kill()

    two = {"mode": "hybrid", "rollout": {"engines": 2}}
    outcome = SimulatedRun(tmp_path, steps=STEPS, max_staleness=1, placement=two).run(deaths)
    whole(outcome)
    assert outcome.account.trained == STEPS * SAMPLES
    assert not any(outcome.metric("samples/dropped"))
    failed = [event for event in outcome.events if isinstance(event, RoleFailed)]
    assert failed and not any(event.fatal for event in failed)
    assert any(isinstance(event, RoleRecovered) for event in outcome.events)


ENDED = {"wait": {"deadline"}, "drop": {"stale"}, "regenerate": {"regenerated"}, "mask": {"deadline"}}


def stragglers(rule: str, tokens: int = 200, share: float = 1 / 16) -> dict[str, Any]:
    """One sample in sixteen takes five times the step's deadline."""
    return {
        "rollout": {
            "groups_per_step": 4, "group_size": 4, "max_new_tokens": 2 * tokens, "late": rule, "step_timeout_s": 4.0
        },
        "engine": {"name": "scripted-engine", "straggler": tokens, "straggles": share},
    }  # fmt: skip


@pytest.mark.parametrize("rule", ["wait", "drop", "regenerate", "mask"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_every_late_rule_keeps_the_bound_and_the_account(tmp_path: Path, rule: str, staleness: int) -> None:
    steps = 10
    outcome = SimulatedRun(tmp_path, steps=steps, max_staleness=staleness, **stragglers(rule)).run()
    whole(outcome, steps, staleness)
    assert outcome.seconds < steps * 7.0  # a step's deadline, a poll and the update: nobody waits for a straggler
    reasons = {name.rpartition("/")[2] for step in outcome.steps for name in step.metrics if "dropped/" in name}
    assert reasons == ENDED[rule]
    if rule == "drop":
        assert outcome.of("engine", "abort"), "engines stop generating what was dropped"
        assert not [span for span in outcome.of("engine", "generate") if span.end - span.start > 200 * 0.1 - 1e-6]


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from(["wait", "mask", "drop", "regenerate"]), st.integers(0, 3), st.sampled_from([30, 90, 1000, 10**5]),
    st.sampled_from([1 / 16, 1 / 8, 1.0]), st.booleans(), st.booleans(),
)  # fmt: skip
@example("mask", 2, 200, 1 / 8, False, False)
@example("regenerate", 1, 1000, 1.0, False, True)
def test_no_straggler_however_long_keeps_a_run_from_its_end(
    rule: str, staleness: int, tokens: int, share: float, streams: bool, whole_batches: bool
) -> None:
    """Single samples that straggle, and tasks that always do."""
    algorithm = {"name": "reinforce-plus-plus" if whole_batches else "grpo"}
    late = {**stragglers(rule, tokens, share), "batch": {"stream": streams}, "algorithm": algorithm}
    with TemporaryDirectory() as folder:
        whole(SimulatedRun(Path(folder), steps=5, max_staleness=staleness, **late).run(), 5, staleness)


def test_where_everything_is_too_late_the_run_ends_and_says_so(tmp_path: Path) -> None:
    late = stragglers("drop") | {"engine": {"name": "scripted-engine", "token_s": 100.0}}
    with pytest.raises(BaseExceptionGroup) as failed:
        SimulatedRun(tmp_path, steps=4, max_staleness=1, **late).run()
    assert failed.group_contains(DeadlineExceeded, match="raise rollout.step_timeout_s")


def test_a_stateless_role_that_loses_its_workers_is_restarted_and_trains_on(tmp_path: Path) -> None:
    async def strike(simulation: SimulatedRun) -> None:
        await asyncio.sleep(8.0)
        await simulation.workers.alive["reference-rank-0"].kill()

    outcome = SimulatedRun(tmp_path, steps=STEPS, max_staleness=1, algorithm={"name": "grpo", "kl_coef": 0.1}).run(
        strike
    )
    whole(outcome)
    assert [event.role for event in outcome.events if isinstance(event, RoleRecovered)] == ["reference"]


def test_a_dead_trainer_without_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    async def strike(simulation: SimulatedRun) -> None:
        await asyncio.sleep(6.0)
        await simulation.workers.alive["actor-rank-0"].kill()

    outcome = SimulatedRun(tmp_path, steps=STEPS, max_staleness=1).run(strike)
    assert outcome.account.trained == STEPS * 16 and outcome.account.balanced
    assert [event.role for event in outcome.events if isinstance(event, RoleRecovered)] == ["actor"]


def test_a_column_of_other_weights_is_computed_anew_by_the_actor(tmp_path: Path) -> None:
    """The trainer of the play refuses log-probs that are not of its step's start."""
    several = {
        "placement": "async",
        "batch": {"updates_per_step": 2},
        "algorithm": {"name": "grpo", "correction": "truncate"},
    }
    outcome = SimulatedRun(tmp_path, steps=STEPS, max_staleness=1, **several).run()
    whole(outcome)
    assert len(outcome.of("actor-fwd", "forward")) >= STEPS
    assert len(outcome.of("actor-rank", "accumulate")) == 2 * STEPS
    assert outcome.of("actor-rank", "forward")


def test_with_several_updates_and_no_forward_role_the_actor_makes_the_pass_itself(tmp_path: Path) -> None:
    several = {"batch": {"updates_per_step": 2}, "algorithm": {"name": "grpo", "correction": "truncate"}}
    outcome = SimulatedRun(tmp_path, steps=STEPS, max_staleness=1, **several).run()
    whole(outcome)
    assert len(outcome.of("actor-rank", "forward")) == STEPS
    assert not outcome.of("actor-fwd", "forward")
