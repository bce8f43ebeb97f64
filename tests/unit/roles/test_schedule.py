# SPDX-License-Identifier: Apache-2.0
"""Rollout, advantages and actor over many steps: lag within bounds, overlap where it is allowed, late groups let go."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from relax_core.api.errors import DeadlineExceeded
from tests.unit.roles.simulated_run import RunOutcome, SimulatedRun

STEPS = 8
TWO_UPDATES = {"batch": {"updates_per_step": 2}, "algorithm": {"name": "grpo", "correction": "truncate"}}


def overlapping(outcome: RunOutcome) -> int:
    """Count the updates during which an engine generated."""
    generating = outcome.of("engine", "generate")
    return sum(any(update.overlaps(span) for span in generating) for update in outcome.of("actor", "accumulate"))


def test_without_streaming_only_staleness_lets_engines_generate_during_training(tmp_path: Path) -> None:
    whole_steps = {"steps": STEPS, "batch": {"stream": False}}
    outcomes = [SimulatedRun(tmp_path / str(k), max_staleness=k, **whole_steps).run() for k in (0, 1)]
    for staleness, outcome in enumerate(outcomes):
        outcome.assert_whole(STEPS, staleness)
    on_policy, one_behind = outcomes
    assert overlapping(on_policy) == 0
    assert overlapping(one_behind) >= STEPS - 2
    assert one_behind.seconds < 0.8 * on_policy.seconds


ENDED = {"wait": {"deadline"}, "drop": {"stale"}, "regenerate": {"regenerated"}, "mask": {"deadline"}}


def stragglers(rule: str, tokens: int = 200, share: float = 1 / 16) -> dict[str, Any]:
    """Return settings under which one sample in sixteen takes five times the step's deadline."""
    return {
        "rollout": {
            "groups_per_step": 4, "group_size": 4, "max_new_tokens": 2 * tokens, "late": rule, "step_timeout_s": 4.0
        },
        "engine": {"name": "scripted-engine", "straggler": tokens, "straggles": share},
    }  # fmt: skip


@pytest.mark.parametrize("rule", ENDED)
def test_every_late_rule_keeps_the_bound_and_the_account(tmp_path: Path, rule: str) -> None:
    outcome = SimulatedRun(tmp_path, steps=STEPS, max_staleness=2, **stragglers(rule)).run()
    outcome.assert_whole(STEPS, 2, drops=True)
    assert outcome.seconds < STEPS * 7.0  # a step's deadline, a poll and the update, and no straggler
    reasons = {name.rpartition("/")[2] for step in outcome.steps for name in step.metrics if "dropped/" in name}
    assert reasons == ENDED[rule]
    if rule == "drop":
        assert outcome.of("engine", "abort"), "engines stop generating what was dropped"
        assert not [span for span in outcome.of("engine", "generate") if span.end - span.start > 200 * 0.1 - 1e-6]


@settings(max_examples=4, deadline=None)
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
        outcome = SimulatedRun(Path(folder), steps=5, max_staleness=staleness, **late).run()
    outcome.assert_whole(5, staleness, drops=True)


def test_a_run_in_which_all_groups_are_late_ends_with_the_reason(tmp_path: Path) -> None:
    late = stragglers("drop") | {"engine": {"name": "scripted-engine", "token_s": 100.0}}
    with pytest.raises(BaseExceptionGroup) as failed:
        SimulatedRun(tmp_path, steps=4, max_staleness=1, **late).run()
    assert failed.group_contains(DeadlineExceeded, match="raise rollout.step_timeout_s")


def test_a_column_of_other_weights_is_computed_again_by_the_actor(tmp_path: Path) -> None:
    """The scripted trainer refuses log-probs that are not of its step's start."""
    outcome = SimulatedRun(tmp_path, steps=STEPS, max_staleness=1, placement="async", **TWO_UPDATES).run()
    outcome.assert_whole(STEPS, 1)
    assert len(outcome.of("actor-fwd", "forward")) >= STEPS
    assert len(outcome.of("actor-rank", "accumulate")) == 2 * STEPS
    assert outcome.of("actor-rank", "forward")


def test_with_several_updates_and_no_forward_role_the_actor_makes_the_pass_itself(tmp_path: Path) -> None:
    outcome = SimulatedRun(tmp_path, steps=STEPS, max_staleness=1, **TWO_UPDATES).run()
    outcome.assert_whole(STEPS, 1)
    assert len(outcome.of("actor-rank", "forward")) == STEPS
    assert not outcome.of("actor-fwd", "forward")
