# SPDX-License-Identifier: Apache-2.0
"""Each format of tool calls on texts: what is read, what is said of what can't be, and that no text raises or takes long."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st
from relax_plugin_chat.tool_calls import FORMATS

from relax_core.api.environment import Tool
from relax_core.rpc import messages as wire
from tests.chat.tool_templates import BAR, CALL, KINDS, SCHEMA, TOOLS

READ = [
    ("hermes", 'a <tool_call>{"name": "search", "arguments": {"text": "</tool_call>"}}</tool_call> b', "a  b"),
    ("qwen3-coder", "a <function=search>\n<parameter=text>\n</tool_call>\n</parameter>\n</function> b", "a  b"),
    (
        "qwen3-coder",
        "<tool_call><function=search><parameter=text></tool_call></parameter></function></tool_call> b",
        " b",
    ),
    ("glm", "a <tool_call>search<arg_key>text</arg_key><arg_value></tool_call></arg_value></tool_call>b", "a b"),
    ("llama", ' {"name": "search", "parameters": {"text": "</tool_call>"}}; ', ""),
    ("llama", '{"type": "function", "function": {"name": "search", "parameters": {"text": "</tool_call>"}}}', ""),
    ("llama", 'a<|python_tag|>{"name": "search", "arguments": {"text": "</tool_call>"}} b', "ab"),
    ("llama", 'a<|python_tag|>search.call(text="</tool_call>") b', "a b"),
    (
        "llama",
        '<think>{"name": "x"}</think>\n{"name": "search", "parameters": {"text": "</tool_call>"}}',
        '<think>{"name": "x"}</think>',
    ),
    ("mistral", 'a[TOOL_CALLS] [{"name": "search", "arguments": "{\\"text\\": \\"</tool_call>\\"}"}] b', "a b"),
    ("mistral", 'a[TOOL_CALLS]search{"text": "</tool_call>"} b', "a b"),
    ("phi", '<|tool_call|>[{"name": "search", "parameters": {"text": "</tool_call>"}}]<|/tool_call|>', ""),
    ("pythonic", "<|python_start|>[search(text='</tool_call>')]<|python_end|> b", " b"),
    ("pythonic", "[ search ( text = '</tool_call>' , ) ] b", " b"),
    (
        "harmony",
        'a<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"text": "</tool_call>"}<|call|> b',
        "a b",
    ),
    ("harmony", ' to=functions.search<|channel|>commentary json<|message|>\n{"text": "</tool_call>"}\n<|end|>', ""),
    ("harmony", '<|start|>assistant<|channel|>analysis to=search code<|message|>{"text": "</tool_call>"}', ""),
]


@pytest.mark.parametrize(("name", "text", "rest"), READ)
def test_calls_are_read_next_to_text_and_with_marks_in_their_values(name, text, rest):
    said, calls, error = FORMATS[name].parse(text, TOOLS)
    assert (error, said) == ("", rest)
    assert [(call.name, dict(call.arguments)) for call in calls] == [("search", {"text": "</tool_call>"})]


def test_text_without_marks_is_never_a_call():
    text = 'Sure: search(text="x"), {"name": "search", "parameters": {}} or ["search"], [1, 2]; {"a": 1}'
    for each in FORMATS.values():
        assert each.parse(text, TOOLS) == (text, (), "")
    for text in (
        '{"name": "Bob", "age": 3}',
        '{"answer": [4',
        '{"name": "Bob", "parameters',
        "[see(the) docs]",
        "[x",
        "[1](a)",
    ):
        for name in ("llama", "pythonic"):
            assert FORMATS[name].parse(text, TOOLS) == (text, (), "")


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_words_alone_are_never_a_call(text):
    for each in FORMATS.values():
        if not any(mark in text for mark in each.all_marks) and not (each.bare and text.lstrip().startswith(each.bare)):
            assert each.parse(text, TOOLS) == (text, (), "")


@pytest.mark.parametrize("name", FORMATS)
def test_calls_inside_a_thought_do_not_count(name):
    each, call = FORMATS[name], CALL[name]
    begins, ends = each.thought
    thoughts = [f"{begins}{call}{ends}", f"{begins}{call}", f"{begins}{call}{ends} ok"]
    if (
        name != "harmony"
    ):  # where the end of a thought ends any message: what the prompt has begun is known from it alone
        thoughts += [f"{call}{ends}", f"hm {call[:-2]}{ends}"]
    for thought in thoughts:
        assert each.parse(thought, TOOLS) == (thought, (), "")
        if ends in thought:
            said, calls, error = each.parse(thought + call, TOOLS)
            assert (said, len(calls), error) == (thought, 1, "")
    assert each.parse(call, TOOLS, thinking=True) == (call, (), "")
    assert len(each.parse(f"hm {call}{ends}{call}{call}", TOOLS, thinking=True)[1]) == 2


@pytest.mark.parametrize("name", FORMATS)
def test_a_truncated_call_is_reported_as_truncated(name):
    call = CALL[name]
    for length in range(max(map(len, FORMATS[name].opens)), len(call)):
        said, calls, error = FORMATS[name].parse("a " + call[:length], TOOLS)
        if call[:length].endswith(
            ("<|tool_call_end|>", f"tool▁call▁end{BAR}>", "<|message|>{}")
        ):  # whole, but for the mark after all calls
            assert len(calls) == 1 and not error
            continue
        assert (said, calls) == ("a " + call[:length], ()), call[:length]
        assert "cut off" in error or "not closed" in error, (call[:length], error)


ARGUMENTS = [
    ('{"text": "a", "text": "b"}', "key 'text' twice"),
    ('{"text": NaN}', "NaN"),
    ('{"count": 1e999}', "can't be written"),
    ('{"text": "\\ud800"}', "can't be written"),
    ('{"items": ' + "[" * 70 + "]" * 70 + "}", "nested more than 64"),
    ('{"items": ' + "[" * 5000 + "]" * 5000 + "}", "nested more than 64"),
    ('{"count": ' + "9" * 5000 + "}", "not JSON"),
    ("[1]", "must be an object"),
    ("{text: 1}", "not JSON"),
    ("{'text': 1}", "not JSON"),
]


@pytest.mark.parametrize(("arguments", "reason"), ARGUMENTS)
@pytest.mark.parametrize("name", ["hermes", "llama", "mistral", "deepseek", "kimi", "phi", "harmony"])
def test_arguments_that_fit_no_tool_are_reported(name, arguments, reason):
    call = CALL[name].replace("{}", arguments)
    said, calls, error = FORMATS[name].parse(call, TOOLS)
    assert not calls and said == call and reason in error


TYPED = {
    **KINDS, "level": {"enum": [1, 2]}, "mixed": {"enum": [1, "x"]}, "free": {"anyOf": [{}, {"type": "integer"}]},
    "itself": {"$ref": "#/properties/itself"}, "nowhere": {"$ref": "#/$defs/Gone/deeper"},
}  # fmt: skip


def written_as_text(name, key, written):
    """(arguments, error) of a call whose value is written as text."""
    call = {
        "qwen3-coder": f"<function=search><parameter={key}>\n{written}\n</parameter></function>",
        "glm": f"<tool_call>search\n<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>",
    }[name]
    _, calls, error = FORMATS[name].parse(call, (Tool("search", {**SCHEMA, "properties": TYPED}),))
    return (calls[0].arguments if calls else None), error


@pytest.mark.parametrize("name", ["qwen3-coder", "glm"])
@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "a</parameter></arg_value>b", "a</parameter></arg_value>b"),
        ("text", "5", "5"), ("text", " a\n", " a\n"), ("nobody", "5", "5"), ("free", "[]", "[]"), ("mixed", "1", "1"),
        ("itself", "1", "1"), ("nowhere", "1", "1"), ("count", "5", 5), ("count", " 5\n", 5), ("ratio", "5", 5),
        ("ratio", "0.5", 0.5), ("on", "True", True), ("on", "false", False), ("items", '[1, "a"]', [1, "a"]),
        ("table", "{}", {}), ("maybe", "None", None), ("maybe", "null", None), ("maybe", "3", 3), ("level", "2", 2),
    ],
)  # fmt: skip
def test_values_written_as_text_get_the_type_of_the_tools_schema(name, key, written, value):
    arguments, error = written_as_text(name, key, written)
    assert error == "" and arguments == {key: value} and type(arguments[key]) is type(value)


@pytest.mark.parametrize("name", ["qwen3-coder", "glm"])
@pytest.mark.parametrize(
    ("key", "written"),
    [
        ("count", "5.5"), ("count", "five"), ("count", "true"), ("count", "5 6"), ("on", "1"), ("items", "{}"),
        ("table", "[]"), ("level", "x"), ("ratio", "true"), ("maybe", ""),
    ],
)  # fmt: skip
def test_values_of_another_type_are_reported(name, key, written):
    arguments, error = written_as_text(name, key, written)
    assert arguments is None and f"argument '{key}' of tool call search must be" in error


@pytest.mark.parametrize(
    "schema",
    [
        {"type": [{}]}, {"type": 5}, {"enum": 3}, {"anyOf": {}}, {"oneOf": [3]}, {"$ref": "#/type/x"}, {"$ref": 3}, 3,
        {"enum": [[]]},
    ],
)  # fmt: skip
def test_an_invalid_schema_accepts_text_or_gives_an_error(schema):
    for parameters in ({"text": schema}, [schema], schema):
        tools = (Tool("search", {"type": "object", "properties": parameters}),)
        call = "<tool_call>search<arg_key>text</arg_key><arg_value>1</arg_value></tool_call>"
        _, calls, error = FORMATS["glm"].parse(call, tools)
        assert error or calls[0].arguments == {"text": "1"}


NO_DATA = "values of plain data"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("[search(1)]", "no name"), ("[search(**{'text': 1})]", "no name"), ("[search(), 1]", "must be"),
        ("[search(text='a', text='b')]", "name of another"), ("[search(text='\\ud800')]", "can't be written"),
        *((f"[search(text={value})]", NO_DATA) for value in (
            "x", "__import__('os')", "{1}", "1+2j", "b''", "'\0'", "f'{1}'", "(lambda: 1)()", "-" * 50_000 + "1",
            "1+" * 30_000 + "1", "1 if " * 20_000,
        )),
    ],
)  # fmt: skip
def test_python_that_is_not_a_plain_call_is_never_run(call, reason):
    said, calls, error = FORMATS["pythonic"].parse(call, TOOLS)
    assert not calls and said == call and reason in error


def test_words_of_json_are_python_s_too():
    _, (call,), _ = FORMATS["pythonic"].parse("[a.b(x=true, y=[null, False], z=(1, {'k': -2.5}))]")
    assert (call.name, call.arguments) == ("a.b", {"x": True, "y": [None, False], "z": [1, {"k": -2.5}]})


PIECES = sorted({
    *(mark for each in FORMATS.values() for mark in each.all_marks), *CALL.values(), '{"name": "search"',
    '"arguments": {', "<function=search>", "</function>", "<parameter=text>", "</parameter>", "search", "[search(", "text=",
    "functions.search:0", " to=functions.search", "<|channel|>final<|message|>", "<|start|>assistant",
    "```json", "null", *"{}[]()\"'\\, \n;\0",
})  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30), st.booleans())
def test_no_text_raises(pieces, thinking):
    text = "".join(pieces)
    for each in FORMATS.values():
        said, calls, error = each.parse(text, TOOLS, thinking)
        assert not (calls and error)
        assert calls or said == text
        for call in calls:
            assert wire.decode(wire.encode(call)).name == json.loads(json.dumps([call.name, call.arguments]))[0]


LONG = 50_000


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FORMATS)
def test_long_texts_are_parsed_in_linear_time(name):
    """Repeat every mark, with spaces, brackets and quotation marks between; a quadratic scan would take hours."""
    each = FORMATS[name]
    begun = {call[:cut] for call in (CALL[name],) for cut in range(1, len(call), 3)}
    for unit in {
        *each.all_marks,
        *each.opens,
        CALL[name],
        *begun,
        *(begin + " " for begin in begun),
        "{",
        "[",
        '{"a":',
        "[search(",
        "<think>a</think>",
    }:
        for text in (
            unit * (LONG // len(unit)),
            unit + " " * LONG,
            unit + "[" * LONG,
            unit + '"\\' * (LONG // 2),
            unit + "</parameter> " * (LONG // 13),
        ):
            each.parse(text, TOOLS)


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=20), st.integers(0, 400), st.booleans())
@settings(max_examples=200, deadline=None)
def test_early_text_is_never_changed_later(pieces, end, thinking):
    """Whatever the rest of a turn is, its text without calls begins with what was told of its beginning."""
    text = "".join(pieces)
    for calls_of in FORMATS.values():
        assert calls_of.parse(text, TOOLS, thinking)[0].startswith(calls_of.beginning(text[:end]))


@pytest.mark.parametrize("name", FORMATS)
def test_text_before_a_call_is_reported_early_without_the_calls_mark(name):
    mark, said = FORMATS[name].opens[0], "I look. "
    for end in range(len(mark) + 1):
        assert FORMATS[name].beginning(said + mark[:end]) == "I look."
    assert FORMATS[name].beginning(CALL[name]) == ""
