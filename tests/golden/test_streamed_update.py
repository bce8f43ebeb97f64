# SPDX-License-Identifier: Apache-2.0
"""The real trainer and GRPO: rows that come in chunks give the weights that the same rows give at once, to 1e-6."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from relax_plugin_policy_gradient.grpo import GRPO, GRPOOptions

from relax_core.api import Claim, OptimizerSpec, Ragged, RowBatch, TrainerSpec, UpdateResult, Version
from relax_core.roles.step import ClaimedRows, TrainingStep
from relax_core.testing.trainer import chunk, make_rows, tiny_model
from tests.trainers import ALGORITHM, make_trainer, weights

GROUPS, SIZE = 6, 4
OPTIONS = {
    "sequence": {"aggregation": "sequence"},
    "token with a divergence": {"aggregation": "token", "kl_coef": 0.1},
}


def rows_of_a_step(seed: int) -> RowBatch:
    """A third of the samples earned what their group did on average: without a divergence they are skipped."""
    rows, random = make_rows(seed, GROUPS, SIZE, version=1), np.random.default_rng(seed)
    tokens = rows.columns["tokens"]
    silent = np.repeat(random.random(len(rows)) < 2 / 3, tokens.lengths)
    noise = random.normal(size=(2, len(tokens.values))).astype(np.float32)
    return rows.with_columns({
        "advantages": Ragged(rows.columns["advantages"].values * silent, tokens.lengths),
        "ref_log_probs": Ragged(-4 + noise[0], tokens.lengths),
        "rollout_log_probs": Ragged(-4 + noise[1], tokens.lengths),
    })  # fmt: skip


class Bench:
    """One trainer that goes back to the same checkpoint, one step behind it, before every update."""

    def __init__(self, folder: Path, options: dict[str, object]) -> None:
        self.algorithm = GRPO(GRPOOptions(**options))
        self.trainer = make_trainer(lambda: self.algorithm)
        model = tiny_model(folder / "model")
        self.trainer.start(TrainerSpec({"path": model}, ALGORITHM, OptimizerSpec(1e-3), max_staleness=1))
        self.trainer.begin_step(Version("actor", 0, 0))
        first = rows_of_a_step(99)
        first.columns["weight_versions"].values[:] = np.minimum(first.columns["weight_versions"].values, 0)
        self._train(TrainingStep(Version("actor", 0, 0), GROUPS, streams=True), [first])
        self._checkpoint = str(folder / "checkpoint")
        self.trainer.save(self._checkpoint)

    def update(self, chunks: Sequence[RowBatch], wanted: int = GROUPS) -> tuple[UpdateResult, dict[str, torch.Tensor]]:
        """What the step is and what it leaves: its result, and the weights."""
        self.trainer.load(self._checkpoint)
        self.trainer.begin_step(Version("actor", 0, 1))
        result = self._train(TrainingStep(Version("actor", 0, 1), wanted, streams=True), chunks)
        return result, weights(self.trainer)

    def _train(self, step: TrainingStep, chunks: Sequence[RowBatch]) -> UpdateResult:
        parts = [part for rows in chunks for part in step.add(self._claimed(rows))]
        for part in parts + (step.close() if step.left else []):
            if part.opens:
                self.trainer.begin_update(part.denominators)
            if len(part.rows):
                self.trainer.accumulate(chunk(self.trainer, part.rows), part.ends)
            if part.ends:
                return self.trainer.finish_update(part.denominators)
        raise AssertionError("no part ended the update")

    def _claimed(self, rows: RowBatch) -> ClaimedRows:
        groups = tuple(dict.fromkeys(row.group for row in rows.ids))
        claim = Claim(1, "actor", rows.ids, {}, groups)
        return ClaimedRows(claim, rows, self.algorithm.zero_advantage_skips)


@pytest.fixture(scope="module", params=OPTIONS)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("bench"), OPTIONS[request.param])
    yield bench
    bench.trainer.stop()


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 99), order=st.permutations(range(GROUPS)), cuts=st.sets(st.integers(1, GROUPS - 1)),
       missing=st.integers(0, 2))  # fmt: skip
def test_an_update_in_chunks_is_that_of_the_whole(bench: Bench, seed, order, cuts, missing) -> None:
    """Also where the step is closed short, so that even the number of groups was told wrongly."""
    rows = rows_of_a_step(seed)
    edges = [0, *sorted(cuts), GROUPS]
    chunks = [
        rows.take([index for index, row in enumerate(rows.ids) if row.group in set(order[start:stop])])
        for start, stop in zip(edges, edges[1:], strict=False)
    ]
    (whole, want), (streamed, have) = bench.update([rows]), bench.update(chunks, GROUPS + missing)
    for name, weight in want.items():
        assert torch.allclose(have[name], weight, rtol=0, atol=1e-6), name
    assert streamed.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    (sums, counts), (streamed_sums, streamed_counts) = _sums_and_counts(whole), _sums_and_counts(streamed)
    assert streamed_counts == counts
    assert streamed_sums.keys() == sums.keys()
    for name, (total, number) in sums.items():
        assert streamed_sums[name] == (pytest.approx(total, rel=1e-4, abs=1e-5), number), name


def _sums_and_counts(result: UpdateResult) -> tuple[dict[str, tuple[float, float]], Counter[str]]:
    """Metrics that are sums, and of each that is counted by bins how many values it has: one at the edge of a bin may be
    rounded to either side."""
    sums, counts = dict[str, tuple[float, float]](), Counter[str]()
    for name, (total, number) in result.metrics.items():
        if "@" in name:
            counts[name.partition("@")[0]] += total
        else:
            sums[name] = total, number
    return sums, counts
