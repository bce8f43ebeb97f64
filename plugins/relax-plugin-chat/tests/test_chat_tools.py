# SPDX-License-Identifier: Apache-2.0
"""Tool schemas for templates, and tool calls read from what the policy wrote."""

from typing import Literal

import pytest
from relax_plugin_chat.chat_template import tool_schema, type_schema
from relax_plugin_chat.tool_calls import FORMATS

from relax_core.api.environment import Tool

parse_calls = FORMATS["hermes"].parse


def test_parameters_are_types_or_schema_or_a_whole_schema():
    whole = {"type": "object", "properties": {"q": {"type": "string"}}, "required": []}
    assert tool_schema(Tool("t", whole))["function"]["parameters"] == whole
    typed = tool_schema(Tool("t", {"q": str, "n": {"type": "integer", "minimum": 0}}))["function"]["parameters"]
    assert typed["properties"] == {"q": {"type": "string"}, "n": {"type": "integer", "minimum": 0}}
    assert typed["required"] == ["q", "n"]
    without = tool_schema(Tool("t", {"type": "object", "additionalProperties": False}))["function"]["parameters"]
    assert without == {"type": "object", "properties": {}, "additionalProperties": False}
    assert tool_schema(Tool("t", {"type": str}))["function"]["parameters"]["properties"] == {"type": {"type": "string"}}


@pytest.mark.parametrize("kind", [str, dict, {"type": "object"}, {"type": "object", "properties": {"a": {}}}])
def test_parameters_may_be_named_as_the_keys_of_a_schema_are(kind):
    schema = type_schema(kind)
    for name in ("type", "properties", "required"):
        assert tool_schema(Tool("t", {name: kind}))["function"]["parameters"] == {
            "type": "object", "properties": {name: schema}, "required": [name],
        }  # fmt: skip


@pytest.mark.parametrize("more", [{"properties": str}, {"q": str}, {"q": list[int]}])
def test_a_whole_schema_with_types_in_it_is_refused(more):
    with pytest.raises(TypeError, match="tool t: .* is not a JSON schema; list parameters in `properties`"):
        tool_schema(Tool("t", {"type": "object", **more}))


@pytest.mark.parametrize("schema", [{"anyOf": [{"type": "object"}]}, {"type": "string"}, {"required": ["a"]}])
def test_a_schema_of_another_kind_is_refused_with_its_missing_fields(schema):
    with pytest.raises(TypeError, match='write a whole schema with "type": "object"'):
        tool_schema(Tool("t", schema))


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (dict, {"type": "object"}),
        (float | None, {"anyOf": [{"type": "number"}, {"type": "null"}]}),
        (Literal["a", "b"], {"enum": ["a", "b"]}),
        (bool, {"type": "boolean"}),
    ],
)
def test_types_have_their_schema(kind, schema):
    assert type_schema(kind) == schema


def test_a_type_without_schema_is_refused():
    with pytest.raises(TypeError, match="no JSON schema"):
        type_schema(object)


def test_calls_are_taken_out_of_the_text_in_order():
    text = 'look\n<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>\n<tool_call>{"name": "b"}</tool_call>'
    said, calls, error = parse_calls(text)
    assert (said, error) == ("look", "")
    assert [(call.name, call.arguments) for call in calls] == [("a", {"x": 1}), ("b", {})]
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)


def test_arguments_may_be_json_in_a_string():
    _, calls, _ = parse_calls('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>')
    assert calls[0].arguments == {"x": 1}


@pytest.mark.parametrize("text", ["<tool_call>[1]</tool_call>", '<tool_call>{"name": 1}</tool_call>'])
def test_a_call_without_a_name_is_an_error(text):
    said, calls, error = parse_calls(text)
    assert (said, calls) == (text, ()) and "must be" in error
