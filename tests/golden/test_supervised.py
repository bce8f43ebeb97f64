# SPDX-License-Identifier: Apache-2.0
"""SFT, DPO and the reward model against plain loops, worked examples and TRL's own values, and against themselves where
nothing may differ."""

import json
import math
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from relax_core import learn
from relax_core.api import Ragged, RowBatch, RowId
from tests.golden.bench import build, flat, reference, summed, tensors
from tests.golden.reference import plain

CASES = [
    ("sft", {}),
    ("sft", {"aggregation": "sequence"}),
    ("dpo", {}),
    ("dpo", {"beta": 0.7, "label_smoothing": 0.2}),
    ("dpo", {"beta": 0.7, "loss_type": "robust", "label_smoothing": 0.2}),
    ("dpo", {"beta": 0.5, "loss_type": "hinge"}),
    ("dpo", {"beta": 0.3, "loss_type": "ipo"}),
    ("reward-model", {}),
    ("reward-model", {"margin": 0.3}),
    ("reward-model", {"margins": True, "center_coef": 0.05}),
]
each = pytest.mark.parametrize(
    ("name", "options"), CASES, ids=[f"{n} {' '.join(map(str, o.values()))}" for n, o in CASES]
)
SEEDS = range(3)


def draw(name, seed):
    """Rows of pairs, or single rows; the policy near the reference, rewards of either sign."""
    source, members = random.Random(f"{name} {seed}"), 1 if name == "sft" else 2
    rows = []
    for group in range(4):
        margin = source.random()
        for sample in range(members):
            length = source.randint(3, 8)
            exact = [-abs(source.gauss(0, 1)) - 0.1 for _ in range(length)]
            mask = [0] + [int(source.random() < 0.7) for _ in range(length - 2)] + [1]
            rows.append({
                "sample": (group, sample), "id": RowId(group, sample, 0, 0), "mask": mask, "log_probs": exact,
                "ref": [x + source.gauss(0, 0.6) for x in exact], "reward": source.gauss(0, 1.5), "margin": margin,
            })  # fmt: skip
    return rows


def learnt(algorithm, rows, parts=None, dtype=torch.float64):
    """(loss, gradient by row, metrics); of log-probs, or of rewards where that is what is read."""
    (output,) = {output.name for output in algorithm.outputs()}
    values = tensors(rows, output, dtype) if output == "log_probs" else tensors(of_rewards(rows), output, dtype)
    own = partial(_batch, wide=np.float64 if dtype == torch.float64 else np.float32)
    loss, slopes, metrics = summed(algorithm.loss, rows, {output: values}, parts, own)
    return loss, slopes[output], {key: learn.mean(value) for key, value in metrics.items()}


def of_rewards(rows):
    return [{"rewards": [row["reward"]]} for row in rows]


def _batch(rows, wide):
    def column(values):
        return Ragged.of([np.asarray(value) for value in values])

    return RowBatch(tuple(row["id"] for row in rows), {
        "tokens": column([np.arange(len(row["mask"]), dtype=np.int32) for row in rows]),
        "loss_mask": column([np.array(row["mask"], np.uint8) for row in rows]),
        "ref_log_probs": column([np.array(row["ref"], wide) for row in rows]),
        "margins": column([np.array([row["margin"]], wide) for row in rows]),
    })  # fmt: skip


def theirs(name, options, rows):
    """Loss and gradient by plain loops."""
    module = reference(name)
    loss = plain.constant(module.loss(rows, options))
    if name == "reward-model":
        return loss, [[slope] for slope in module.gradient(rows, options)]
    return loss, plain.gradient(rows, options, module.loss)


@each
def test_loss_and_gradient_equal_the_reference(name, options):
    for seed in SEEDS:
        algorithm, rows = build(name, options), draw(name, seed)
        want, slopes = theirs(name, algorithm.options.model_dump(), rows)
        for dtype, bound in ((torch.float64, 1e-9), (torch.float32, 3e-6)):
            loss, gradient, _ = learnt(algorithm, rows, dtype=dtype)
            assert loss == pytest.approx(want, abs=bound, rel=bound)
            assert flat(gradient) == pytest.approx(flat(slopes), abs=bound, rel=bound)


@each
def test_micro_batches_ranks_and_order_change_nothing(name, options):
    """Ranks add up like micro-batches; a pair stays together, in either order."""
    algorithm, rows = build(name, options), draw(name, 2)
    loss, gradient, metrics = learnt(algorithm, rows)
    size = len(rows) // 4
    for order in ([3, 1, 0, 2], [0, 1, 2, 3]):
        units = [[group * size + member for member in reversed(range(size))] for group in order]
        for parts in ([units[0], sum(units[1:], [])], units, [sum(units, [])]):
            again, slopes, sums = learnt(algorithm, rows, parts)
            assert again == pytest.approx(loss, abs=1e-12)
            assert flat(slopes) == pytest.approx(flat(gradient), abs=1e-12)
            assert sums == pytest.approx(metrics, abs=1e-12)


