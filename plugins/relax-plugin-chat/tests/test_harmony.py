# SPDX-License-Identifier: Apache-2.0
"""Turns of gpt-oss: what of their messages is words, a thought or a call, how far they are told early, and how they go on."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import example, given, settings, strategies as st
from relax_plugin_chat import harmony
from relax_plugin_chat.chat import ChatFamily
from relax_plugin_chat.tool_calls import FORMATS

from relax_core.api.errors import ConfigError
from relax_core.api.task import Message, ToolCall
from tests.chat.tool_templates import CALL, HARMONY, TOOLS, open_family

READ = FORMATS["harmony"]
THOUGHT = "<|channel|>analysis<|message|>I had better look.<|end|>"
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
CALLED = '<|start|>assistant to=functions.search<|channel|>commentary json<|message|>{"text": "x"}<|call|>'
FINAL = "<|start|>assistant<|channel|>final<|message|>It is 42.<|return|>"
THINKS = "<|start|>assistant<|channel|>analysis<|message|>"
"""End of a prompt that has begun a thought."""


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> ChatFamily:
    """A model that ends its turns with `<|return|>` or `<|call|>`, as gpt-oss does."""
    folder = tmp_path_factory.mktemp("model")
    known = open_family(folder, HARMONY, "<|return|>")
    ends = [known.encode(mark)[0] for mark in ("<|return|>", "<|call|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    family = ChatFamily()
    family.open({"path": str(folder)})
    return family


def user(text: str) -> tuple[Message, ...]:
    return (Message("user", text),)


@pytest.mark.parametrize(
    ("text", "words", "names"),
    [
        (THOUGHT + PREAMBLE + CALLED, "<think>I had better look.</think>I look.", ["search"]),
        (THOUGHT + FINAL, "<think>I had better look.</think>It is 42.", []),
        (PREAMBLE.removeprefix("<|start|>assistant") + FINAL, "I look.\nIt is 42.", []),
        (THOUGHT + CALLED + CALLED + FINAL, "<think>I had better look.</think>It is 42.", ["search", "search"]),
        (CALLED.removeprefix("<|start|>assistant").removesuffix("<|call|>"), "", ["search"]),
        (THOUGHT.removesuffix("<|end|>"), "<think>I had better look.", []),
        (THOUGHT + "\n" + CALLED, "<think>I had better look.</think>", ["search"]),
        ("<|message|>no channel<|return|>", "no channel", []),
        ("no header", "no header", []),
        ("<|start|>assistant<|channel|>final<|end|>" + FINAL, "It is 42.", []),
        ("<|channel|>commentary to=assistant<|message|>{}<|end|>", "{}", []),
    ],
)
def test_text_thoughts_and_calls_are_distinguished(family: ChatFamily, text: str, words: str, names: list[str]) -> None:
    said, calls, error = family.parse(family.encode(text), TOOLS)
    assert (said, [call.name for call in calls], error) == (words, names, "")
    if not names:
        assert family.parse(family.encode(text)) == (words, (), "")


def test_without_tools_nothing_is_a_call_and_headers_are_not_words(family: ChatFamily) -> None:
    said, calls, error = family.parse(family.encode(THOUGHT + CALLED))
    assert (said, calls, error) == ('<think>I had better look.</think>{"text": "x"}', (), "")


def test_a_thought_that_the_prompt_begins_ends_with_its_message(family: ChatFamily) -> None:
    before = family.encode(THINKS)
    tokens = family.encode(f"so {CALL['harmony']}<|end|>{CALLED}")
    assert family.parse(family.encode("hm<|end|>" + FINAL), TOOLS, before) == ("hm</think>It is 42.", (), "")
    said, (call,), error = family.parse(tokens, TOOLS, before)  # marks of headers inside a message are none
    assert (call.arguments, error) == ({"text": "x"}, "") and said.startswith("so commentary to=functions.search")
    assert len(family.parse(tokens, TOOLS)[1]) == 2


@pytest.mark.parametrize("end", ["<|call|>", "<|end|>", "<|return|>", "<|start|>", "<|channel|>final<|message|>"])
def test_a_value_may_spell_marks(end: str) -> None:
    text = f'<|channel|>commentary to=functions.search<|message|>{{"text": "a{end}b"}}<|call|>'
    said, (call,), error = READ.parse(text + FINAL, TOOLS)
    assert (said, call.arguments, error) == (FINAL, {"text": f"a{end}b"}, "")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<|channel|>commentary to=functions.search<|message|>print(1)<|call|>", "not JSON"),
        ("<|channel|>commentary to=functions.search<|message|>{}{}<|call|>", r"must continue with <\|call\|>"),
        ("<|channel|>commentary to=functions.search<|end|>", r"must continue with <\|message\|>"),
        ("<|channel|>commentary to=functions.<|message|>{}<|call|>", "has no name"),
        ("<|channel|>analysis to=python code<|message|>{}<|call|>", "to=functions.NAME, got to=python"),
        ("<|channel|>commentary to=functions.search", "cut off"),
        (CALLED + "<|start|>assistant<|channel|>commentary to=functions.search<|message|>{", "cut off"),
    ],
)
def test_an_unreadable_call_is_reported_and_not_made(text: str, reason: str) -> None:
    said, calls, error = READ.parse(text, TOOLS)
    assert (said, calls) == (text, ())
    with pytest.raises(ValueError, match=reason):
        raise ValueError(error)


def test_partial_text_contains_no_headers_and_no_calls(family: ChatFamily) -> None:
    tokens = family.encode(THOUGHT + PREAMBLE + CALLED)
    told = [family.parse_beginning(tokens[:end], TOOLS) for end in range(len(tokens) + 1)]
    whole = "<think>I had better look.</think>I look."
    assert all(whole.startswith(one) for one in told) and told == sorted(told, key=len)
    assert told[-1] == whole and len(set(told)) > 20
    final = family.encode(FINAL.removeprefix("<|start|>assistant"))
    assert family.parse_beginning(final[:-5]) == family.parse_beginning(final[:-5], TOOLS) == "It is"
    begun = [family.parse_beginning(family.encode(" to=functions.sea"[:end]), TOOLS) for end in range(17)]
    assert set(begun) == {""}


TOKENS = st.lists(
    st.sampled_from([*harmony.MARKS, "analysis", "final", "commentary", " to=functions.search", " to=", "{}", "assistant"])
    | st.sampled_from([THOUGHT, CALLED, FINAL, " ", "\n", "t", "<", "<|", "é", "hm"]),
    max_size=20,
)  # fmt: skip


@given(pieces=TOKENS, end=st.integers(0, 200), thinks=st.booleans(), tools=st.sampled_from([(), TOOLS]))
@settings(max_examples=200, deadline=None)
def test_later_tokens_never_change_reported_text(family, pieces, end, thinks, tools) -> None:
    tokens, before = family.encode("".join(pieces)), family.encode(THINKS if thinks else "<|start|>assistant")
    said, calls, error = family.parse(tokens, tools, before)
    assert not (calls and (error or not tools))
    assert said.startswith(family.parse_beginning(tokens[:end], tools, before))


PIECES = st.lists(
    st.sampled_from([*harmony.MARKS, "<|", "<|ch", "annel|>", "end|>", "nd|>", "<|e", "final", "{}", "hm"])
    | st.sampled_from([" to=functions.search", "<|channel|>final<|message|>", CALL["harmony"]]),
    max_size=12,
)  # fmt: skip


@given(PIECES, st.integers(0, 150), st.booleans())
@example(["<|ch", CALL["harmony"], "annel|>"], 150, False)
@example(["hm<|ch", CALL["harmony"]], 30, False)
@example([" to=functions.search", "<|channel|>final<|message|>"], len(" to=functions.search<|ch"), False)
@settings(max_examples=300, deadline=None)
def test_marks_of_several_tokens_are_reported_only_when_complete(pieces, end, thinks) -> None:
    text = "".join(pieces)
    whole = READ.words(READ.parse(text, TOOLS, thinks)[0], thinking=thinks)
    assert whole.startswith(READ.words(READ.beginning(text[:end], thinks), thinking=thinks).rstrip())


@pytest.mark.parametrize(("last", "closes"), [("<|return|>", ""), ("<|call|>", ""), (None, ""), ("x", "<|end|>")])
def test_a_turn_that_was_ended_is_not_ended_again(family: ChatFamily, last: str | None, closes: str) -> None:
    number = None if last is None else family.encode(last)[0]
    going_on = family.delta((*user("go"), Message("assistant", "It is 42.")), user("why?"), number)
    shown = family.decode(going_on.tokens, skip_special=False)
    assert shown == f"{closes}<|start|>user<|message|>why?<|end|><|start|>assistant"


@pytest.mark.parametrize(("last", "closes"), [("<|call|>", ""), ("<|return|>", ""), (None, ""), ("}", "<|call|>")])
def test_an_answer_follows_a_call_though_the_template_refuses_it_behind_words(
    family: ChatFamily, last: str | None, closes: str
) -> None:
    number = None if last is None else family.encode(last)[0]
    calls = (ToolCall("search", {"text": 'RELAXTURN"}'}), ToolCall("find_all", {}))
    before = (*user("RELAXTURN"), Message("assistant", "", calls))
    for name in ("find_all", "search"):
        going_on = family.delta(before, (Message("tool", "found", name=name),), number)
        shown = family.decode(going_on.tokens, skip_special=False)
        answer = f'<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"found"<|end|>'
        assert shown == f"{closes}{answer}<|start|>assistant"


def test_a_thought_is_given_to_the_template_apart_and_read_back(family: ChatFamily) -> None:
    calls = (ToolCall("search", {"text": "x"}),)
    for text, made in (
        ("<think>so</think>It is 42.", ()),
        ("<think>so\n</think>", calls),
        ("<think>so</think>I look.", calls),
    ):
        tokens = family.turn(user("go"), Message("assistant", text, made))
        said, read, error = family.parse(tokens, TOOLS)
        assert (said, [call.name for call in read], error) == (text, [call.name for call in made], "")
    shown = family.text((*user("go"), Message("assistant", "<think>so</think>\nIt is 42."), *user("why?")))
    assert "<|channel|>final<|message|>It is 42.<|end|>" in shown and "so" not in shown


LONG = 100_000


@pytest.mark.timeout(300)  # a quadratic scan would take hours
@pytest.mark.parametrize(
    "unit", [*harmony.MARKS, THOUGHT, CALLED, FINAL, "<|start|> ", "<|channel|>x<|message|>", " to=", " ", "<", "<|message|> {"]
)  # fmt: skip
@pytest.mark.parametrize("thinking", [False, True])
def test_long_texts_are_read_in_linear_time(unit: str, thinking: bool) -> None:
    for text in (unit * (LONG // len(unit)), unit + " " * LONG, " " * LONG + unit, " to=" + "x" * LONG + unit):
        READ.words(READ.beginning(text, thinking), thinking=thinking)
        READ.words(text, thinking=thinking)


def test_each_call_of_a_given_turn_is_a_turn_before_its_answer(family: ChatFamily) -> None:
    """The template shows the name of the last call in the header of an answer."""
    calls = tuple(ToolCall(name, {"k": name}, name) for name in "fgh")
    answers = [Message("tool", f"is {name}", extra={"tool_call_id": name}) for name in "gf"]
    given = (*user("go"), Message("assistant", "I look.", calls), *answers, *user("on"))
    for shown in (
        family.text(given),
        family.decode(family.delta((*user("hi"), Message("assistant", "x")), given).tokens, False),
    ):
        steps = re.findall(
            r"to=functions\.(\w)|functions\.(\w) to=assistant<\|channel\|>commentary<\|message\|>\"(.*?)\"", shown
        )
        assert steps == [("f", "", ""), ("", "f", "is f"), ("g", "", ""), ("", "g", "is g"), ("h", "", "")]
        assert shown.count("I look.") == 1
    with pytest.raises(ConfigError, match="does not show the field 'weight' of a message of 'assistant'"):
        family.text((*given[:1], replace(given[1], extra={"weight": 0}), *given[2:]))
    with pytest.raises(ConfigError, match="ends a turn with 3 calls before .*write each call as a turn of its own"):
        family.turn(given[:1], given[1])
