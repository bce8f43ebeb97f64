# SPDX-License-Identifier: Apache-2.0
"""A tokenizer may have tokens that the model lacks; a row that holds one is refused, in RL and in supervised training."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from relax_plugin_chat.chat import ChatFamily
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from relax_core.api.algorithm import Source
from relax_core.api.errors import ConfigError
from relax_core.data.dataset import Dataset, DatasetSettings
from relax_core.data.task_files import JsonLines
from relax_core.data.tasks import TaskSet, TaskSettings
from relax_core.sampling.rollout_worker import check_vocabulary

VOCABULARIES = tomllib.loads((Path(__file__).parent / "vocabularies.toml").read_text())["vocabularies"]


@pytest.mark.parametrize("supervised", [False, True])
@pytest.mark.parametrize("entry", VOCABULARIES, ids=[one["name"] for one in VOCABULARIES])
def test_a_row_is_refused_and_not_the_model(tmp_path: Path, entry: dict[str, Any], supervised: bool) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: place for place, one in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<extra>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": entry["model"], "eos_token_id": [256, 257]}))
    family = ChatFamily()
    family.open({"path": str(tmp_path)})
    assert all(token < entry["model"] for token in family.stop_tokens)
    if not entry.get("start", True):
        with pytest.raises(ConfigError, match=r"model\.tokenizer"):
            check_vocabulary(family, {"vocab_size": entry["engine"]})
        return
    check_vocabulary(family, {"vocab_size": entry["engine"]})
    row = {"prompt": "q", "completion": entry["row"]} if supervised else {"prompt": entry["row"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    source = JsonLines()
    source.open(str(tmp_path / "rows.jsonl"), {})

    def read() -> None:
        if supervised:
            Dataset(source, family, Source.DATASET, DatasetSettings(max_row_tokens=4096))
        else:
            TaskSet(source, family, TaskSettings(max_prompt_tokens=4096))

    if "refused" not in entry:
        read()
        return
    with pytest.raises(ConfigError) as caught:
        read()
    assert entry["refused"] in str(caught.value) and "rows.jsonl:1" in str(caught.value)
