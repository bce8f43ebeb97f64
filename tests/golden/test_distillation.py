# SPDX-License-Identifier: Apache-2.0
"""Distillation against plain loops, against TRL's own numbers, by hand, and against what its estimators are estimates of."""

import json
import math
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from pydantic import ValidationError

from relax_core import learn
from relax_core.api import Ragged, RowBatch
from tests.golden.bench import batch_of, build, credited, draw_groups, flat, of_tokens, rows_of, summed, tensors
from tests.golden.reference import distillation as reference, plain

K, VOCAB = 3, 7
LOSS = {"mode": "loss"}
STUDENT, TEACHER = {**LOSS, "tokens": "student-top-k", "k": K}, {**LOSS, "tokens": "teacher-top-k", "k": K}
CASES = [
    {}, {"divergence": "forward", "coef": 0.5}, {"divergence": "jsd", "beta": 0.3, "correction": "behaviour"},
    {"discount": 0.9, "reward_coef": 0.5}, {"discount": 1.0, "aggregation": "trajectory", "correction": "none"},
    {**LOSS}, {**LOSS, "divergence": "forward", "kl_coef": 0.1, "aggregation": "trajectory"},
    {**STUDENT}, {**STUDENT, "divergence": "forward", "rest": "renormalise"},
    {**STUDENT, "divergence": "jsd", "beta": 0.1, "coef": 2.0},
    {**TEACHER, "divergence": "forward", "reward_coef": 0.5}, {**TEACHER, "divergence": "jsd", "rest": "renormalise"},
    {**TEACHER, "aggregation": "fixed", "fixed_length": 9, "kl_coef": 0.05},
]  # fmt: skip
each = pytest.mark.parametrize(
    "options", CASES, ids=[" ".join(f"{k}={v}" for k, v in case.items()) or "-" for case in CASES]
)
RECORDED = json.loads(Path(__file__).with_name("trl_distillation.json").read_text())


def drawn(seed):
    """Groups whose rows have a teacher's log-probs too, and of K tokens those of both."""
    groups, source = draw_groups(seed), random.Random(f"teacher {seed}")
    for row in (row for group in groups for member in group for row in member["rows"]):
        row["teacher"] = [min(x + source.gauss(0, 0.5), -0.01) for x in row["log_probs"]]
        for name in ("student_at", "teacher_at"):
            row[name] = [spread(source)[:K] for _ in row["mask"]]
    return groups


def spread(source, size=VOCAB):
    logits = [source.gauss(0, 1.5) for _ in range(size)]
    total = math.log(sum(math.exp(x) for x in logits))
    return [x - total for x in logits]


def columns_of(rows, options):
    """Our batch of the same rows."""
    batch = batch_of(rows)

    def column(name, kind):
        return Ragged.of([np.array(row[name], dtype=kind) for row in rows])

    ids = Ragged.of([np.zeros((len(row["mask"]), K), np.int32) for row in rows])
    theirs = "teacher_log_probs_at" if options.tokens == "student-top-k" else "teacher_top_k_log_probs"
    own = "student_top_k_ids" if options.tokens == "student-top-k" else "teacher_top_k_ids"
    at = {} if options.tokens == "sampled" else {own: ids, theirs: column("teacher_at", np.float64)}
    return batch.with_columns({"teacher_log_probs": column("teacher", np.float64), **at})


def learnt(algorithm, rows, parts=None):
    """(loss, slopes by log_probs, slopes by student_at, metrics)."""
    outputs = {"log_probs": tensors(rows, "log_probs")}
    at = [output.key for output in algorithm.outputs() if output.ids]
    outputs |= {key: tensors(rows, "student_at") for key in at}
    outputs |= {"entropy": tensors(rows, "entropy", leaves=False)} if algorithm.options.entropy_coef else {}
    batch_of = partial(columns_of, options=algorithm.options)
    loss, slopes, metrics = summed(algorithm.loss, rows, outputs, parts, batch_of)
    none = [[[0.0] * len(position) for position in row["student_at"]] for row in rows]
    return loss, slopes["log_probs"], slopes[at[0]] if at else none, metrics


