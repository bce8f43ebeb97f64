# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of algorithms.

The advantages of a group must be finite and depend on no second group. The loss must not depend on chunks, padding or
row order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from relax_core.api.algorithm import Advantages, Groups, Output, Scope, Source, Term
from relax_core.api.batch import Column, Ragged, RowBatch
from relax_core.testing.algorithm_loss import Learnt, learn, loss_of, measured, prepared
from relax_core.testing.algorithm_rows import FAILED, greedy, padded, random_rows, sealed, with_turns
from relax_core.testing.suite import Suite


class AlgorithmSuite(Suite):
    """The suite of an algorithm; a subclass sets `component`."""

    kind = "algorithm"
    slow_modules: ClassVar[tuple[str, ...]] = ("numpy", "torch")
    groups: ClassVar[int] = 3
    group_size: ClassVar[int] = 4
    stops_gradients: ClassVar[bool] = False
    """True if the loss detaches tensors on purpose, which makes a comparison with finite differences meaningless."""

    @classmethod
    def prepare(cls) -> None:
        import relax_core.testing.algorithm_outputs  # noqa: F401  importing torch takes longer than any exercise

    @classmethod
    def exercise(cls, component: Any) -> Any:
        """Return all losses with their gradients, and the advantages, computed once."""
        rows = cls.rows(component)
        learnt = [learn(component, rows, fit) for fit in ("", *component.fits)]
        losses = [[repr(one.loss), {name: g.tolist() for name, g in one.gradients.items()}] for one in learnt]
        return [losses, None if component.source is not Source.ROLLOUT else _credited(component, rows).tolist()]

    @classmethod
    def rows(cls, component: Any) -> RowBatch:
        """Return the rows to learn from."""
        return random_rows(component, cls.groups, max(cls.group_size, component.min_group_size))

    @pytest.fixture
    def each(self, made: Any) -> list[tuple[str, RowBatch]]:
        """Return (fit, rows) for every loss: fit "" is the policy's loss, a name in `fits` a further model's."""
        return [(fit, self.rows(made)) for fit in ("", *made.fits)]

    def test_columns_and_outputs_are_typed(self, made: Any) -> None:
        assert all(isinstance(column, Column) for column in made.columns()), "columns() must return Column objects"
        assert all(isinstance(output, Output) for output in made.outputs()), "outputs() must return Output objects"

    def test_advantages_have_their_shape(self, made: Any) -> None:
        rows = _rollout_rows(self, made)
        groups = _grouping(made, rows).groups
        advantages = _advantages(made, groups)
        tokens = (len(rows.columns["tokens"].values),)
        assert tuple(advantages.values.shape) in (tuple(groups.rewards.shape), tokens), (
            "advantages() must return the shape [groups, samples] or [tokens]"
        )
        assert np.isfinite(_credited(made, rows)).all(), "advantages must be finite, also if all rewards are equal"

    def test_groups_do_not_touch_each_other(self, made: Any) -> None:
        if made.statistics is Scope.BATCH:
            pytest.skip("statistics is Scope.BATCH: advantages may depend on other groups")
        rows = _rollout_rows(self, made)
        first = [index for index, row in enumerate(rows.ids) if row.group == 0]
        alone = _credited(made, rows.take(first))
        np.testing.assert_allclose(_credited(made, rows)[: len(alone)], alone, rtol=1e-6, atol=1e-9)

    def test_the_loss_is_named_terms(self, made: Any, each: Any) -> None:
        for fit, rows in each:
            batch, outputs = prepared(made, rows, fit)
            loss = loss_of(made, fit, batch, outputs)
            for name, term in loss.terms.items():
                _check_term(name, term, batch)
            for name, metric in loss.metrics.items():
                assert len(metric) == 2 and all(part.numel() == 1 for part in metric), (
                    f"metric {name} is not a pair of scalars; return (sum, count)"
                )

    def test_the_loss_divides_by_the_counts_that_it_declares(self, made: Any) -> None:
        if not made.denominators:
            pytest.skip("denominators is empty: each step waits for all of its rows")
        batch, outputs = prepared(made, self.rows(made), "")
        used = {term.denominator for term in loss_of(made, "", batch, outputs).terms.values()}
        message = f"denominators is {sorted(made.denominators)}, but the loss divides by {sorted(used)}; declare all"
        assert used <= made.denominators, message

    def test_masked_positions_get_no_gradient(self, made: Any, each: Any) -> None:
        for fit, rows in each:
            masked = rows.columns["loss_mask"].values == 0
            for name, gradient in _by_token(learn(made, rows, fit), rows):
                assert not gradient[masked].any(), f"{name}: positions with loss_mask 0 have a gradient"

    def test_rows_without_advantage_have_no_gradient_if_declared(self, made: Any) -> None:
        if not made.zero_advantage_skips:
            pytest.skip("zero_advantage_skips is False")
        rows = self.rows(made)
        silent = rows.with_columns({"advantages": Ragged(
            np.zeros_like(rows.columns["advantages"].values), rows.columns["advantages"].lengths)})  # fmt: skip
        for name, gradient in learn(made, silent, "").gradients.items():
            assert not gradient.any(), (
                f"{name}: rows whose advantages are 0 have a gradient; zero_advantage_skips must be False, since such "
                "rows would be left out"
            )

    def test_splitting_into_chunks_changes_nothing(self, made: Any, each: Any) -> None:
        for fit, rows in each:
            whole = learn(made, rows, fit)
            parts = [learn(made, rows.take(chunk), fit, counted=rows) for chunk in _chunks(made, rows)]
            assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=1e-9, abs=1e-12)
            for name, gradient in _by_token(whole, rows):
                split = np.concatenate([part.gradients[name] for part in parts])
                np.testing.assert_allclose(split, gradient, rtol=1e-7, atol=1e-12, err_msg=name)
            for name, metric in whole.metrics.items():
                if not name.endswith(("_max", "_min")):
                    summed = [sum(part.metrics[name][at] for part in parts) for at in (0, 1)]
                    assert summed == pytest.approx(metric, rel=1e-6), f"metric {name} is not a sum over tokens or rows"

    def test_padding_changes_nothing(self, made: Any, each: Any) -> None:
        for fit, rows in each:
            wider = padded(rows, 3)
            whole, more = learn(made, rows, fit), learn(made, wider, fit)
            assert more.loss == pytest.approx(whole.loss, rel=1e-9, abs=1e-12)
            own = np.concatenate([np.r_[np.ones(n, bool), np.zeros(3, bool)] for n in rows.columns["tokens"].lengths])
            for name, gradient in _by_token(whole, rows):
                np.testing.assert_allclose(more.gradients[name][own], gradient, rtol=1e-7, atol=1e-12, err_msg=name)

    def test_the_order_of_rows_changes_nothing(self, made: Any, each: Any) -> None:
        for fit, rows in each:
            turned = learn(made, rows.take(range(len(rows) - 1, -1, -1)), fit)
            assert turned.loss == pytest.approx(learn(made, rows, fit).loss, rel=1e-9, abs=1e-12)

    def test_gradients_match_finite_differences(self, made: Any, each: Any) -> None:
        if self.stops_gradients:
            pytest.skip("stops_gradients is True")
        for fit, rows in each:
            for name, gradient in learn(made, rows, fit).gradients.items():
                slope = measured(made, rows, fit, name, gradient.shape)
                same = np.allclose(slope, gradient, rtol=1e-4, atol=1e-7)
                if not same and self.generic:
                    pytest.skip(f"{name}: autograd and finite differences differ; set stops_gradients in its own suite")
                assert same, f"{name}: autograd and finite differences differ; set stops_gradients if the loss detaches"


