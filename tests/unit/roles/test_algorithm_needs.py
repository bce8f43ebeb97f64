# SPDX-License-Identifier: Apache-2.0
"""Algorithms get what they ask the roles for: weights of rewards, a greedy sample in each group, all rows of a step at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_core.api.events import SamplesScored
from relax_core.learn import groups
from tests.unit.roles.simulated_run import Asked, SimulatedRun


def test_algorithms_get_the_signed_weights_of_the_runs_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, float]] = []
    credited = groups.credited

    def listening(*args: Any) -> Any:
        seen.append(dict(args[-1]))
        return credited(*args)

    monkeypatch.setattr(groups, "credited", listening)
    rewards = [{"name": "scripted-reward", "weight": -0.5}, {"name": "scripted-reward", "label": "other"}]
    SimulatedRun(tmp_path, algorithm="gdpo", steps=1, rewards=rewards).run()
    assert seen and all(weights == {"scripted-reward": -0.5, "other": 1.0} for weights in seen)


def test_statistics_over_the_batch_are_of_the_first_groups_that_are_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: Asked
) -> None:
    """With staleness these need not be the groups of one step, as the page of algorithms says."""
    seen: list[list[int]] = []
    credited = groups.credited

    def listening(algorithm: Any, rows: Any, *args: Any) -> Any:
        seen.append(list(dict.fromkeys(row.group for row in rows.ids)))
        return credited(algorithm, rows, *args)

    monkeypatch.setattr(groups, "credited", listening)
    outcome = SimulatedRun(tmp_path, algorithm="gpg", placement="async", max_staleness=2, steps=6).run()
    outcome.assert_whole(6, 2)
    assert len(seen) >= 6 and all(len(own) == 4 and own == sorted(own) for own in seen)
    assert not any(set(one) & set(other) for at, one in enumerate(seen) for other in seen[:at])


def test_the_greedy_sample_is_drawn_at_temperature_0_judged_and_not_trained(tmp_path: Path, asked: Asked) -> None:
    outcome = SimulatedRun(tmp_path, algorithm="remax", steps=4).run()
    assert outcome.account.balanced
    assert outcome.account.issued == outcome.account.trained == 4 * 4 * (4 + 1)
    assert asked.rows and all("reward/greedy" in step.metrics for step in outcome.steps)
    samples = [sample for event in outcome.told(SamplesScored) for sample in event.samples]
    assert {sample["sample_index"] for sample in samples} == {0, 1, 2, 3, 4}
    assert {row.sample for rows in asked.rows for row in rows.ids} == {0, 1, 2, 3}
    temperatures = [request.temperature for request in asked.requests]
    assert temperatures.count(0.0) * 4 == temperatures.count(1.0) > 0


@pytest.mark.parametrize("updates", [1, 2])
def test_rows_have_what_was_prepared_of_the_whole_step(tmp_path: Path, asked: Asked, updates: int) -> None:
    run = SimulatedRun(tmp_path, algorithm="m2po", placement="async", steps=3, batch={"updates_per_step": updates})
    assert not run.launch.plan.streams and run.launch.plan.needs_old_log_probs
    run.run().assert_whole(3, 1)
    assert len(asked.rows) == 3 * updates
    assert all({"old_log_probs", "trusted"} <= rows.columns.keys() for rows in asked.rows)
    assert {value for rows in asked.rows for value in rows.columns["trusted"].values.tolist()} <= {0.0, 1.0}
