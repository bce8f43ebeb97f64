# SPDX-License-Identifier: Apache-2.0
"""Architectures without the default attention run with another one, or the error names the keys that mend it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from relax_plugin_torch.model import load_model
from relax_plugin_transformers import loading
from relax_plugin_transformers.options import TransformersOptions

from relax_core.api.errors import ConfigError

ARCHITECTURES = tomllib.loads((Path(__file__).parent / "architectures.toml").read_text())["architectures"]
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
BOTH = "trainer.attention and engine.attention"


@pytest.mark.parametrize("entry", ARCHITECTURES, ids=[one["name"] for one in ARCHITECTURES])
def test_an_architecture_runs_or_is_refused_by_name(tmp_path: Path, entry: dict[str, Any]) -> None:
    config = getattr(transformers, entry["config"])(**SMALL, **entry.get("fields", {}))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    def trainer(attention: str) -> Any:
        auto = attention == "auto"
        return load_model(str(tmp_path), "sdpa" if auto else attention, torch.device("cpu"), auto=auto)

    def engine(attention: str) -> Any:
        return loading.load_model({"path": str(tmp_path)}, TransformersOptions(attention=attention))  # type: ignore[arg-type]

    for key, load in {"trainer.attention": trainer, "engine.attention": engine}.items():
        if refused := entry.get("refused"):
            with pytest.raises(ConfigError) as caught:
                load("auto")
            assert caught.value.field == "model.path" and refused in str(caught.value)
            continue
        assert load("auto").config._attn_implementation == entry["auto"]
        if not entry.get("sdpa", True):
            with pytest.raises(ConfigError) as caught:
                load("sdpa")
            assert caught.value.field == key and BOTH in str(caught.value)
