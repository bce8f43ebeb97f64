# SPDX-License-Identifier: Apache-2.0
"""Every algorithm of the policy-gradient family against plain loops, and against itself where nothing may differ."""

import ast
import math
import random
from pathlib import Path

import pytest
import torch

from relax_core import learn
from relax_core.api import RowBatch
from tests.golden.bench import (
    CASES,
    IDS,
    NAMES,
    batch_of,
    build,
    credited,
    draw_groups,
    flat,
    learnt,
    of_tokens,
    reference,
    rows_of,
    tensors,
    with_prepared,
)
from tests.golden.reference import plain

SEEDS = range(2)
each = pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)


def prepared(name, options, seed=0):
    """Ours, and rows with the reference's advantages."""
    algorithm, groups = build(name, options), draw_groups(seed)
    return algorithm, rows_of(groups, reference(name).advantages(groups, algorithm.options.model_dump()))


@each
def test_advantages_equal_the_reference(name, options):
    algorithm = build(name, options)
    for seed in SEEDS:
        groups = draw_groups(seed)
        want = reference(name).advantages(groups, algorithm.options.model_dump())
        got = of_tokens(groups, credited(algorithm, groups))
        assert flat(got) == pytest.approx(flat(of_tokens(groups, want)), rel=1e-9, abs=1e-9)


@each
def test_loss_and_gradient_equal_the_reference(name, options):
    for seed in SEEDS:
        algorithm, rows = prepared(name, options, seed)
        chosen, loss_of = algorithm.options.model_dump(), reference(name).loss
        want, slopes = plain.constant(loss_of(rows, chosen)), flat(plain.gradient(rows, chosen, loss_of))
        for dtype, least, relative in ((torch.float64, 1e-9, 1e-9), (torch.float32, 2e-6, 1e-4)):
            loss, gradient, _ = learnt(algorithm, rows, dtype=dtype)
            assert loss == pytest.approx(want, abs=least, rel=relative)
            assert flat(gradient) == pytest.approx(slopes, abs=least, rel=relative)


@each
def test_a_loss_reads_the_columns_and_divides_by_the_denominators_that_it_declares(name, options):
    algorithm, rows = prepared(name, options)
    rows = with_prepared(algorithm, rows)
    declared = {"tokens", "loss_mask"} | {column.name for column in algorithm.columns() | algorithm.prepared()}
    losses = []
    for whole in (batch_of(rows), batch_of(rows)):
        columns = whole.columns if not losses else {key: whole.columns[key] for key in declared}
        batch = learn.PackedBatch(RowBatch(whole.ids, columns), dtype=torch.float64)
        outputs = {key: torch.cat(tensors(rows, key, leaves=False)) for key in ("log_probs", "entropy")}
        losses.append(algorithm.loss(batch, learn.Outputs(outputs)).terms)
    assert {term.denominator for term in losses[0].values()} == algorithm.denominators
    assert all(torch.equal(losses[1][key].value, term.value) for key, term in losses[0].items())


@each
def test_micro_batches_and_order_change_nothing(name, options):
    algorithm, rows = prepared(name, options, 2)
    loss, gradient, metrics = learnt(algorithm, rows)
    order = list(range(len(rows)))
    random.Random(0).shuffle(order)
    for parts in ([order], [order[:2], order[2:5], order[5:]], [[i] for i in order]):
        again, slopes, sums = learnt(algorithm, rows, parts)
        assert again == pytest.approx(loss, abs=1e-12)
        assert flat(slopes) == pytest.approx(flat(gradient), abs=1e-12)
        assert {n: v[0] for n, v in sums.items()} == pytest.approx({n: v[0] for n, v in metrics.items()}, abs=1e-9)


@each
def test_padding_and_its_content_change_nothing(name, options):
    algorithm, rows = prepared(name, options, 4)
    loss, gradient, _ = learnt(algorithm, rows)
    for row in rows:
        for key in ("old", "rollout", "ref", "advantage"):
            row[key] = [x if m else math.nan for x, m in zip(row[key], row["mask"])] + [math.inf, math.nan]
        for key in ("log_probs", "entropy", "values"):
            row[key] = row[key] + [0.0, 0.0]
        row["mask"] = row["mask"] + [0, 0]
    padded, slopes, metrics = learnt(algorithm, rows)
    assert padded == pytest.approx(loss, abs=1e-12)
    assert flat([row[:-2] for row in slopes]) == pytest.approx(flat(gradient), abs=1e-12)
    masked = [slope for row, own in zip(rows, slopes) for m, slope in zip(row["mask"], own) if not m]
    assert masked == [0.0] * len(masked)
    assert all(math.isfinite(total) for total, _ in metrics.values())


@each
def test_empty_and_equal_groups_are_defined(name, options):
    algorithm = build(name, options)
    for reward in (0.0, 1.0):
        groups = draw_groups(5)
        for member in (m for group in groups for m in group):
            member["reward"], member["parts"] = reward, {"right": reward, "form": reward}
            for turn in member["turns"]:
                turn["reward"] = reward / len(member["turns"])
        for member in groups[1]:
            member["valid"] = False
        values = of_tokens(groups, credited(algorithm, groups))
        assert all(math.isfinite(x) for x in flat(values))
        assert not any(flat(values[1]))
        own = algorithm.fits or algorithm.greedy_baseline or (name == "gigpo" and reward)  # who has it sooner has more
        if not (own or algorithm.options.reward_kl_coef or getattr(algorithm.options, "overlong_length", 0)):
            earned = reward - algorithm.options.baseline if name == "reinforce" else 0.0
            mask = [m for member in groups[0] for row in member["rows"] for m in row["mask"]]
            assert flat(values[0]) == pytest.approx([earned * m for m in mask], abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_advantage_have_no_gradient_if_declared(name):
    algorithm, rows = prepared(name, {})
    assert algorithm.zero_advantage_skips
    _, gradient, _ = learnt(algorithm, [{**row, "advantage": [0.0] * len(row["mask"])} for row in rows])
    assert not any(flat(gradient))


def test_references_import_nothing_of_ours():
    for path in sorted(Path(__file__).with_name("reference").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [n.name for n in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert set(modules) <= {"math", "cmath", "tests.golden.reference", "tests.golden.reference.plain"}, path


def test_every_algorithm_in_the_box_has_a_reference():
    from relax_plugin_policy_gradient.plugin import relax_algorithms

    offered = relax_algorithms()
    assert {component.name for component in offered} == set(NAMES)
    assert all(build(one.name).paper in one.help for one in offered), "the list of plugins shows the paper"
