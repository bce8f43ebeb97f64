# SPDX-License-Identifier: Apache-2.0
"""`[critic]`: a folder of its own is refused by its own key, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_core.api.errors import ConfigError
from relax_core.config.compose import compose
from relax_core.registry.catalogue import Catalogue


def model(folder: Path, vocab_size: int) -> Path:
    """A model's folder with just enough in it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "vocab_size": vocab_size}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_critic_from_elsewhere_reads_the_policys_tokens(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    layer = {"model": {"path": str(model(tmp_path / "policy", 4))}, "data": {"train": str(tmp_path / "train.jsonl")},
             "algorithm": "ppo", "rollout": {"max_new_tokens": 16}, "eval": {"every": 0}, "rewards": ["exact"]}  # fmt: skip
    catalogue = Catalogue.load()
    same, other = model(tmp_path / "same", 4), model(tmp_path / "other", 5)
    assert compose([layer], [f"critic.path={same}"], catalogue).config.critic.path == same
    for path, says in (
        (other, "with a vocabulary of 5; the policy has 4"),
        (tmp_path / "none", "a folder that does not exist"),
    ):
        with pytest.raises(ConfigError, match="critic.path") as caught:
            compose([layer], [f"critic.path={path}"], catalogue)
        assert says in str(caught.value)