def prepared(options, seed=0):
    algorithm, groups = build("distillation", options), drawn(seed)
    return algorithm, rows_of(groups, reference.advantages(groups, algorithm.options.model_dump()))


@each
def test_advantages_equal_the_reference(options):
    algorithm = build("distillation", options)
    for seed in range(2):
        groups = drawn(seed)
        want = of_tokens(groups, reference.advantages(groups, algorithm.options.model_dump()))
        assert flat(of_tokens(groups, credited(algorithm, groups))) == pytest.approx(flat(want), abs=1e-9)


@each
def test_loss_and_gradients_equal_the_reference(options):
    for seed in range(2):
        algorithm, rows = prepared(options, seed)
        chosen = algorithm.options.model_dump()
        loss, of_token, of_k, _ = learnt(algorithm, rows)
        assert loss == pytest.approx(plain.constant(reference.loss(rows, chosen)), abs=1e-9)
        assert flat(of_token) == pytest.approx(flat(plain.gradient(rows, chosen, reference.loss)), abs=1e-9)
        assert flat(of_k) == pytest.approx(flat(reference.slopes_at(rows, chosen)), abs=1e-9)


@each
def test_order_micro_batches_and_values_at_masked_positions_change_nothing(options):
    algorithm, rows = prepared(options, 2)
    loss, of_token, of_k, metrics = learnt(algorithm, rows)
    for row in rows:
        for t in (t for t, m in enumerate(row["mask"]) if not m):
            row["old"][t] = row["rollout"][t] = row["ref"][t] = row["advantage"][t] = row["teacher"][t] = math.nan
            row["teacher_at"][t] = [math.inf, math.nan, -math.inf]
            row["log_probs"][t], row["student_at"][t] = 0.0, [0.0] * K
    order = list(range(len(rows)))
    random.Random(0).shuffle(order)
    again, slopes, slopes_at, sums = learnt(algorithm, rows, [order[:3], order[3:]])
    assert again == pytest.approx(loss, abs=1e-12)
    assert flat(slopes) == pytest.approx(flat(of_token), abs=1e-12)
    assert flat(slopes_at) == pytest.approx(flat(of_k), abs=1e-12)
    assert {n: v[0] for n, v in sums.items()} == pytest.approx({n: v[0] for n, v in metrics.items()}, abs=1e-9)
    masked = [x for row, own, at in zip(rows, slopes, slopes_at) for m, x, y in zip(row["mask"], own, at) if not m
              for x in (x, *y)]  # fmt: skip
    assert masked and not any(masked)


# -- by hand -----------------------------------------------------------------------------------------------------


def two_sampled_tokens():
    """A group of one row. The policy has 1/2 and 1/2, the teacher 1/4 and 3/4; the first token was sampled, then the second."""
    half, quarter, most = math.log(1 / 2), math.log(1 / 4), math.log(3 / 4)
    own = [0, half, half]
    row = {
        "mask": [0, 1, 1], "log_probs": own, "old": own, "rollout": own, "ref": own, "entropy": [0.0] * 3,
        "teacher": [0, quarter, most],
        "student_at": [[0.0, 0.0], [half, half], [half, half]], "teacher_at": [[0.0, 0.0], [quarter, most], [quarter, most]],
    }  # fmt: skip
    return [{"reward": 0.0, "valid": True, "parts": {}, "rows": [row]}]


def test_by_hand():
    group = two_sampled_tokens()

    def advantages(**options):
        return credited(build("distillation", options), [group])[0][0][0][1:]

    def loss(**options):
        return learnt(build("distillation", {"mode": "loss", **options}), rows_of([group], [[0.0]]))[0]

    assert advantages() == pytest.approx([-math.log(2), math.log(3 / 2)])
    assert advantages(discount=0.5) == pytest.approx([-math.log(2) + math.log(3 / 2) / 2, math.log(3 / 2)])
    assert advantages(divergence="forward") == pytest.approx([-1 / 2, 1 / 2])
    assert advantages(divergence="jsd") == pytest.approx([math.log(3 / 4) / 2, math.log(5 / 4) / 2])
    # both positions alike: 1/2 ln 2 + 1/2 ln 2/3; 1/4 ln 1/2 + 3/4 ln 3/2; with m = (3/8, 5/8)
    whole = {"tokens": "student-top-k", "k": 2}
    assert loss(**whole) == pytest.approx(math.log(4 / 3) / 2)
    assert loss(**whole, divergence="forward") == pytest.approx(math.log(1 / 2) / 4 + 3 * math.log(3 / 2) / 4)
    teacher = math.log(2 / 3) / 4 + 3 * math.log(6 / 5) / 4
    student = math.log(4 / 3) / 2 + math.log(4 / 5) / 2
    assert loss(**whole, divergence="jsd") == pytest.approx((teacher + student) / 2)
    # sampled: the mean of ln(2)^2 / 2 and ln(3/2)^2 / 2; of 1/2 - 1 + ln 2 and 3/2 - 1 - ln 3/2
    assert loss() == pytest.approx((math.log(2) ** 2 + math.log(3 / 2) ** 2) / 4)
    assert loss(divergence="forward") == pytest.approx((math.log(2) - math.log(3 / 2)) / 2)


