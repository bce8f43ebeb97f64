# SPDX-License-Identifier: Apache-2.0
"""The warning that engine and trainer are further apart than their number formats explain."""

import json

import pytest
from relax_plugin_report.report import render

from relax_core.api.checks import MISMATCH
from relax_core.views.run import RunView
from relax_core.views.why import mismatch_warning, slow_rank_warning


def written(run, config, value):
    (run / "config.toml").write_text(config)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = [{**line, MISMATCH: value} if "reward/mean" in line else line for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    return RunView(run)


@pytest.mark.parametrize(("config", "value", "far"), [
    ("", 1e-6, False),
    ("", 0.01, True),
    ('[model]\ndtype = "float32"\n[rollout]\ndtype = "bfloat16"\n', 0.01, False),
    ('[model]\ndtype = "bfloat16"\n', 0.05, False),
    ('[model]\ndtype = "bfloat16"\n', 0.3, True),
    ('[model]\ndtype = "float16"\n', 0.05, True),
])  # fmt: skip
def test_a_mismatch_is_odd_only_beyond_the_coarser_formats_rounding(write_run, tmp_path, config, value, far):
    run = written(write_run(tmp_path, steps=4), config, value)
    said = mismatch_warning(run)
    assert bool(said) == far
    if far:
        assert "same weights, tokens and temperature" in said
        assert said.split(":")[0] in render(run, run.metrics(), 1_800_000_100.0)


def test_top_p_is_named_where_it_is_the_cause(write_run, tmp_path):
    assert "rollout.top_p" in mismatch_warning(written(write_run(tmp_path, steps=4), "[rollout]\ntop_p = 0.9\n", 0.05))


def test_a_run_without_the_metric_is_not_odd(write_run, tmp_path):
    assert mismatch_warning(RunView(write_run(tmp_path, steps=2))) == ""


@pytest.mark.parametrize(("ranks", "ratios", "says"), [
    ([1, 1, 1, 1], [1.4, 1.6, 1.5, 1.5], "rank 1 of the actor takes 1.5 times as long as the median rank"),
    ([1, 0, 1, 1], [1.4, 1.6, 1.5, 1.5], ""),
    ([1, 1, 1, 1], [1.1, 1.1, 1.2, 1.1], ""),
    ([1, 1], [2.0, 2.0], ""),
])  # fmt: skip
def test_only_a_rank_that_is_slow_in_every_step_is_odd(write_run, tmp_path, ranks, ratios, says):
    run = write_run(tmp_path, steps=4)
    slow = [{"trainer/slowest_rank": rank, "trainer/slowest_rank_ratio": ratio} for rank, ratio in zip(ranks, ratios)]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    by_step = dict(enumerate(slow, 1))
    told = [{**line, **by_step.get(line["step"], {})} if "reward/mean" in line else line for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    assert slow_rank_warning(RunView(run)).startswith(says) and bool(slow_rank_warning(RunView(run))) == bool(says)
