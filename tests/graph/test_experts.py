# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts through the command line, with the experts of the rollout and with its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_contrib.recipes.experts.build import build_model
from relax_contrib.recipes.quickstart.model import save_tokenizer
from relax_contrib.recipes.quickstart.task import split, write
from relax_core.views.run import open_run
from tests.graph.conftest import SMALL, Relax

RECIPE = Path(__file__).parents[2] / "relax_contrib/recipes/experts/recipe.toml"
APART = 0.1
"""Mean difference of log-probs between engine and trainer, both in bfloat16."""


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe without its warm start: what is learnt is not what is looked at."""
    folder = tmp_path_factory.mktemp("experts")
    save_tokenizer(folder / "model")
    build_model(0).save_pretrained(folder / "model")
    items = split(0)
    write(items.train[:64], folder / "train.jsonl")
    write(items.held_out[:8], folder / "eval.jsonl")
    (folder / "recipe.toml").write_text(RECIPE.read_text())
    return folder


@pytest.mark.parametrize("own", [("model.routing_replay=recompute", "batch.updates_per_step=2"), ()])
def test_a_mixture_of_experts_is_trained_with_the_experts_of_its_rollout(
    train_here: Relax, experts: Path, tmp_path: Path, own: tuple[str, ...]
) -> None:
    small = (*SMALL, "steps=2", "model.dtype=bfloat16", "algorithm.entropy_coef=0.01")  # no answer is right yet
    run = tmp_path / "run"
    ran = train_here(experts / "recipe.toml", *small, *own, "--run-dir", run)
    assert ran.code == 0, ran.err
    assert ran.json["steps"] == 2
    metrics = open_run(run).metrics()
    assert metrics.column("routing/replayed") == [1.0, 1.0]
    assert all(apart < APART for apart in metrics.column("train/rollout_log_prob_diff"))
    assert list((run / "export").glob("*.safetensors"))