def test_metrics_by_hand():
    """They have 1/4 + 1/2 in common; samples say min(1, 1/2) and 1."""
    rows = rows_of([two_sampled_tokens()], [[0.0]])
    for options in ({}, {**STUDENT, "k": 2}):
        *_, metrics = learnt(build("distillation", options), rows)
        assert metrics["distill/agreement"] == pytest.approx((1.5, 2.0), rel=1e-5), "the rest has at least 1e-6"
        assert metrics["distill/kl"] == pytest.approx((math.log(4 / 3), 2.0))


# -- what they estimate ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "beta"), [("reverse", 0.5), ("forward", 0.5), ("jsd", 0.5), ("jsd", 0.1), ("jsd", 0.9)]
)
def test_the_mean_gradient_of_sampled_tokens_is_that_of_the_divergence(kind, beta):
    """Over all tokens, each as often as the policy samples it."""
    source = random.Random(kind)
    logits = torch.tensor([source.gauss(0, 1) for _ in range(VOCAB)], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor(spread(source), dtype=torch.float64)
    student = logits.log_softmax(0)
    (exact,) = torch.autograd.grad(learn.token_divergence(kind, student[None], teacher[None], beta).sum(), logits,
                                   retain_graph=True)  # fmt: skip
    credit = learn.sampled_credit(kind, student.detach(), teacher, beta)
    (estimate,) = torch.autograd.grad(-(student.exp().detach() * credit * student).sum(), logits, retain_graph=True)
    assert estimate.tolist() == pytest.approx(exact.tolist(), abs=1e-12)
    if kind != "jsd":
        values = learn.sampled_divergence(student, teacher, reverse=kind == "reverse")
        (estimate,) = torch.autograd.grad((student.exp().detach() * values).sum(), logits)
        assert estimate.tolist() == pytest.approx(exact.tolist(), abs=1e-12)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), k=st.integers(1, VOCAB), kind=st.sampled_from(["reverse", "forward", "jsd"]))
def test_with_the_rest_as_one_outcome_it_is_a_divergence_that_never_overstates(seed, k, kind):
    source = random.Random(seed)
    student, teacher = (torch.tensor([spread(source)], dtype=torch.float64) for _ in range(2))
    whole = float(learn.token_divergence(kind, student, teacher))
    part = float(learn.token_divergence(kind, learn.with_rest(student[:, :k]), learn.with_rest(teacher[:, :k])))
    assert -1e-9 <= part <= whole + 1e-5
    if k == VOCAB:
        assert part == pytest.approx(whole, abs=1e-9)
    assert float(learn.token_divergence(kind, student, student)) == pytest.approx(0, abs=1e-12)


