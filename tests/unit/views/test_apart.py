# SPDX-License-Identifier: Apache-2.0
"""The warning that engine and trainer are further apart than their number formats explain."""

import json

import pytest

from relax_core.views.report import render
from relax_core.views.run import RunView
from relax_core.views.why import MEAN, mismatch_warning


def written(run, config, value):
    (run / "config.toml").write_text(config)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = [{**line, MEAN: value} if "reward/mean" in line else line for line in lines]
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
