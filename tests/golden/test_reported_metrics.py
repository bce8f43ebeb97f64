# SPDX-License-Identifier: Apache-2.0
"""Metrics of the policy gradient against plain Python over the trained tokens, and what a correction leaves of the loss."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch

from relax_core import learn
from tests.golden.bench import CASES, IDS, batch_of, build, draw_groups, learnt, rows_of, tensors, with_prepared

Row = dict[str, Any]


@pytest.fixture
def rows() -> list[Row]:
    """Random rows; the tokens that nobody trains are far from every policy, so that a sum over them is noticed."""
    groups = draw_groups(3)
    drawn = rows_of(groups, [[1.0 if member % 2 else -1.0 for member in range(len(group))] for group in groups])
    for row in drawn:
        for at, trained in enumerate(row["mask"]):
            if not trained:
                row["old"][at], row["rollout"][at], row["ref"][at] = (row["log_probs"][at] - far for far in (9, 5, 7))
    return drawn


def _tokens(rows: list[Row]) -> list[Row]:
    """The trained tokens, each with its own values."""
    names = ("log_probs", "old", "rollout", "ref", "entropy", "advantage")
    return [{name: row[name][at] for name in names} for row in rows for at, yes in enumerate(row["mask"]) if yes]


def _told(rows: list[Row], **options: Any) -> dict[str, float]:
    metrics = learnt(build("grpo", options), rows)[2]
    return {name.removeprefix("policy/"): learn.mean(value) for name, value in metrics.items()}


def test_ratio_metrics_cover_only_trained_tokens(rows: list[Row]) -> None:
    told = _told(rows, correction="none")
    moved = [token["log_probs"] - token["old"] for token in _tokens(rows)]
    assert told["ratio_max"] == pytest.approx(math.exp(max(moved)))
    assert told["approx_kl"] == pytest.approx(statistics.fmean(math.expm1(one) - one for one in moved))
    clipped = [
        (one < math.log(0.8) and token["advantage"] < 0) or (one > math.log(1.2) and token["advantage"] > 0)
        for one, token in zip(moved, _tokens(rows), strict=True)
    ]
    assert told["clip_fraction"] == pytest.approx(statistics.fmean(clipped)) and any(clipped)


def test_the_ratio_is_to_the_policy_that_the_correction_names(rows: list[Row]) -> None:
    for correction, name in (("behaviour", "rollout"), ("truncate", "old"), ("none", "old")):
        most = max(token["log_probs"] - token[name] for token in _tokens(rows))
        assert _told(rows, correction=correction)["ratio_max"] == pytest.approx(math.exp(most)), correction


def test_the_largest_ratio_is_of_trained_tokens_even_if_all_are_masked(rows: list[Row]) -> None:
    row = {**rows[0], "mask": [0, 1, 0, 1], "log_probs": [-0.01, -2.0, -0.01, -2.0], "old": [-0.01, -1.0, -0.01, -1.5]}
    row |= dict.fromkeys(("rollout", "ref", "entropy", "values"), row["old"]) | {"advantage": [1.0] * 4}
    assert _told([row], correction="none")["ratio_max"] == pytest.approx(math.exp(-0.5))


@pytest.mark.parametrize("correction", ["truncate", "mask", "reject"])
def test_importance_weights_are_reported_as_used_and_the_largest_before_clipping(
    rows: list[Row], correction: str
) -> None:
    floor, cap = 0.7, 1.3
    floors = {} if correction == "truncate" else {"correction_floor": floor}
    told = _told(rows, correction=correction, correction_cap=cap, **floors)
    ratios = [math.exp(token["old"] - token["rollout"]) for token in _tokens(rows)]
    used = {
        "truncate": [min(ratio, cap) for ratio in ratios],
        "mask": [ratio if floor <= ratio <= cap else 0.0 for ratio in ratios],
        "reject": [float(floor <= ratio <= cap) for ratio in ratios],
    }[correction]
    above, below = sum(ratio > cap for ratio in ratios), sum(ratio < floor for ratio in ratios)
    clipped = above if correction == "truncate" else above + below
    assert 0 < above < len(ratios) and below
    assert told["importance_weight"] == pytest.approx(statistics.fmean(used))
    assert told["importance_weight_max"] == pytest.approx(max(ratios)) and max(ratios) > cap
    assert told["importance_clipped"] == pytest.approx(clipped / len(ratios))


def test_divergence_from_the_reference_and_entropy_are_reported(rows: list[Row]) -> None:
    told = _told(rows, kl_coef=0.1, entropy_coef=0.01)
    away = [token["ref"] - token["log_probs"] for token in _tokens(rows)]
    assert told["ref_kl"] == pytest.approx(statistics.fmean(math.expm1(one) - one for one in away))
    assert told["entropy"] == pytest.approx(statistics.fmean(token["entropy"] for token in _tokens(rows)))


@pytest.mark.parametrize("correction", ["none", "truncate"])
def test_sequences_that_are_left_out_have_no_gradient_and_the_others_keep_their_weight(
    rows: list[Row], correction: str
) -> None:
    delta = 0.05
    rows = [{**row, "old": row["log_probs"]} for row in rows]  # so that no bound of the ratio takes a gradient away
    masks = {"correction": correction, "sequence_mask_delta": delta}
    _, plain, _ = learnt(build("grpo", {"correction": correction}), rows)
    _, slopes, metrics = learnt(build("grpo", masks), rows)
    left_out = 0
    for row, before, after in zip(rows, plain, slopes, strict=True):
        apart = [b - p for b, p, yes in zip(row["rollout"], row["log_probs"], row["mask"], strict=True) if yes]
        kept = row["advantage"][0] >= 0 or statistics.fmean(apart) <= delta
        assert after == (pytest.approx(before) if kept else [0.0] * len(before)) and any(before)
        left_out += 0 if kept else len(apart)
    assert learn.mean(metrics["policy/sequence_masked"]) == pytest.approx(left_out / len(_tokens(rows)))
    assert 0 < left_out < len(_tokens(rows)) / 2


def test_rows_without_advantage_may_be_skipped_only_where_nothing_else_has_a_gradient() -> None:
    options: list[dict[str, float]] = [{}, {"kl_coef": 0.1}, {"entropy_coef": 0.1}, {"reward_kl_coef": 0.1}]
    assert [build("grpo", one).zero_advantage_skips for one in options] == [True, False, False, True]


def test_an_algorithm_asks_for_what_its_options_read() -> None:
    def asked(**options: Any) -> set[str]:
        return {column.name for column in build("grpo", options).columns()} - {"advantages", "rollout_log_probs"}

    assert (asked(), asked(correction="truncate"), asked(kl_coef=0.1)) == (set(), {"old_log_probs"}, {"ref_log_probs"})
    assert {output.name for output in build("grpo", {"entropy_coef": 0.1}).outputs()} == {"log_probs", "entropy"}


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_metrics_hold_no_graph(name: str, options: dict[str, Any], rows: list[Row]) -> None:
    algorithm = build(name, options)
    rows = with_prepared(algorithm, rows)
    batch = learn.PackedBatch(batch_of(rows), dtype=torch.float64)
    values = {own: torch.cat(tensors(rows, own)) for own in ("log_probs", "entropy")}
    metrics = algorithm.loss(batch, learn.Outputs(values)).metrics
    assert metrics and not [name for name, (total, _) in metrics.items() if total.requires_grad]
