# SPDX-License-Identifier: Apache-2.0
"""One step's rows: split by whole groups, counted with what is skipped, masked, and filled where outdated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_core.api.batch import AttemptId, Ragged, RowBatch, RowId
from relax_core.api.bus import Account, Claim, Sealed
from relax_core.api.outcome import Outcome
from relax_core.api.trainer import UpdateOutcome, UpdateResult
from relax_core.api.version import Version
from relax_core.roles.step import StepRows, StepTimes, masked, moved, step_metrics

NOW = Version("actor", 0, 5)


def batch(groups: list[int], advantages: list[float] | None = None, versions: list[int] | None = None) -> RowBatch:
    """A row of a prompt token and two trained ones for each entry of `groups`."""
    count = len(groups)
    lengths = np.full(count, 3)
    ids, seen = [], dict[int, int]()
    for group in groups:
        ids.append(RowId(group, seen.get(group, 0), 0, 0))
        seen[group] = seen.get(group, 0) + 1
    credit = np.repeat(np.array(advantages or [1.0] * count, np.float32), 3)
    sampled = np.array([[-1, v, v] for v in versions or [5] * count], np.int32).reshape(-1)
    return RowBatch(tuple(ids), {
        "tokens": Ragged(np.arange(count * 3, dtype=np.int32), lengths),
        "loss_mask": Ragged(np.tile(np.array([0, 1, 1], np.uint8), count), lengths),
        "weight_versions": Ragged(sampled, lengths),
        "advantages": Ragged(credit, lengths),
    })  # fmt: skip


def claim(rows: RowBatch, versions: dict[str, dict[int, Version]] | None = None) -> Claim:
    samples = {row.attempt_id: Sealed(row.attempt_id, 1, Outcome.FINISHED, float(row.sample % 2)) for row in rows.ids}
    groups = tuple(dict.fromkeys(row.group for row in rows.ids))
    return Claim(1, 1, "actor", rows.ids, samples, groups, versions=versions or {})


@given(st.lists(st.integers(0, 6), min_size=1, max_size=24), st.integers(1, 8), st.randoms())
def test_every_row_with_gradient_is_in_exactly_one_update_with_its_whole_group(groups, updates, random) -> None:
    rows = batch(groups, [random.choice([0.0, 1.0]) for _ in groups])
    step = StepRows(rows, claim(rows), updates)
    parts = step.parts()
    trained = [row for part in parts for row in part.rows.ids]
    assert sorted([*trained, *step.without_gradient]) == sorted(rows.ids)
    homes = [{row.group for row in part.rows.ids} for part in parts]
    assert all(not one & other for i, one in enumerate(homes) for other in homes[:i])
    assert len(parts) == min(updates, len(set(groups)))
    assert sum(part.denominators["rows"] for part in parts) == len(rows)
    assert sum(part.denominators["groups"] for part in parts) == len(set(groups))
    assert sum(part.skipped for part in parts) == len(step.without_gradient)


def test_rows_without_gradient_count_in_the_denominators_but_are_not_sent() -> None:
    rows = batch([1, 1, 1, 1], [1.0, 0.0, -1.0, 0.0])
    (part,) = StepRows(rows, claim(rows), 1).parts()
    assert part.denominators == {"tokens": 8.0, "rows": 4.0, "samples": 4.0, "groups": 1.0}
    assert (len(part.rows), part.skipped) == (2, 2)


def test_where_the_loss_needs_every_row_none_is_skipped() -> None:
    rows = batch([1, 1], [0.0, 0.0])
    step = StepRows(rows, claim(rows), 1, zero_advantage_skips=False)
    assert (len(step.parts()[0].rows), step.without_gradient) == (2, ())


def test_a_column_that_nobody_filled_is_outdated_for_every_row_to_train() -> None:
    rows = batch([1, 1, 2], [1.0, 0.0, 1.0])
    assert StepRows(rows, claim(rows), 1).outdated("old_log_probs", NOW) == [0, 2]


@pytest.mark.parametrize("other", [Version("actor", 0, 4), Version("actor", 1, 5), None])
def test_a_column_of_other_weights_is_outdated(other: Version | None) -> None:
    rows = batch([1, 1, 2, 2])
    rows = rows.with_columns({"old_log_probs": Ragged(np.zeros(12, np.float32), np.full(4, 3))})
    made = {1: NOW} | ({2: other} if other else {})
    step = StepRows(rows, claim(rows, {"old_log_probs": made}), 2)
    assert step.outdated("old_log_probs", NOW) == [2, 3]


def test_filling_replaces_only_the_rows_that_were_computed_anew() -> None:
    rows = batch([1, 1, 2])
    first = Ragged(np.arange(9, dtype=np.float32), np.full(3, 3))
    first.values.flags.writeable = False
    step = StepRows(rows.with_columns({"old_log_probs": first}), claim(rows), 1)
    step.fill("old_log_probs", [1], Ragged(np.full(3, 7.0, np.float32), np.array([3])))
    np.testing.assert_array_equal(step.rows.columns["old_log_probs"].values, [0, 1, 2, 7, 7, 7, 6, 7, 8])


def test_tokens_that_are_too_old_are_taken_out_of_the_loss() -> None:
    rows = batch([1, 2], versions=[3, 5])
    np.testing.assert_array_equal(masked(rows, 4).columns["loss_mask"].values, [0, 0, 0, 0, 1, 1])
    assert masked(rows, 0) is rows


def test_only_an_applied_update_with_a_gradient_must_change_the_weights() -> None:
    assert moved(UpdateResult(UpdateOutcome.APPLIED, grad_norm=1.0, lr=0.1))
    assert not moved(UpdateResult(UpdateOutcome.APPLIED, grad_norm=0.0, lr=0.1))
    assert not moved(UpdateResult(UpdateOutcome.APPLIED, grad_norm=1.0, lr=0.0))
    assert not moved(UpdateResult(UpdateOutcome.NOT_FINITE, grad_norm=float("nan"), lr=0.1))


class HandClock:
    time = 0.0

    def now(self) -> float:
        return self.time


def test_the_metrics_of_a_step_say_what_was_trained() -> None:
    rows = batch([1, 1, 2, 2], [1.0, -1.0, 0.0, 0.0], [5, 5, 4, 4])
    clock = HandClock()
    times = StepTimes(clock)
    for phase, clock.time in (("wait_rows", 2.0), ("train", 5.0)):
        times.mark(phase)
    results = [UpdateResult(UpdateOutcome.APPLIED, {"train/loss": (3.0, 2.0)}, 2.0, 0.1),
               UpdateResult(UpdateOutcome.NOT_FINITE, {"train/loss": (1.0, 2.0)}, 4.0, 0.2)]  # fmt: skip
    account = Account(9, 4, 2, {"filtered": 1}, 4, True)
    got = step_metrics(StepRows(rows, claim(rows), 1), NOW, results, times, account, {"rows": 3})
    want = {
        "reward/mean": 0.5, "reward/std": 0.5, "lag/mean": 0.5, "lag/max": 1.0, "tokens/trained": 8.0, "length/mean": 2.0,
        "length/max": 2.0, "train/loss": 1.0, "train/grad_norm": 3.0, "train/lr": 0.2, "train/skipped_updates": 1.0,
        "time/wait_rows_s": 2.0, "time/train_s": 3.0, "time/step_s": 5.0, "samples/issued": 9.0, "samples/trained": 4.0,
        "samples/no_gradient": 2.0, "samples/dropped": 1.0, "samples/dropped/filtered": 1.0, "samples/in_flight": 4.0,
        "samples/balanced": 1.0, "bus/rows": 3.0, "bus/bytes": 0.0,
    }  # fmt: skip
    assert {name: got[name] for name in want} == want


def test_a_step_without_a_single_row_has_metrics_too() -> None:
    rows = batch([])
    empty = Claim(1, 1, "actor", (), {AttemptId(1, 0, 0): Sealed(AttemptId(1, 0, 0), 0, Outcome.FINISHED, 0.5)}, (1,))
    step = StepRows(rows, empty, 2)
    (part,) = step.parts()
    result = UpdateResult(UpdateOutcome.APPLIED)
    got = step_metrics(step, NOW, [result], StepTimes(HandClock()), Account(1, 1, 0, {}, 0, True), {})
    assert len(part.rows) == 0 and got["reward/mean"] == 0.5 and got["lag/max"] == 0.0
