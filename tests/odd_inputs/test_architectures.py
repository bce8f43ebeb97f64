# SPDX-License-Identifier: Apache-2.0
"""Architectures run so that a row's log-probs depend on no neighbour, or the error names what can't run and the fix."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from relax_plugin_torch.model import load_model
from relax_plugin_torch.policy import Policy
from relax_plugin_transformers import loading
from relax_plugin_transformers.model import CausalModel
from relax_plugin_transformers.options import TransformersOptions

from relax_core.api import Ragged, RowBatch, RowId
from relax_core.api.errors import ConfigError
from relax_core.learn import PackedBatch
from relax_core.learn.attention import longest_row

ARCHITECTURES = tomllib.loads((Path(__file__).parent / "architectures.toml").read_text())["architectures"]
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
BOTH = "trainer.attention and engine.attention"


def save(entry: dict[str, Any], folder: Path) -> None:
    """Save a small model with large weights, so that a token has a visible effect on all that see it."""
    config = getattr(transformers, entry["config"])(**{**SMALL, **entry.get("fields", {})})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)


def load_to_train(folder: Path, attention: str) -> Any:
    auto = attention == "auto"
    return load_model(str(folder), "sdpa" if auto else attention, torch.device("cpu"), auto=auto)


def load_to_sample(folder: Path, attention: str) -> Any:
    table = {"path": str(folder), "dtype": "float32"}
    return loading.load_model(table, TransformersOptions(attention=attention))  # type: ignore[arg-type]


LOADS = {"trainer.attention": load_to_train, "engine.attention": load_to_sample}


@pytest.mark.parametrize("entry", ARCHITECTURES, ids=[one["name"] for one in ARCHITECTURES])
def test_an_architecture_runs_or_is_refused_by_name(tmp_path: Path, entry: dict[str, Any]) -> None:
    save(entry, tmp_path)
    scores = {}
    for key, load in LOADS.items():
        trains = key == "trainer.attention"
        if refused := entry.get("refused") or entry.get("untrainable" if trains else "unsampled"):
            with pytest.raises(ConfigError) as caught:
                score(load(tmp_path, "auto"), [[1, 2, 3]], trains)
            assert caught.value.field == "model.path" and refused in str(caught.value)
            continue
        if "untrainable" in entry:  # and so no run samples it
            continue
        model = load(tmp_path, "auto")
        assert model.config._attn_implementation == entry["auto"]
        if not entry.get("sdpa", True):
            with pytest.raises(ConfigError) as caught:
                load(tmp_path, "sdpa")
            assert caught.value.field == key and BOTH in str(caught.value)
        context = longest_row(model.config)
        assert context == entry.get("context", SMALL["max_position_embeddings"])
        scores[key] = apart_and_together(model, context, trains)
    if len(scores) == len(LOADS):
        np.testing.assert_allclose(*scores.values(), atol=1e-4)


def apart_and_together(model: Any, context: int, trains: bool) -> np.ndarray:
    """Return the log-probs of a short and a longest row, which are the same alone and in one batch, in any order."""
    rows = [list(np.random.default_rng(length).integers(3, 60, length)) for length in (9, context)]
    apart = np.concatenate([score(model, [row], trains) for row in rows])
    np.testing.assert_allclose(score(model, rows, trains), apart, atol=1e-4)
    np.testing.assert_allclose(
        np.concatenate([score(model, [row], trains) for row in rows[::-1]][::-1]), apart, atol=1e-6
    )
    return apart


def score(model: Any, rows: list[list[int]], trains: bool) -> np.ndarray:
    """Return the log-probs of rows that are one batch, as the trainer or the engine computes them."""
    with torch.no_grad():
        if not trains:
            return np.concatenate(CausalModel(model, 4096).score(rows))
        ids = tuple(RowId(number, 0, 0, 0) for number in range(len(rows)))
        masks = [np.array([0, *[1] * (len(row) - 1)], np.uint8) for row in rows]
        tokens = Ragged.of([np.array(row, np.int32) for row in rows])
        batch = PackedBatch(RowBatch(ids, {"tokens": tokens, "loss_mask": Ragged.of(masks)}))
        policy = Policy(model, temperature=1.0, autocast=None, max_logits=2**20, share_prefixes=True)
        return policy.score(batch)["log_probs"].numpy()
