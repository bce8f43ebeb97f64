# SPDX-License-Identifier: Apache-2.0
"""Runs of one step that are broken on purpose: the checks of step 1, or an error, name what is broken, and only that."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import relax_core as relax
from relax_contrib.recipes.quickstart.model import CHARACTERS, save_tokenizer
from relax_core.api.checks import CheckFinding
from relax_core.api.errors import Diverged

WORDS = (
    "steps=1", "rollout.groups_per_step=4", "rollout.group_size=4", "eval.every=0", "checkpoint.every=0", "max_staleness=1",
    "algorithm.kl_coef=0.1", "placement=colocate",
)  # fmt: skip
PLUGIN = '''
from relax_core.api import Reward
from relax_plugin_transformers.engine import TransformersEngine


class StaleEngine(TransformersEngine):
    """An engine with other weights than it proves."""

    def _start(self, spec):
        facts = super()._start(spec)
        for tensor in self._weights.tensors.values():
            tensor.data.mul_(1.25)
        return facts


class WrongReward(Reward):
    """One for every answer but the right one."""

    def score(self, task, trajectory):
        return float(trajectory.response != task.answer)
'''
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
Checks = dict[str, CheckFinding]
Train = Callable[..., Checks]


@pytest.fixture
def trained(tiny: Path, tmp_path: Path) -> Train:
    """Train the quickstart for one step with changed settings; return the checks by name."""
    (tmp_path / "broken.py").write_text(PLUGIN)

    def train(*words: str, **layer: Any) -> Checks:
        run = relax.train(
            tiny / "recipe.toml", {"plugins": [str(tmp_path / "broken.py")], **layer}, runner="inline",
            run_dir=tmp_path / "run", overrides=(*WORDS, *words), show=False,
        )  # fmt: skip
        assert run.summary()["status"] == "finished"
        (checks,) = run.first_steps().values()
        return {check.name: check for check in checks}

    return train


def failed(checks: Checks) -> list[str]:
    return [name for name, check in checks.items() if check.state == "failed"]


def test_the_template_of_another_model_is_named(trained: Train, tiny: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (tiny / "train.jsonl").read_text().splitlines()[:64]]
    told = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
    checks = trained(f"data.train={tmp_path / 'chat.jsonl'}", model={"chat_template": CHATML})
    assert failed(checks) == ["the template round trip is exact"]
    assert "<|im_start|>" in checks["the template round trip is exact"].evidence


def test_a_stale_engine_is_named(trained: Train) -> None:
    checks = trained("engine=stale-engine")
    assert failed(checks) == ["engine and trainer agree"]
    found = checks["engine and trainer agree"]
    assert "the engine has other or stale weights" in found.advice
    assert found.evidence.startswith("token ") and "reference -" in found.evidence


def test_another_tokenizer_is_named(trained: Train, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    save_tokenizer(tmp_path / "other", CHARACTERS[10:] + CHARACTERS[:10])
    checks = trained(model={"tokenizer": str(tmp_path / "other")})
    assert failed(checks) == ["tokenizer and model agree"]
    assert " for 's' instead of " in checks["tokenizer and model agree"].evidence


def test_a_reward_that_pays_wrong_answers_is_named_and_may_stop_the_run(trained: Train, tmp_path: Path) -> None:
    with pytest.raises(
        Diverged, match="guards.first_step is stop: step 1: check failed: the task's own answer earns most"
    ):
        trained('rewards=["wrong-reward"]', "guards.first_step=stop", "steps=3")
    run = relax.open_run(tmp_path / "run")
    assert (run.summary()["status"], run.summary()["exit_code"]) == ("diverged", 5)
    checks = {check.name: check for check in run.first_steps()[1]}
    assert failed(checks) == ["the task's own answer earns most"]
    assert "earns 1, and the answer" in checks["the task's own answer earns most"].evidence
