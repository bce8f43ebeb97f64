# SPDX-License-Identifier: Apache-2.0
"""Stages are layers over the document; what is wrong with one is named by its number."""

from __future__ import annotations

from typing import Any

import pytest

from relax_core.api.errors import ConfigError
from relax_core.config.compose import Composed, compose
from relax_core.control.stages import check_order
from relax_core.registry.catalogue import Catalogue

BASE = {
    "model": {"path": "m"},
    "data": {"train": "t.jsonl"},
    "rewards": ["exact"],
    "steps": 9,
    "optimizer": {"lr": 1e-3},
}
WARM, RL = {"algorithm": "sft", "steps": 2, "data": {"train": "w.jsonl"}}, {"name": "rl", "algorithm": "grpo"}


def composed(installed: Catalogue, *stages: dict[str, Any], overrides: tuple[str, ...] = ()) -> Composed:
    return compose([{**BASE, "stages": list(stages)}], overrides, installed, on_disk=False)


def test_a_stage_overrides_the_document_for_itself_alone(installed: Catalogue) -> None:
    made = composed(installed, WARM, RL)
    warm, rl = made.stages
    assert [stage.name for stage in made.stages] == ["sft", "rl"]
    assert (warm.config.steps, rl.config.steps) == (2, 9)
    assert (warm.config.data.train.name, rl.config.data.train.name) == ("w.jsonl", "t.jsonl")
    assert warm.config.optimizer == rl.config.optimizer and made.config is warm.config


def test_without_stages_nothing_is_different(installed: Catalogue) -> None:
    assert composed(installed).stages == ()


def test_the_command_line_reaches_a_stage_by_its_number(installed: Catalogue) -> None:
    made = composed(installed, WARM, RL, overrides=("stages.1.optimizer.lr=1e-5", "stages.0.algorithm=dpo"))
    assert [stage.config.optimizer.lr for stage in made.stages] == [1e-3, 1e-5]
    assert made.stages[0].config.algorithm.name == "dpo"


@pytest.mark.parametrize(("stage", "overrides", "field"), [
    ({"algorithm": "nothing"}, (), r"stages\[1\]\.algorithm\.name"),
    ({"stepps": 3}, (), r"stages\[1\]\.stepps"),
    ({"rollout": {"group_size": 1}}, (), r"stages\[1\]\.rollout\.group_size"),
    ({"model": {"path": "other"}}, (), r"stages\[1\]\.model\.path"),
    ({"seed": 1}, (), r"stages\[1\]\.seed"),
    ({"steps": 3}, ("steps=4",), r"steps: .*stages\.0\.steps"),
])  # fmt: skip
def test_a_problem_of_a_stage_names_the_stages_number(
    installed: Catalogue, stage: dict[str, Any], overrides: tuple[str, ...], field: str
) -> None:
    with pytest.raises(ConfigError, match=field):
        composed(installed, WARM, stage, overrides=overrides)


def test_a_policy_cannot_be_trained_behind_a_reward_model(installed: Catalogue) -> None:
    with pytest.raises(ConfigError, match=r"stages\[1\]\.algorithm\.name"):
        check_order(composed(installed, {"algorithm": "reward-model"}, RL).stages, installed)
    check_order(composed(installed, WARM, {"algorithm": "reward-model"}).stages, installed)
