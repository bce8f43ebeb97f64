# SPDX-License-Identifier: Apache-2.0
"""A sampled stop token leaves the text of a turn and is not repeated before the next one, whatever its flag."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from relax_plugin_chat.chat import ChatFamily
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from relax_core.api.environment import Tool
from relax_core.api.task import Message

TOKENIZERS = tomllib.loads((Path(__file__).parent / "stop_tokens.toml").read_text())["tokenizers"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}END\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize("entry", TOKENIZERS, ids=[one["name"] for one in TOKENIZERS])
def test_a_sampled_stop_token_leaves_the_text(tmp_path: Path, entry: dict[str, Any]) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: place for place, one in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if not entry.get("in_vocabulary"):
        (tokenizer.add_special_tokens if entry["special"] else tokenizer.add_tokens)([entry["end"]])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    end = tokenizer.token_to_id(entry["end"])
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE.replace("END", entry["end"]))
    named = entry["named"]
    if named == "eos_token":
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": entry["end"]}))
    elif named != "template":
        (tmp_path / f"{named}.json").write_text(json.dumps({"eos_token_id": end}))
    family = ChatFamily()
    family.open({"path": str(tmp_path), "tool_calls": "hermes"})
    sampled = (*family.encode("a"), end)
    assert end in family.stop_tokens
    for tools in ((), (Tool("search"),)):
        assert family.parse(sampled, tools) == ("a", (), "")
        assert family.parse_beginning(sampled, tools) == "a"
    before = (Message("user", "q"), Message("assistant", "a"))
    shown = family.decode(family.delta(before, (Message("user", "r"),), end).tokens, skip_special=False)
    assert shown == f"\nuser:r{entry['end']}\nassistant:"