def _check_term(name: str, term: Any, batch: Any) -> None:
    assert isinstance(term, Term), f"term {name} is a {type(term).__name__}; return Term(value, ...)"
    count = {"token": len(batch.tokens), "row": batch.num_rows, "pair": batch.num_rows // 2}[term.per]
    assert tuple(term.value.shape) == (count,), (
        f"term {name} has the shape {list(term.value.shape)}; per {term.per} means [{count}]"
    )


def _chunks(algorithm: Any, rows: RowBatch) -> Iterator[Sequence[int]]:
    """Yield chunks of one row; both rows of a pair are one chunk."""
    if algorithm.source is not Source.PAIRS:
        return ([index] for index in range(len(rows)))
    return ([i, i + 1] for i in range(0, len(rows), 2))


def _by_token(learnt: Learnt, rows: RowBatch) -> list[tuple[str, np.ndarray]]:
    tokens = len(rows.columns["tokens"].values)
    return [(name, gradient) for name, gradient in learnt.gradients.items() if len(gradient) == tokens]


def _rollout_rows(suite: AlgorithmSuite, algorithm: Any) -> RowBatch:
    """Return rows whose last group has equal rewards and one failed sample."""
    if algorithm.source is not Source.ROLLOUT:
        pytest.skip(f"source is {algorithm.source}: the algorithm has no advantages")
    rows = suite.rows(algorithm)
    equal = [index for index, row in enumerate(rows.ids) if row.group == rows.ids[-1].group]
    rows.columns["rewards"].values[equal] = 1.0
    rows.columns["outcome"].values[-1] = FAILED
    return rows if "turns" not in rows.columns else with_turns(rows)


def _grouping(algorithm: Any, rows: RowBatch) -> Any:
    from relax_core.learn import Grouping

    asked = algorithm.columns() | algorithm.advantage_columns()
    names = {"loss_mask", "tokens"} | {column.name for column in asked if column.per == "token"}
    samples = sealed(rows) | (greedy(rows) if algorithm.greedy_baseline else {})
    return Grouping(rows, samples, sorted(names))


def _credited(algorithm: Any, rows: RowBatch) -> np.ndarray:
    """Return the advantages that the rows get, [tokens]."""
    grouping = _grouping(algorithm, rows)
    return np.asarray(grouping.columns(_advantages(algorithm, grouping.groups))["advantages"].values)


def _advantages(algorithm: Any, groups: Groups) -> Advantages:
    advantages = algorithm.advantages(groups)
    assert isinstance(advantages, Advantages), f"advantages() returned {type(advantages).__name__}; return Advantages"
    return advantages
