# SPDX-License-Identifier: Apache-2.0
"""The study of defaults: its rows, what a stopped command keeps, and the comparison seed by seed."""

import json

import pytest

from relax_core.config.compose import compose
from relax_core.control.planner import plan
from relax_core.registry.catalogue import Catalogue
from tests.benchmarks import defaults
from tests.benchmarks.defaults import Cells, Setting, compared, design, table


def test_no_row_is_measured_twice_and_each_condition_begins_with_its_default():
    rows = list(design())
    assert len({row.key(0, 10) for row in rows}) == len(rows) == 58
    first = {}
    for row in rows:
        first.setdefault(row.condition, row)
    assert all(row.correction == next(iter(defaults.CORRECTIONS[row.algorithm])) for row in first.values())


@pytest.fixture(scope="module")
def catalogue():
    return Catalogue.load([str(defaults.HERE / "lockstep.py")])


@pytest.mark.parametrize("row", design(), ids=lambda row: f"{row.condition} {row.correction}")
def test_the_settings_of_a_row_reach_the_run_and_only_the_actor_computes_log_probs(catalogue, row):
    base = {"model": {"path": "m"}, "data": {"train": "t"}, "engine": "transformers", "rewards": ["exact"]}
    config = compose([base], row.words(3, 7), catalogue, on_disk=False).config
    assert (config.staleness, config.batch.updates, config.engine_dtype) == (row.staleness, row.updates, row.engine)
    trainer = catalogue.build(config.trainer.chosen).options
    assert (trainer.lag, trainer.steps, trainer.groups_per_step) == (row.staleness, 7, config.rollout.groups_per_step)
    assert plan(config, catalogue, False).roles == ("rollout", "advantages", "actor")


def test_a_line_that_a_stopped_command_left_unfinished_is_measured_again(tmp_path):
    cells = Cells(tmp_path)
    cells.add("a", {"held_out": 0.5})
    cells.add("b", {"held_out": 0.25})
    file = tmp_path / "cells.jsonl"
    file.write_text(file.read_text()[:-5])
    again = Cells(tmp_path)
    assert set(again.values) == {"a"}
    again.add("b", {"held_out": 0.75})
    assert [json.loads(line)["held_out"] for line in file.read_text().splitlines()] == [0.5, 0.75]


def test_a_row_is_compared_with_the_default_of_its_condition_in_the_seeds_that_both_have():
    default, other = Setting("lag", "grpo", "behaviour", 2), Setting("lag", "grpo", "none", 2)
    rest = {"reward": 0.5, "clipped": 0.0, "weighed_out": None, "kl": 0.0}
    shares = {(default, 0): 0.5, (default, 1): 0.25, (other, 0): 0.75, (other, 1): 0.25, (other, 2): 0.875}
    cells = {row.key(seed, 9): {"held_out": share, **rest} for (row, seed), share in shares.items()}
    first, second = table(cells, [default, other, Setting("lag", "grpo", "mask", 2)], 9)
    assert (first["held-out"], first["to default"], first["ahead"]) == ("0.500 0.250", None, "")
    assert (second["held-out"], second["to default"], second["error"]) == ("0.750 0.250 0.875", 0.125, 0.125)
    assert second["ahead"] == "1 of 2"


def test_one_seed_has_no_standard_error():
    assert compared([(0.75, 0.5)]) == {"to default": 0.25, "error": None, "ahead": "1 of 1"}
