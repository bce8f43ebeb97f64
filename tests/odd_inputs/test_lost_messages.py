# SPDX-License-Identifier: Apache-2.0
"""No message is lost without a word: a prompt has the words of each message, or the message is named and refused."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from relax_plugin_chat.chat import ChatFamily

from relax_core.api.errors import ConfigError
from relax_core.api.task import Message, Part, ToolCall
from relax_core.data.dataset import example
from tests.chat.models import SHAPES, open_family, write_model

CASES = tomllib.loads((Path(__file__).parent / "lost_messages.toml").read_text())["case"]
PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), SHAPES["one-line"])


def message(role: str, words: Any) -> Message:
    if role == "call":
        return Message("assistant", "", (ToolCall(words, {"text": "x"}),))
    return Message(role, words if isinstance(words, str) else tuple(map(Part, words)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["what"].replace(" ", "-"))
def test_a_prompt_has_all_words_or_is_refused(case: dict[str, Any], folder: Path) -> None:
    family = open_family(folder, chat_template=case["template"])
    messages = tuple(message(*each) for each in case["say"])
    for _ in range(2):  # once the form of the conversation is known too
        if case["prompt"].startswith("refused: "):
            with pytest.raises(ConfigError, match=case["prompt"].removeprefix("refused: ")) as caught:
                family.start(messages)
            assert caught.value.field == "model.chat_template" and caught.value.fix
        else:
            assert family.text(messages) == case["prompt"]


def test_messages_that_follow_a_turn_are_found_or_refused(folder: Path) -> None:
    known = "{% for m in messages %}{% if m.role != 'note' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    system_first = "{{ messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join }}"
    system_first += "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    before = (Message("user", "a"), Message("assistant", "b"))
    for template, role in ((known, "note"), (system_first, "system")):
        family = open_family(folder, chat_template=template)
        assert family.decode(family.delta(before, (Message("user", "c"),)).tokens) == "<user>c"
        with pytest.raises(ConfigError, match=f"leaves out words of a message of '{role}': 'c'"):
            family.delta(before, (Message(role, "c"),))


def test_a_template_that_reads_parts_trains_the_turns_of_a_conversation(folder: Path) -> None:
    family: ChatFamily = open_family(folder, chat_template=PARTS)
    messages = tuple(
        Message(role, words) for role, words in (("user", "12"), ("assistant", "ab"), ("user", "c"), ("assistant", "="))
    )
    made = example(family, messages, None)
    assert (
        family.decode(made.tokens, skip_special=False) == "<|user|>12<|assistant|>ab<eos><|user|>c<|assistant|>=<eos>"
    )
    trained = [token for token, mask in zip(made.tokens, made.mask, strict=True) if mask]
    assert family.decode(trained, skip_special=False) == "ab<eos>=<eos>"


def test_a_short_answer_that_the_template_leaves_out_is_trained_as_text(folder: Path) -> None:
    family = open_family(
        folder, chat_template="{% for m in messages %}{{ m.content if m.role == 'user' }}<eos>{% endfor %}"
    )
    made = example(family, (Message("user", "12"),), "e")
    assert family.decode(made.tokens, skip_special=False) == "12<eos>e<eos>"


def test_the_words_of_a_long_conversation_are_searched_once(folder: Path) -> None:
    """Each message is searched where the last one ended, so equal words and many messages take no quadratic time."""
    family = open_family(folder, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    messages = tuple(Message("user", "the same words") for _ in range(4000))
    assert len(re.findall("the same words", family.text(messages))) == 4000
