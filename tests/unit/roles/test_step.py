# SPDX-License-Identifier: Apache-2.0
"""One step's rows: split by whole groups or streamed, counted with what is skipped, masked, and filled where outdated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from relax_core.api.batch import AttemptId, Ragged, RowBatch, RowId
from relax_core.api.bus import Account, Claim, Sealed
from relax_core.api.errors import StaleFence
from relax_core.api.trainer import TrainerWork, UpdateOutcome, UpdateResult
from relax_core.api.trajectory import Outcome
from relax_core.api.weights import Version
from relax_core.learn.counts import count
from relax_core.roles.step import ClaimedRows, StepTimes, TrainingStep, learning_metrics, step_metrics, work_metrics

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
    return Claim(1, "actor", rows.ids, samples, groups, versions=versions or {})


@given(st.lists(st.integers(0, 6), min_size=1, max_size=24), st.integers(1, 8), st.randoms())
def test_every_row_with_gradient_is_in_exactly_one_update_with_its_whole_group(groups, updates, random) -> None:
    rows = batch(groups, [random.choice([0.0, 1.0]) for _ in groups])
    step = TrainingStep(NOW, 8, updates)
    parts = step.add(ClaimedRows(claim(rows), rows))
    trained = [row for part in parts for row in part.rows.ids]
    assert sorted([*trained, *step.without_gradient]) == sorted(rows.ids)
    homes = [{row.group for row in part.rows.ids} for part in parts]
    assert all(not one & other for i, one in enumerate(homes) for other in homes[:i])
    assert len(parts) == min(updates, len(set(groups))) and all(part.opens and part.ends for part in parts)
    assert sum(part.denominators["rows"] for part in parts) == len(rows)
    assert sum(part.denominators["groups"] for part in parts) == len(set(groups))
    assert sum(part.skipped for part in parts) == len(step.without_gradient)
    assert not step.left


@pytest.mark.parametrize("updates", [1, 2])
def test_every_pass_repeats_the_updates_of_the_first(updates: int) -> None:
    rows = batch([1, 1, 2, 2], [1.0, 0.0, 1.0, 1.0])
    one, three = (TrainingStep(NOW, 2, updates, passes=passes).add(ClaimedRows(claim(rows), rows)) for passes in (1, 3))
    told = [(part.rows.ids, part.skipped, part.denominators, part.opens, part.ends) for part in three]
    assert told == [(part.rows.ids, part.skipped, part.denominators, True, True) for part in one] * 3


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(0, 2), st.randoms())
def test_a_streamed_step_is_one_update_with_the_counts_of_all_its_rows(sizes, missing, random) -> None:
    """`sizes`: groups of each chunk; `missing`: groups that the step is closed without."""
    wanted, number, parts = sum(sizes) + missing, 0, []
    step, every = TrainingStep(NOW, wanted, streams=True), list[RowBatch]()
    for size in sizes:
        groups = [group for group in range(number, number + size) for _ in range(random.randint(1, 3))]
        number += size
        every.append(batch(groups, [random.choice([0.0, 1.0]) for _ in groups]))
        parts += step.add(ClaimedRows(claim(every[-1]), every[-1]))
        assert step.left == wanted - number
    if missing:
        parts += step.close()
    assert [part.opens for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]
    assert step.rows.ids == tuple(row for rows in every for row in rows.ids)
    assert parts[-1].denominators == count(step.rows)
    assert len(step.rows) == sum(len(part.rows) + part.skipped for part in parts)
    assert not step.left


def test_a_step_whose_rows_come_at_once_is_divided_by_its_true_counts_from_the_start() -> None:
    rows = batch([1, 1, 2], [1.0, 0.0, 1.0])
    (part,) = TrainingStep(NOW, 2, streams=True).add(ClaimedRows(claim(rows), rows))
    assert part.denominators == count(rows) and part.opens and part.ends


def test_before_its_end_a_step_is_divided_by_what_its_counts_will_probably_be() -> None:
    rows = batch([1, 1])
    (part,) = TrainingStep(NOW, 4, streams=True).add(ClaimedRows(claim(rows), rows))
    assert part.denominators == {"tokens": 16.0, "rows": 8.0, "samples": 8.0, "groups": 4.0, "pairs": 4.0}
    assert not part.ends


def test_a_group_claimed_twice_shows_that_its_first_lease_was_lost() -> None:
    rows, step = batch([1, 2]), TrainingStep(NOW, 4, streams=True)
    step.add(ClaimedRows(claim(rows), rows))
    with pytest.raises(StaleFence, match="group 2 was claimed twice"):
        step.add(ClaimedRows(claim(batch([2, 3])), batch([2, 3])))


def test_a_row_that_is_masked_whole_counts_as_a_row_but_its_tokens_do_not() -> None:
    """As `rollout.late` says: a mean over rows keeps its divisor, as with off-policy corrections."""
    rows = batch([1, 1, 2, 2], versions=[3, 5, 5, 5])
    chunk = ClaimedRows(replace(claim(rows), mask_before=4), rows)
    (part,) = TrainingStep(NOW, 2).add(chunk)
    assert part.denominators == {"tokens": 6.0, "rows": 4.0, "samples": 4.0, "groups": 2.0, "pairs": 2.0}
    assert (len(part.rows), part.skipped) == (3, 1)


def test_rows_without_gradient_count_in_the_denominators_but_are_not_sent() -> None:
    rows = batch([1, 1, 1, 1], [1.0, 0.0, -1.0, 0.0])
    (part,) = TrainingStep(NOW, 1).add(ClaimedRows(claim(rows), rows))
    assert part.denominators == {"tokens": 8.0, "rows": 4.0, "samples": 4.0, "groups": 1.0, "pairs": 0.0}
    assert (len(part.rows), part.skipped) == (2, 2)


def test_no_row_is_skipped_if_the_loss_needs_every_row() -> None:
    rows, step = batch([1, 1], [0.0, 0.0]), TrainingStep(NOW, 1)
    (part,) = step.add(ClaimedRows(claim(rows), rows, zero_advantage_skips=False))
    assert (len(part.rows), step.without_gradient) == (2, ())


@pytest.mark.parametrize("other", [Version("actor", 0, 4), Version("actor", 1, 5), None])
def test_a_column_of_other_weights_and_one_without_values_is_outdated(other: Version | None) -> None:
    rows = batch([1, 1, 2, 2], [1.0, 0.0, 1.0, 1.0])
    assert ClaimedRows(claim(rows), rows).outdated("old_log_probs", NOW) == [0, 2, 3], "rows to train"
    rows = rows.with_columns({"old_log_probs": Ragged(np.zeros(12, np.float32), np.full(4, 3))})
    made = {1: NOW} | ({2: other} if other else {})
    assert ClaimedRows(claim(rows, {"old_log_probs": made}), rows).outdated("old_log_probs", NOW) == [2, 3]


def test_filling_replaces_only_the_rows_that_were_computed_again() -> None:
    rows = batch([1, 1, 2])
    first = Ragged(np.arange(9, dtype=np.float32), np.full(3, 3))
    first.values.flags.writeable = False
    chunk = ClaimedRows(claim(rows), rows.with_columns({"old_log_probs": first}))
    chunk.fill("old_log_probs", [1], Ragged(np.full(3, 7.0, np.float32), np.array([3])))
    np.testing.assert_array_equal(chunk.rows.columns["old_log_probs"].values, [0, 1, 2, 7, 7, 7, 6, 7, 8])


def test_tokens_older_than_the_bound_are_taken_out_of_the_loss() -> None:
    rows = batch([1, 2, 3], versions=[3, 4, 5])
    masked = ClaimedRows(replace(claim(rows), mask_before=4), rows).rows
    np.testing.assert_array_equal(masked.columns["loss_mask"].values, [0, 0, 0, 0, 1, 1, 0, 1, 1])
    assert ClaimedRows(claim(rows), rows).rows is rows


@pytest.mark.parametrize(
    ("outcome", "grad_norm", "lr", "moved"),
    [
        (UpdateOutcome.APPLIED, 1.0, 0.1, True), (UpdateOutcome.APPLIED, 0.0, 0.1, False),
        (UpdateOutcome.APPLIED, 1.0, 0.0, False), (UpdateOutcome.NOT_FINITE, float("nan"), 0.1, False),
    ],
)  # fmt: skip
def test_only_an_applied_update_with_a_gradient_must_change_the_weights(outcome, grad_norm, lr, moved) -> None:
    step = TrainingStep(NOW, 1)
    step.results.append(UpdateResult(outcome, grad_norm=grad_norm, lr=lr))
    assert step.moved == moved


class HandClock:
    time = 0.0

    def now(self) -> float:
        return self.time


RESULTS = [
    UpdateResult(UpdateOutcome.APPLIED, {"train/loss": (3.0, 2.0)}, 2.0, 0.1),
    UpdateResult(UpdateOutcome.NOT_FINITE, {"train/loss": (1.0, 2.0)}, 4.0, 0.2),
]


@pytest.mark.parametrize("chunks", [[range(4)], [range(2), range(2, 4)]])
def test_the_metrics_of_a_step_do_not_depend_on_its_chunks(chunks: list[range]) -> None:
    rows = batch([1, 1, 2, 2], [1.0, -1.0, 0.0, 0.0], [5, 5, 4, 4])
    clock = HandClock()
    times = StepTimes(clock)
    for phase, clock.time in (("wait_rows", 1.0), ("train", 2.0), ("wait_rows", 3.0), ("train", 5.0)):
        times.mark(phase)
    step = TrainingStep(NOW, 2, streams=True)
    for chunk in chunks:
        part = rows.take(chunk)
        step.add(ClaimedRows(claim(part), part))
    step.results.extend(RESULTS)
    got = step_metrics(learning_metrics(step), times, Account(9, 4, 2, {"filtered": 1}, 4, True), {"rows": 3})
    want = {
        "reward/mean": 0.5, "reward/std": 0.5, "lag/mean": 0.5, "lag/max": 1.0, "tokens/trained": 8.0, "length/mean": 2.0,
        "length/max": 2.0, "train/loss": 1.0, "train/grad_norm": 3.0, "train/lr": 0.2, "train/skipped_updates": 1.0,
        "time/wait_rows_s": 2.0, "time/train_s": 3.0, "time/step_s": 5.0, "samples/issued": 9.0, "samples/trained": 4.0,
        "samples/no_gradient": 2.0, "samples/dropped": 1.0, "samples/dropped/filtered": 1.0, "samples/in_flight": 4.0,
        "samples/balanced": 1.0, "bus/rows": 3.0, "bus/bytes": 0.0,
    }  # fmt: skip
    assert {name: got[name] for name in want} == want


def test_work_becomes_rates_of_one_device_and_mfu_only_where_the_peak_is_known() -> None:
    work = TrainerWork(6e12, 2e12, tokens=10.0, padding=4.0, peak_flops_per_s=8e12).plus(TrainerWork(6e12, 2e12, 10.0))
    known = {"trainer/flops": 12e12, "trainer/forward_flops": 4e12, "trainer/padding": 0.2}
    rates = {"trainer/tflops_per_s": 2.0, "trainer/mfu": 0.5}
    assert work_metrics(work, train_s=4.0, ranks=2) == known | rates
    assert "trainer/mfu" not in work_metrics(replace(work, peak_flops_per_s=0.0), train_s=4.0, ranks=2)
    assert work_metrics(work, train_s=0.0, ranks=2) == known
    assert work_metrics(TrainerWork(), train_s=4.0, ranks=2) == {}


def test_rows_of_a_sample_know_its_trained_tokens_after_late_tokens_are_masked() -> None:
    rows = batch([1, 1, 2], versions=[5, 3, 5])
    rows = replace(rows, ids=(RowId(1, 0, 0, 0), RowId(1, 0, 0, 1), RowId(2, 0, 0, 0)))
    for mask_before, want in ((0, [4, 4, 2]), (4, [2, 2, 2])):
        (part,) = TrainingStep(NOW, 2).add(ClaimedRows(replace(claim(rows), mask_before=mask_before), rows, False))
        assert part.rows.columns["sample_tokens"].values.tolist() == want


def test_rows_of_masked_samples_are_neither_trained_nor_counted() -> None:
    rows = batch([1, 1, 1, 2, 2], versions=[5, 5, 3, 5, 5])
    taken = claim(rows)
    masked = {key: replace(seal, masked=key[:2] in ((1, 2), (2, 0))) for key, seal in taken.samples.items()}
    step = TrainingStep(NOW, 2)
    (part,) = step.add(ClaimedRows(replace(taken, samples=masked), rows))
    assert [row[:2] for row in part.rows.ids] == [(1, 0), (1, 1), (2, 1)] and part.skipped == 0
    assert part.denominators == {"tokens": 6, "rows": 3, "samples": 3, "groups": 2, "pairs": 1}
    assert [row[:2] for row in step.without_gradient] == [(1, 2), (2, 0)]
    step.results.append(UpdateResult(UpdateOutcome.APPLIED))
    got = learning_metrics(step)
    assert (got["tokens/trained"], got["lag/max"]) == (6.0, 0.0)
    assert got["reward/mean"] == 0.4, "the rewards of all samples are shown"
    every = {key: replace(seal, masked=True) for key, seal in taken.samples.items()}
    step = TrainingStep(NOW, 2, 2)
    (part,) = step.add(ClaimedRows(replace(taken, samples=every), rows))
    assert len(part.rows) == 0 and step.without_gradient == rows.ids


def test_a_greedy_sample_has_a_metric_of_its_own() -> None:
    rows = batch([1, 1])
    taken = claim(rows)
    greedy = Sealed(AttemptId(1, 2, 0), 0, Outcome.FINISHED, 9.0, parts={"maths": 9.0}, baseline=True)
    step = TrainingStep(NOW, 1)
    step.add(ClaimedRows(replace(taken, samples={**taken.samples, greedy.attempt: greedy}), rows))
    step.results.append(UpdateResult(UpdateOutcome.APPLIED))
    got = learning_metrics(step)
    assert (got["reward/mean"], got["reward/greedy"]) == (0.5, 9.0) and "reward/maths" not in got


def test_a_step_without_a_single_row_has_metrics_too() -> None:
    empty = Claim(1, "actor", (), {AttemptId(1, 0, 0): Sealed(AttemptId(1, 0, 0), 0, Outcome.FINISHED, 0.5)}, (1,))
    step = TrainingStep(NOW, 1, 2)
    (part,) = step.add(ClaimedRows(empty, batch([])))
    step.results.append(UpdateResult(UpdateOutcome.APPLIED))
    got = step_metrics(learning_metrics(step), StepTimes(HandClock()), Account(1, 1, 0, {}, 0, True), {})
    assert len(part.rows) == 0 and got["reward/mean"] == 0.5 and "lag/max" not in got
