# SPDX-License-Identifier: Apache-2.0
"""Tool calls through a model's own files: what its template renders is read back, and the conversation goes on."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from hypothesis import assume, given, settings, strategies as st
from relax_plugin_chat.tool_calls import FORMATS, call_format

from relax_core.api.errors import ConfigError
from relax_core.api.family import ToolCallFormat
from relax_core.api.message_words import missing_words
from relax_core.api.task import Message, ToolCall
from tests.chat.tool_templates import CALL, TEMPLATES, TOOLS, open_family

WORDS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20) | st.sampled_from(
    [
        '{"a": "}"}',
        "</tool_call>",
        "</parameter>",
        "</arg_value>",
        "a\n\nb",
        '"',
        "'",
        "\\",
        "[f(a=1)]",
        "<think>",
        "True",
        "5",
        " x ",
        "```",
        "]",
        "é\u2028",
    ]
)
PLAIN = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | WORDS
)
VALUES = {
    "text": WORDS,
    "count": st.integers(),
    "ratio": st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
    "on": st.booleans(),
    "items": st.lists(PLAIN | st.lists(PLAIN, max_size=2), max_size=3),
    "table": st.dictionaries(WORDS, PLAIN, max_size=3),
    "maybe": st.none() | st.integers(),
}
CALLS = st.builds(ToolCall, st.sampled_from([tool.name for tool in TOOLS]), st.fixed_dictionaries({}, optional=VALUES))
TEXTS = ["", "Let me see.", "<think>so, so</think>\n\nWell"]


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return {
        name: open_family(tmp_path_factory.mktemp("model"), template, end)
        for name, (_, template, end) in TEMPLATES.items()
    }


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_calls_that_a_template_renders_are_read_back(families, name, data):
    family, (called, _, end) = families[name], TEMPLATES[name]
    single, bare = called == "llama", called in ("llama", "pythonic")
    calls = tuple(data.draw(st.lists(CALLS, min_size=1, max_size=1 if single else 3)))
    text = data.draw(st.sampled_from(TEXTS)) if not bare and name not in ("mistral", "deepseek-r1") else ""
    values = str([call.arguments for call in calls])
    assume(not any(token in values for token in ("<s>", end)))  # special tokens of the text itself
    assume(not re.search(r"</(parameter|arg_value)>(\s|\\n)*<", values))  # nobody could tell where such a value ends
    tokens = family.turn((Message("user", "go"),), Message("assistant", text, calls))
    said, read, error = family.parse(tokens, TOOLS)
    assert error == ""
    assert [(call.name, dict(call.arguments)) for call in read] == [(call.name, dict(call.arguments)) for call in calls]
    assert said.strip() == text
    assert end not in said and len({call.id for call in read}) == len(read)


def user(*said):
    return tuple(Message("user", text) for text in said)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_with_calls_and_answers_continues(families, name):
    """Turns of several calls, their answers and further calls: every template takes them, with the ids that it demands."""
    family, (_, _, end) = families[name], TEMPLATES[name]
    calls = (ToolCall("search", {"text": "x RELAXTURN"}), ToolCall("find_all", {"count": 1}))
    before = (*user("go"), Message("assistant", "", calls))
    answers = (Message("tool", "one", name="search"), Message("tool", "two"))
    for _ in range(2):
        said = family.decode(family.delta(before, answers, family.encode(end)[0]).tokens, skip_special=False)
        assert "one" in said and "two" in said and end not in said.split("one")[0]
        before = (*before, *answers, Message("assistant", "", calls))
    if name.startswith("mistral"):
        assert '"call_id": "call00002"' in said and '"call_id": "call00003"' in said
    if name == "kimi":
        assert "## Return of functions.search:2" in said and "## Return of functions.find_all:3" in said


def test_the_agents_template_shows_each_role_thought_call_and_named_result(families):
    calls = (ToolCall("search", {"text": "é"}), ToolCall("find_all", {"count": 1}))
    messages = (
        Message("system", "be brief"), Message("user", "go", name="anna"),
        Message("assistant", "now", calls, extra={"reasoning_content": "two calls"}),
        Message("tool", "nothing", name="search"), Message("tool", "many\nlines", name="find_all"), Message("user", "thanks"),
    )  # fmt: skip
    family = families["hermes"]
    text = family.decode(family.start(messages, TOOLS).tokens, skip_special=False)
    assert not list(missing_words(messages, text)) and text.endswith("<|im_start|>assistant\n")
    assert text.count("<|im_start|>system") == 1 and "<|im_start|>user anna\ngo<|im_end|>" in text
    turn = text.split("<|im_start|>assistant\n")[1].partition("<|im_end|>")[0]
    assert turn.startswith("<think>\ntwo calls\n</think>\n\nnow\n<tool_call>")
    assert [(call.name, call.arguments) for call in FORMATS["hermes"].parse(turn, TOOLS)[1]] == [
        (call.name, call.arguments) for call in calls
    ]
    assert "<|im_start|>tool search\nnothing<|im_end|>" in text and "tool find_all\nmany\nlines<|im_end|>" in text


def test_an_answer_has_the_id_of_the_call_of_its_name(families):
    calls = (
        ToolCall("search", {}, "aaaaaaaaa"),
        ToolCall("find_all", {}, "bbbbbbbbb"),
        ToolCall("search", {}, "a client's"),
    )
    before = (*user("go"), Message("assistant", "", calls))
    answers = [Message("tool", str(n), name=tool) for n, tool in enumerate(("find_all", "search", "search", "nobody"))]
    said = families["mistral"].decode(families["mistral"].delta(before, answers).tokens)
    ids = [piece.split('"')[0] for piece in said.split('"call_id": "')[1:]]
    assert ids[:2] == ["bbbbbbbbb", "aaaaaaaaa"] and all(len(one) == 9 and one.isalnum() for one in ids)


def test_a_template_that_leaves_calls_out_is_named(tmp_path):
    template = "{% for m in messages %}{{ m.role + m.content }}</s>{% endfor %}"
    family = open_family(tmp_path, template, "</s>", tool_calls="hermes")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja, which leaves out the call of 'search'"):
        family.turn(user("go"), Message("assistant", "x", (ToolCall("search", {}),)))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_of_calls_is_read_from_the_template(families, name):
    called, template, _ = TEMPLATES[name]
    assert call_format("auto", template) is FORMATS[called]
    assert call_format("hermes", template) is FORMATS["hermes"]


def test_names_of_formats_are_those_of_the_configuration():
    assert {"auto", *FORMATS} == set(get_args(ToolCallFormat))
    with pytest.raises(ConfigError, match=r"model\.tool_calls.*'herms'.*hermes"):
        call_format("herms", "")


def test_a_template_without_a_known_call_format_is_refused_with_tools(tmp_path):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    family = open_family(tmp_path, template, "</s>")
    family.start(user("go"))
    assert family.parse(family.encode("<tool_call>")) == ("<tool_call>", (), "")
    for prompt in ("go", user("go")):
        with pytest.raises(ConfigError, match=r"model\.tool_calls.*chat_template\.jinja.*name the format.*hermes"):
            family.start(prompt, TOOLS)
    assert open_family(tmp_path, template, "</s>", tool_calls="glm").start("go", TOOLS)


def test_a_thought_that_the_prompt_begins_has_no_calls(tmp_path):
    family = open_family(tmp_path, TEMPLATES["glm"][1], "</s>", chat_template_kwargs={"thinking": True})
    call, before = family.encode(CALL["glm"]), family.start(user("go")).tokens
    assert family.parse(call, TOOLS, before) == ("search\n", (), "")
    assert len(family.parse((*call, *family.encode("</think>"), *call), TOOLS, before)[1]) == 1
    for before in (before[:-1], (*before, *family.encode("</think>\n")), ()):
        assert len(family.parse(call, TOOLS, before)[1]) == 1


def test_marks_of_thoughts_that_are_special_tokens_are_read_and_left_out(tmp_path):
    family = open_family(tmp_path, TEMPLATES["mistral"][1], "</s>", FORMATS["mistral"].all_marks)
    assert family.parse(family.encode("[THINK]x[TOOL_CALLS]search[ARGS]{}[/THINK]b</s>"), TOOLS) == (
        "xsearch{}b",
        (),
        "",
    )
    said, calls, _ = family.parse(family.encode("[THINK]x[/THINK]a[TOOL_CALLS]search[ARGS]{}</s>"), TOOLS)
    assert said == "xa" and [call.name for call in calls] == ["search"]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_tokens_raise_and_none_that_is_special_is_shown(families, data):
    name = data.draw(st.sampled_from(sorted(families)))
    family = families[name]
    tokens = data.draw(st.lists(st.integers(0, family.vocab_size - 1), max_size=30))
    said, calls, error = family.parse(tokens, TOOLS)
    if name == "harmony":  # whose headers are no words
        assert not any(mark in said for mark in FORMATS[name].marks) and family.parse(tokens)[1:] == ((), "")
        return
    assert said == family.decode(tokens) or calls
    assert family.parse(tokens) == (family.decode(tokens), (), "")


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_partial_text_of_any_tokens_is_a_prefix_of_the_whole_text(families, data):
    family = data.draw(st.sampled_from(list(families.values())))
    tokens = data.draw(st.lists(st.integers(0, family.vocab_size - 1), max_size=40))
    end = data.draw(st.integers(0, len(tokens)))
    for tools in ((), TOOLS):
        whole, _, _ = family.parse(tokens, tools)
        assert whole.startswith(family.parse_beginning(tokens[:end], tools))
