# SPDX-License-Identifier: Apache-2.0
"""`[[teachers]]` and `[critic]`: how they are written, and folders that do not fit this policy are refused by their keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_core.api.errors import ConfigError
from relax_core.config.compose import compose, parse_config
from relax_core.config.run_config import RunConfig
from relax_core.registry.catalogue import Catalogue
from tests.unit.config.conftest import model_folder

POLICY = {"vocab_size": 4, "tokens": ("<pad>", "a", "b", "c")}


@pytest.fixture
def layer(tmp_path: Path) -> dict[str, Any]:
    policy, train = model_folder(tmp_path / "policy", **POLICY), tmp_path / "train.jsonl"
    train.write_text('{"prompt": "1+1", "answer": "2"}\n')
    return {"model": {"path": str(policy)}, "data": {"train": str(train)},
            "algorithm": "distillation", "rollout": {"max_new_tokens": 16}, "eval": {"every": 0}}  # fmt: skip


def composed(layer: dict[str, Any], catalogue: Catalogue, teachers: Any, *overrides: str) -> RunConfig:
    return compose([{**layer, "teachers": teachers}], overrides, catalogue).config


def test_a_folder_is_short_for_one_teacher(layer: dict[str, Any], installed: Catalogue, tmp_path: Path) -> None:
    path = model_folder(tmp_path / "teacher", **POLICY)
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
    fine = model_folder(tmp_path / "fine", **POLICY)
    other = model_folder(tmp_path / "other", **POLICY | made)
    with pytest.raises(ConfigError) as raised:
        composed(layer, installed, [{"path": str(fine), "only": "d=x"}, {"path": str(other), "only": "d=y"}])
    assert "teachers.1.path" in raised.value.field and says in str(raised.value)
    assert str(other) in str(raised.value)


def test_a_broken_teacher_is_refused_only_if_it_is_used(
    layer: dict[str, Any], installed: Catalogue, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"teachers\.0\.path.*does not exist"):
        composed(layer, installed, str(tmp_path / "nowhere"))
    unasked = {**layer, "algorithm": "grpo", "rewards": ["exact"]}
    assert composed(unasked, installed, str(tmp_path / "nowhere")).teachers


def test_a_reference_from_elsewhere_reads_the_policys_tokens(
    layer: dict[str, Any], installed: Catalogue, tmp_path: Path
) -> None:
    grpo = {**layer, "algorithm": {"name": "grpo", "kl_coef": 0.1}, "rewards": ["exact"]}
    same, other = (
        model_folder(tmp_path / "same", **POLICY),
        model_folder(tmp_path / "other", **POLICY | {"vocab_size": 5}),
    )
    assert compose([grpo], [f"reference.path={same}"], installed).config.reference.path == same
    with pytest.raises(
        ConfigError, match=r"reference\.path.*with a vocabulary of 5; the policy has 4.*name a reference"
    ):
        compose([grpo], [f"reference.path={other}"], installed)


def test_a_critic_from_elsewhere_reads_the_policys_tokens(
    layer: dict[str, Any], installed: Catalogue, tmp_path: Path
) -> None:
    ppo = {**layer, "algorithm": "ppo", "rewards": ["exact"]}
    same, other = model_folder(tmp_path / "same", 4), model_folder(tmp_path / "other", 5)
    assert compose([ppo], [f"critic.path={same}"], installed).config.critic.path == same
    for path, says in (
        (other, "with a vocabulary of 5; the policy has 4"),
        (tmp_path / "none", "a folder that does not exist"),
    ):
        with pytest.raises(ConfigError, match="critic.path") as caught:
            compose([ppo], [f"critic.path={path}"], installed)
        assert says in str(caught.value)