@each
def test_padding_and_its_content_change_nothing(name, options):
    algorithm, rows = build(name, options), draw(name, 4)
    loss, gradient, _ = learnt(algorithm, rows)
    for row in rows:
        row["ref"] = [x if m else math.nan for x, m in zip(row["ref"], row["mask"])] + [math.inf, math.nan]
        row["log_probs"], row["mask"] = row["log_probs"] + [0.0, 0.0], row["mask"] + [0, 0]
    padded, slopes, metrics = learnt(algorithm, rows)
    assert padded == pytest.approx(loss, abs=1e-12)
    if name != "reward-model":
        masked = [slope for row, own in zip(rows, slopes) for m, slope in zip(row["mask"], own) if not m]
        assert masked == [0.0] * len(masked)
        slopes = [row[:-2] for row in slopes]
    assert flat(slopes) == pytest.approx(flat(gradient), abs=1e-12)
    assert all(math.isfinite(value) for value in metrics.values())


def test_half_a_pair_is_refused():
    algorithm, rows = build("dpo"), draw("dpo", 0)
    with pytest.raises(ValueError, match="samples 0 and 1"):
        learnt(algorithm, rows, [[0], [1, 2, 3, 4, 5, 6, 7]])


def test_options_without_effect_are_refused():
    for kind in ("hinge", "ipo"):
        with pytest.raises(ValueError, match="no effect"):
            build("dpo", {"loss_type": kind, "label_smoothing": 0.1})


def pair(chosen, rejected, reward=(0.0, 0.0)):
    """Log-probs over the reference's of one and two tokens behind a given one."""
    made = []
    for sample, apart in enumerate((chosen, rejected)):
        tokens = [0.0, *apart]
        made.append({"sample": (0, sample), "id": RowId(0, sample, 0, 0), "mask": [0] + [1] * len(apart), "log_probs": tokens,
                     "ref": [0.0] * len(tokens), "reward": reward[sample], "margin": 1.0})  # fmt: skip
    return made


def test_sft_by_hand():
    """Tokens of log-prob -1, -2 and -6 behind given ones: 9 / 3 over tokens; (1.5 + 6) / 2 over rows."""
    rows = [{**row, "sample": (at, 0), "id": RowId(at, 0, 0, 0)} for at, row in enumerate(pair([-1.0, -2.0], [-6.0]))]
    assert learnt(build("sft"), rows)[:2] == (3.0, [[0.0, -1 / 3, -1 / 3], [0.0, -1 / 3]])
    loss, slopes, _ = learnt(build("sft", {"aggregation": "sequence"}), rows)
    assert (loss, slopes) == (3.75, [[0.0, -0.25, -0.25], [0.0, -0.5]])


def test_dpo_by_hand():
    """h = (1 + 1) - (-1) = 3 and beta = 1/3: the loss is log(1 + 1/e), its slope -beta / (1 + e) by each chosen token."""
    rows, beta = pair([1.0, 1.0], [-1.0]), 1 / 3
    loss, slopes, metrics = learnt(build("dpo", {"beta": beta}), rows)
    assert loss == pytest.approx(math.log(1 + math.exp(-1)))
    by = beta / (1 + math.e)
    assert flat(slopes) == pytest.approx([0.0, -by, -by, 0.0, by])
    assert metrics == pytest.approx(
        {"pairs/chosen": 2 / 3, "pairs/rejected": -1 / 3, "pairs/margin": 1.0, "pairs/accuracy": 1.0}
    )
    assert learnt(build("dpo", {"beta": 0.25, "loss_type": "hinge"}), rows)[0] == pytest.approx(1 - 0.25 * 3)
    assert learnt(build("dpo", {"beta": 0.25, "loss_type": "ipo"}), rows)[0] == pytest.approx((2 - 1 / 0.5) ** 2)


def test_a_reward_model_by_hand():
    """Rewards 2 and 1: log(1 + 1/e); with the pair's own margin of 1 nothing is ahead, log 2; centring adds 0.1 * 3^2."""
    rows = pair([-1.0], [-1.0], reward=(2.0, 1.0))
    assert learnt(build("reward-model"), rows)[0] == pytest.approx(math.log(1 + math.exp(-1)))
    assert learnt(build("reward-model", {"margins": True}), rows)[0] == pytest.approx(math.log(2))
    loss, slopes, metrics = learnt(build("reward-model", {"margin": 1.0, "center_coef": 0.1}), rows)
    assert loss == pytest.approx(math.log(2) + 0.9)
    assert flat(slopes) == pytest.approx([-0.5 + 0.6, 0.5 + 0.6])
    assert metrics["pairs/margin"] == 1.0 and metrics["pairs/accuracy"] == 1.0


RECORDED = json.loads(Path(__file__).with_name("trl_supervised.json").read_text())


@pytest.mark.parametrize("label", sorted(RECORDED["results"]))
def test_ours_is_trls(label):
    recorded = RECORDED["results"][label]
    rows = [{**row, "sample": tuple(row["sample"]), "id": RowId(*row["sample"], 0, 0)} for row in RECORDED["rows"]]
    if recorded["algorithm"] == "sft":
        rows = [{**row, "sample": (at, 0), "id": RowId(at, 0, 0, 0)} for at, row in enumerate(rows)]
    loss, slopes, _ = learnt(build(recorded["algorithm"], recorded["options"]), rows)
    bound = recorded["bound"]
    assert loss == pytest.approx(recorded["loss"], abs=bound)
    assert flat(slopes) == pytest.approx(flat(recorded["slopes"]), abs=bound)


def test_every_algorithm_of_the_plugin_is_here():
    from relax_plugin_supervised.plugin import relax_algorithms

    assert {component.name for component in relax_algorithms()} == {name for name, _ in CASES}
