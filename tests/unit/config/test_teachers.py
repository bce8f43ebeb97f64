# SPDX-License-Identifier: Apache-2.0
"""`[[teachers]]`: how they are written, and folders that can't teach this policy refused with field, got, fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_core.api.errors import ConfigError
from relax_core.config.compose import compose, parse_config
from relax_core.config.run_config import RunConfig
from relax_core.registry.catalogue import Catalogue


@pytest.fixture(scope="module")
def installed() -> Catalogue:
    return Catalogue.load()


def model(folder: Path, vocab_size: int | None = 4, tokens: Any = ("<pad>", "a", "b", "c"), **more: Any) -> Path:
    """A model's folder with just enough in it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "vocab_size": vocab_size}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    if tokens is not None:
        vocabulary = {token: place for place, token in enumerate(tokens)}
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, **more}))
    return folder


@pytest.fixture
def layer(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    return {"model": {"path": str(model(tmp_path / "policy"))}, "data": {"train": str(tmp_path / "train.jsonl")},
            "algorithm": "distillation", "rollout": {"max_new_tokens": 16}, "eval": {"every": 0}}  # fmt: skip


def composed(layer: dict[str, Any], catalogue: Catalogue, teachers: Any, *overrides: str) -> RunConfig:
    return compose([{**layer, "teachers": teachers}], overrides, catalogue).config


def test_a_folder_is_short_for_one_teacher(layer: dict[str, Any], installed: Catalogue, tmp_path: Path) -> None:
    path = model(tmp_path / "teacher")
    forms = [str(path), path, [str(path)], {"path": str(path)}, [{"path": str(path)}]]
    for form in forms:
        config = composed(layer, installed, form)
        assert [(teacher.path, teacher.only) for teacher in config.teachers] == [(path, "")]
        assert parse_config(config.dump(), installed) == config
    own = composed(layer, installed, str(path), "teachers.0.only=domain=maths", "teachers.0.dtype=bfloat16").teachers[0]
    assert (own.only, own.dtype) == ("domain=maths", "bfloat16")
    assert composed(layer, installed, [], f"teachers={path}").teachers[0].path == path
    with pytest.raises(ConfigError, match="teachers"):
        composed(layer, installed, 3)


@pytest.mark.parametrize(("made", "says"), [
    ({"vocab_size": 5}, "with a vocabulary of 5; the policy has 4, and token ids must mean the same in both"),
    ({"tokens": None}, "without tokenizer.json; save the teacher's own tokenizer there"),
    ({"tokens": ("<pad>", "a", "c", "b")}, "whose tokenizer maps 'b' to 3 instead of 2; token ids must mean"),
    ({"added_tokens": [{"content": "<end>", "id": 3}]}, "whose tokenizer maps '<end>' to 3 instead of None"),
])  # fmt: skip
def test_a_teacher_of_another_vocabulary_is_refused(
    layer: dict[str, Any], installed: Catalogue, tmp_path: Path, made: dict[str, Any], says: str
) -> None:
    fine, other = model(tmp_path / "fine"), model(tmp_path / "other", **made)
    with pytest.raises(ConfigError) as raised:
        composed(layer, installed, [{"path": str(fine), "only": "d=x"}, {"path": str(other), "only": "d=y"}])
    assert "teachers.1.path" in raised.value.field and says in str(raised.value)
    assert str(other) in str(raised.value)


def test_a_broken_teacher_is_refused_only_where_it_is_asked(
    layer: dict[str, Any], installed: Catalogue, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"teachers\.0\.path.*does not exist"):
        composed(layer, installed, str(tmp_path / "nowhere"))
    unasked = {**layer, "algorithm": "grpo", "rewards": ["exact"]}
    assert composed(unasked, installed, str(tmp_path / "nowhere")).teachers