# -- TRL -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORDED["results"])
@pytest.mark.parametrize("rest", ["bucket", "renormalise"])
def test_over_the_whole_vocabulary_it_is_trls(name, rest):
    """TRL's generalised_jsd_loss of the same logits, its beta 0 and 1 by their names."""
    want, drawn_rows = RECORDED["results"][name], RECORDED["rows"]
    size = len(drawn_rows[0]["student"][0])
    kind = name.partition(" ")[0]
    options = {**LOSS, "tokens": "teacher-top-k", "divergence": kind, "k": size, "rest": rest}
    algorithm = build("distillation", {**options, **({"beta": want["beta"]} if kind == "jsd" else {})})
    leaves = [torch.tensor(row["student"], dtype=torch.float64, requires_grad=True) for row in drawn_rows]
    scale = RECORDED["temperature"]
    lengths = [len(row["mask"]) for row in drawn_rows]
    ids = np.tile(np.arange(size, dtype=np.int32), (sum(lengths), 1))
    teacher = (
        torch.cat([torch.tensor(row["teacher"], dtype=torch.float64) for row in drawn_rows]).div(scale).log_softmax(-1)
    )
    columns = {
        "tokens": Ragged(np.zeros(sum(lengths), np.int32), np.array(lengths)),
        "loss_mask": Ragged.of([np.array(row["mask"], np.uint8) for row in drawn_rows]),
        "teacher_top_k_ids": Ragged(ids, np.array(lengths)),
        "teacher_top_k_log_probs": Ragged(teacher.numpy(), np.array(lengths)),
    }
    rows = RowBatch(tuple(row["id"] for row in rows_of([[{"valid": True, "rows": drawn_rows}]], [[0.0]])), columns)
    batch = learn.PackedBatch(rows, dtype=torch.float64)
    student = torch.cat(leaves).div(scale).log_softmax(-1)
    loss = algorithm.loss(batch, learn.Outputs({"log_probs": student[:, 0], "log_probs_at:teacher_top_k_ids": student}))
    total = sum(learn.reduce(loss, batch, learn.Denominators(learn.count(rows))).values())
    total.backward()
    assert float(total.detach()) == pytest.approx(want["loss"], abs=1e-9)
    assert flat([leaf.grad.tolist() for leaf in leaves]) == pytest.approx(flat(want["slopes"]), abs=1e-9)


# -- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "says"), [
    ({"tokens": "student-top-k"}, "as an advantage it has no effect"),
    ({**LOSS, "divergence": "jsd"}, "no estimate from one token"),
    ({"discount": 0.5, "divergence": "forward"}, "may be summed"),
    ({**LOSS, "discount": 0.5}, "may be summed"),
    ({"beta": 0.3}, "it has no effect there"),
    ({"k": 4}, "k: got 4"),
    ({"rest": "renormalise"}, "it has no effect there"),
    ({**STUDENT, "correction_cap": 3.0}, "it has no effect there"),
    ({**TEACHER, "clip_high": 0.3}, "it has no effect there"),
    ({"reward_kl_coef": 0.1}, "with reward_coef = 0"),
    ({**LOSS, "correction": "behaviour"}, 'a loss without a ratio; use "truncate"'),
    ({**LOSS, "clip_high": 0.3}, "it has no effect there"),
    ({**LOSS, "dual_clip": 2.0}, "it has no effect there"),
])  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(options, says):
    with pytest.raises(ValidationError, match=says):
        build("distillation", options)


def test_stale_samples_of_the_loss_are_weighed_by_default():
    assert build("distillation", LOSS).options.correction == "truncate"
    assert build("distillation", {**LOSS, "correction": "none"}).options.correction == "none"
    assert build("distillation", STUDENT).options.correction == "behaviour", (
        "that loss does not depend on the sampled token"
    )


def test_only_needed_columns_are_requested():
    def names(options):
        algorithm = build("distillation", options)
        return {c.name for c in algorithm.columns()}, {o.key for o in algorithm.outputs()}, algorithm.reads_rewards

    samples = {"advantages", "rollout_log_probs"}
    assert names({"correction": "truncate"})[0] == samples | {"old_log_probs", "teacher_log_probs"}
    assert names({}) == (samples | {"teacher_log_probs"}, {"log_probs"}, False)
    top = {"advantages", "student_top_k_ids", "teacher_log_probs_at"}
    assert names(STUDENT) == (top, {"log_probs", "log_probs_at:student_top_k_ids"}, False)
    both = {"teacher_top_k_ids", "teacher_top_k_log_probs"}
    assert names({**TEACHER, "reward_coef": 1.0})[0] == samples | both and names({**TEACHER, "reward_coef": 1.0})[2]
    assert {column.shape for column in build("distillation", TEACHER).columns() if "top_k" in column.name} == {(K,)}
