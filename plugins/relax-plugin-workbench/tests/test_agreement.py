# SPDX-License-Identifier: Apache-2.0
"""Figures on the agreement of scores with labels, against values computed by hand and by definition."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies
from relax_plugin_workbench.agreement import Labelled, agreement, cohens_kappa, spearman


def labelled(*pairs: tuple[float | None, float], task: str = "") -> list[Labelled]:
    return [Labelled(task or f"t{number}", label, score) for number, (score, label) in enumerate(pairs)]


def test_a_score_counts_as_the_nearest_label() -> None:
    found = agreement(labelled((0.9, 1.0), (0.6, 1.0), (0.1, 0.0), (0.7, 0.0), (None, 1.0)))
    assert found.samples == 5 and found.failed == pytest.approx(0.2) and found.accuracy == 0.75
    assert found.kappa == pytest.approx(0.5), "by chance: 3/4 x 1/2 + 1/4 x 1/2 = 1/2"


def test_kappa_of_a_table_with_known_margins() -> None:
    """Observed 35 of 50, by chance 0.5: the example of Cohen's kappa with margins 25/25 and 30/20."""
    table = [(1.0, 1.0)] * 20 + [(1.0, 0.0)] * 5 + [(0.0, 1.0)] * 10 + [(0.0, 0.0)] * 15
    assert cohens_kappa(table) == pytest.approx(0.4)


def test_ties_share_their_mean_rank() -> None:
    assert spearman([1.0, 2.0, 2.0, 3.0], [10.0, 20.0, 20.0, 30.0]) == pytest.approx(1.0)
    assert spearman([1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 2.0, 2.0]) == pytest.approx(2 / 5**0.5)


def test_pairs_of_one_task_are_compared_and_equal_scores_count_half() -> None:
    found = agreement([*labelled((0.9, 1.0), (0.2, 0.0), (0.2, 0.5), task="a"), *labelled((0.0, 1.0), task="b")])
    assert found.pairs == pytest.approx((1 + 1 + 0.5) / 3)


def test_figures_that_are_not_defined_are_none() -> None:
    for samples in ([], labelled((None, 1.0)), labelled((0.5, 1.0))):
        found = agreement(samples)
        assert (found.kappa, found.spearman, found.pairs) == (None, None, None)
    assert agreement(labelled((None, 1.0))).failed == 1.0


def test_parts_are_averaged_over_the_samples_that_have_them() -> None:
    samples = [Labelled("a", 1.0, 1.0, {"bias": 1.0}), Labelled("b", 1.0, None, {"bias": 0.0}), Labelled("c", 1.0, 1.0)]
    assert agreement(samples).parts == {"bias": 0.5}


@given(strategies.lists(strategies.sampled_from([0.0, 0.5, 1.0]), min_size=2))
def test_scores_equal_to_their_labels_agree_as_far_as_is_defined(labels: list[float]) -> None:
    found = agreement(labelled(*zip(labels, labels, strict=True), task="a"))
    defined = len(set(labels)) > 1
    assert found.accuracy == 1.0
    for figure in (found.kappa, found.spearman, found.pairs):
        assert figure == (pytest.approx(1.0) if defined else None)
