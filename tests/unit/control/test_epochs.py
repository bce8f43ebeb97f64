# SPDX-License-Identifier: Apache-2.0
"""A length in epochs becomes a number of steps when a run is planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_core.api.errors import ConfigError
from relax_core.config.compose import Composed, compose
from relax_core.control.epochs import with_steps
from tests.wiring.options import CATALOGUE, MINIMAL


def counted(folder: Path, layer: dict[str, Any], *overrides: str) -> Composed:
    (folder / "tasks.jsonl").write_text('{"prompt": "2+2?", "answer": "4"}\n' * 50)
    own = {"data": {"train": str(folder / "tasks.jsonl")}, "rollout": {"groups_per_step": 8}}
    return with_steps(compose([MINIMAL, own, layer], overrides, CATALOGUE, on_disk=False))


def test_steps_take_as_many_tasks_as_the_epochs_have(tmp_path: Path) -> None:
    """Of 50 tasks, 2 are held out: 48 tasks are 6 steps of 8, and a part of a step counts as a step."""
    run = counted(tmp_path, {"epochs": 2, "steps": 1000, "eval": {"size": 2}})
    assert (run.config.steps, run.config.epochs) == (12, None)
    assert run.notices == ("epochs = 2: 12 steps of 8 of 48 tasks",)
    assert counted(tmp_path, {"epochs": 0.51, "eval": {"size": 2}}).config.steps == 4
    assert counted(tmp_path, {}, "epochs=0.001", "eval.every=0").config.steps == 1
    assert counted(tmp_path, {"eval": {"every": 0}}, "epochs=1").config.steps == 7
    assert counted(tmp_path, {}, "steps=3").config.steps == 3


def test_each_stage_has_its_own_epochs(tmp_path: Path) -> None:
    stages = [{"name": "a", "epochs": 1}, {"name": "b", "steps": 9}]
    run = counted(tmp_path, {"eval": {"every": 0}, "stages": stages})
    assert [stage.config.steps for stage in run.stages] == [7, 9] and run.config.steps == 7


def test_a_file_without_tasks_to_train_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval\.size: got 50 of 50 tasks; leave at least one task to train on"):
        counted(tmp_path, {"epochs": 1, "eval": {"size": 50}})
