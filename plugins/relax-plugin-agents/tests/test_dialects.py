# SPDX-License-Identifier: Apache-2.0
"""What clients send is read as one request in every dialect, and refused by its field where it can't be served."""

from __future__ import annotations

import copy
import json
import re
from datetime import datetime

import pytest
from relax_plugin_agents.dialects.chat import ChatCompletions
from relax_plugin_agents.dialects.messages import AnthropicMessages
from relax_plugin_agents.dialects.responses import Responses
from relax_plugin_agents.model_request import Refused
from relax_plugin_chat.chat_template import ChatTemplate, tool_schema

from relax_core.api import ConfigError
from relax_core.api.environment import Tool
from relax_core.api.task import Media, Message, Part, ToolCall

CHAT, RESPONSES, MESSAGES = ChatCompletions(), Responses(), AnthropicMessages()
PIXEL = "data:image/png;base64,iVBORw0KGgo="
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NAMED = {"name": "weather", "description": "The weather of a city."}
WEATHER_TOOL = Tool("weather", WEATHER, "The weather of a city.")
OSLO = ToolCall("weather", {"city": "Ośló"}, "call_1")
ROME = ToolCall("weather", {"city": "Rome"}, "call_2")

LANGGRAPH = {
    "model": "policy", "stream": False, "temperature": 0.7, "n": 1, "parallel_tool_calls": True,
    "tools": [{"type": "function", "function": {**NAMED, "parameters": WEATHER, "strict": True}}],
    "messages": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Oslo or Rome?"},
        {
            "role": "assistant", "content": None, "name": "agent",
            "tool_calls": [
                {"type": "function", "id": "call_1", "function": {"name": "weather", "arguments": '{"city": "Ośló"}'}},
                {"type": "function", "id": "call_2", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_2", "content": "sun", "name": "weather"},
        {
            "role": "tool", "tool_call_id": "call_1",
            "content": [{"type": "text", "text": "ra"}, {"type": "text", "text": "in"}],
        },
    ],
}  # fmt: skip

OPENAI_AGENTS = {
    "model": "policy", "instructions": "Be brief.", "include": [], "store": False, "stream": True, "temperature": 0.7,
    "tool_choice": "auto", "truncation": "auto", "max_output_tokens": 64, "prompt_cache_key": "trace_1",
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "tools": [{"type": "function", **NAMED, "parameters": WEATHER, "strict": True}],
    "input": [
        {"role": "user", "content": "Oslo or Rome?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {
            "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {
            "type": "function_call", "id": "fc_call_1", "call_id": "call_1", "name": "weather",
            "arguments": '{"city": "Ośló"}', "status": "completed",
        },
        {"type": "function_call", "call_id": "call_2", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "sun"}]},
    ],
}  # fmt: skip

CLAUDE_CODE = {
    "model": "policy", "max_tokens": 32000, "stream": True, "metadata": {"user_id": "user_1"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"}, "temperature": 1,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.100; cc_entrypoint=cli; cch=eb6c6;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [{**NAMED, "input_schema": WEATHER, "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Today.</system-reminder>\n"},
                {"type": "text", "text": "Oslo or Rome?", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Ośló"}},
                {"type": "tool_use", "id": "call_2", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": "no such city", "is_error": True},
                {"type": "tool_result", "tool_use_id": "call_2", "content": [{"type": "text", "text": "sun"}]},
                {"type": "text", "text": "Go on."},
            ],
        },
    ],
}  # fmt: skip


def refused(dialect, body):
    with pytest.raises(Refused) as caught:
        dialect.ask(body)
    assert caught.value.message.startswith("got ") and "; allowed: " in caught.value.message
    return caught.value


def result_of(call, content):
    return Message("tool", content, name=call.name, extra={"tool_call_id": call.id})


def one_user(dialect, **fields):
    history = "input" if dialect is RESPONSES else "messages"
    return {"model": "policy", history: [{"role": "user", "content": "hi"}], **fields}


def test_parallel_calls_of_langgraph_and_their_results_are_read_in_order():
    request = CHAT.ask(LANGGRAPH)
    assert request.messages == (
        Message("system", "Be brief."),
        Message("user", "Oslo or Rome?"),
        Message("assistant", "", (OSLO, ROME), name="agent"),
        result_of(ROME, "sun"),
        result_of(OSLO, "rain"),
    )
    assert (request.tools, request.overridden, request.stream) == ((WEATHER_TOOL,), ("temperature",), False)


def test_items_of_openai_agents_become_one_turn_of_the_assistant():
    request = RESPONSES.ask(OPENAI_AGENTS)
    assert request.messages == (
        Message("system", "Be brief."),
        Message("user", "Oslo or Rome?"),
        Message("assistant", "I look.", (OSLO, ROME)),
        result_of(OSLO, "rain"),
        result_of(ROME, "sun"),
    )
    assert request.tools == (WEATHER_TOOL,)
    assert (request.max_new_tokens, request.stream) == (64, True)
    assert request.overridden == ("temperature", "text.verbosity")


def test_results_in_a_users_message_of_claude_code_come_before_its_words():
    request = MESSAGES.ask(CLAUDE_CODE)
    assert request.messages == (
        Message("system", "You are an agent.\nBe brief."),
        Message("user", "<system-reminder>Today.</system-reminder>\nOslo or Rome?"),
        Message("assistant", "I look.", (OSLO, ROME), extra={"reasoning_content": "Hm."}),
        result_of(OSLO, "no such city"),
        result_of(ROME, "sun"),
        Message("user", "Go on."),
    )
    assert (request.tools, request.max_new_tokens, request.stream) == ((WEATHER_TOOL,), 32000, True)
    assert request.overridden == ("temperature", "thinking", "output_config.effort")


def test_the_line_that_claude_code_changes_in_every_request_is_removed_from_the_prompt():
    blocks = copy.deepcopy(CLAUDE_CODE)
    blocks["system"][0]["text"] = "x-anthropic-billing-header: cc_version=2.1.100; cc_entrypoint=cli; cch=00000;"
    assert MESSAGES.ask(blocks) == MESSAGES.ask(CLAUDE_CODE)
    joined = one_user(MESSAGES, system="x-anthropic-billing-header: cch=1;\nBe brief.")
    assert MESSAGES.ask(joined).messages[0] == Message("system", "Be brief.")


def test_messages_of_mini_swe_agent_are_read_without_its_records():
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    extras = {"function_call": None, "reasoning_content": "Hm.", "provider_specific_fields": {"refusal": None}}
    messages = [
        {"role": "user", "content": "Fix it.", "extra": {"timestamp": 1.5}},
        {"role": "assistant", "content": "I list.", "tool_calls": [call], **extras},
        {"role": "tool", "tool_call_id": "c", "content": "<returncode>0</returncode>"},
    ]
    asked, turn, result = CHAT.ask({"messages": messages}).messages
    call = ToolCall("bash", {"command": "ls"}, "c")
    assert turn == Message("assistant", "I list.", (call,), extra={"reasoning_content": "Hm."})
    assert (asked.extra, result.name) == ({}, "bash")


SAID = {"role": "user", "content": "hi"}
FIELDS = [
    (CHAT, [{**SAID, "name": "Ann"}], Message("user", "hi", name="Ann")),
    (CHAT, [{"role": "developer", "content": "hi", "name": "Ann"}], Message("system", "hi", name="Ann")),
    (CHAT, [{**SAID, "name": None, "note": "", "list": [], "table": {}}], Message("user", "hi")),
    (CHAT, [{**SAID, "weight": 0}], Message("user", "hi", extra={"weight": 0})),
    (CHAT, [{"role": "assistant", "content": "", "reasoning": "Hm."}], Message("assistant", "", extra={"reasoning": "Hm."})),
    (CHAT, [{"role": "assistant", "content": None, "refusal": "No."}], Message("assistant", "No.")),
    (CHAT, [{"role": "assistant", "content": "a", "refusal": "No."}], Message("assistant", "a", extra={"refusal": "No."})),
    (CHAT, [{"role": "assistant", "content": "a", "annotations": [{}], "thinking_blocks": [{}]}], Message("assistant", "a")),
    (RESPONSES, [{**SAID, "name": "Ann", "id": "i", "status": "completed"}], Message("user", "hi", name="Ann")),
    (
        RESPONSES,
        [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Short."}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Long."}]},
            {"type": "reasoning", "summary": [], "encrypted_content": "x"},
            {"role": "assistant", "content": "a"},
        ],
        Message("assistant", "a", extra={"reasoning_content": "Short.\nLong."}),
    ),
    (
        RESPONSES,
        [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
         {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}],
        Message("assistant", "", (ToolCall("f", {}, "a"),), extra={"reasoning_content": "Hm."}),
    ),
    (
        MESSAGES,
        [{"role": "assistant", "content": [{"type": "thinking", "thinking": "A"}, {"type": "redacted_thinking", "data": "x"},
                                           {"type": "thinking", "thinking": "B"}, {"type": "text", "text": "a"}]}, SAID],
        Message("assistant", "a", extra={"reasoning_content": "A\nB"}),
    ),
    (MESSAGES, [{**SAID, "name": "Ann"}], Message("user", "hi", name="Ann")),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "entries", "read"), FIELDS)
def test_every_field_of_a_message_is_kept_for_the_template(dialect, entries, read):
    history = "input" if dialect is RESPONSES else "messages"
    assert dialect.ask({history: entries}).messages[0] == read


def test_a_template_shows_a_field_or_the_field_is_named():
    template = "{% for m in messages %}{{ m.role }} {{ m.name|default('nobody') }}: {{ m.content }}\n{% endfor %}"
    (named,) = CHAT.ask({"messages": [{**SAID, "name": "Ann"}]}).messages
    assert ChatTemplate(template, "t", {}, datetime.now()).render((named,)) == "user Ann: hi\n"
    (given,) = CHAT.ask({"messages": [{**SAID, "channel": "aside"}]}).messages
    with pytest.raises(ConfigError, match="does not show the field 'channel' of a message of 'user'"):
        ChatTemplate(template, "t", {}, datetime.now()).render((given,))


def test_images_are_read_by_data_and_by_url_and_in_results_of_tools():
    url = "https://example.org/a.png"
    pixel = {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}}
    said = {"role": "user", "content": [{"type": "text", "text": "See"}, pixel]}
    assert CHAT.ask({"messages": [said]}).messages[0].content == (Part("See"), Part(media=Media("image", PIXEL)))
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": url, "detail": "auto"}]
    assert RESPONSES.ask({"input": [{"role": "user", "content": parts}]}).messages[0].content == (
        Part("a"),
        Part(media=Media("image", url)),
    )
    body = copy.deepcopy(CLAUDE_CODE)
    results = body["messages"][2]["content"]
    results[0]["content"] = [{"type": "image", "source": {"type": "url", "url": url}}]
    results[2] = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    first, _, said = MESSAGES.ask(body).messages[-3:]
    assert first == result_of(OSLO, (Part(media=Media("image", url)),))
    assert said == Message("user", (Part(media=Media("image", PIXEL)),))


def test_a_developer_is_the_system_and_stays_in_its_place():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "developer", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    for request in (CHAT.ask({"messages": messages}), RESPONSES.ask({"input": messages})):
        assert [message.role for message in request.messages] == ["user", "system", "user"]


def test_a_string_is_an_input_and_calls_without_words_are_a_turn():
    assert RESPONSES.ask({"input": "hi"}).messages == (Message("user", "hi"),)
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": ""}
    result = {"type": "function_call_output", "call_id": "a", "output": "1"}
    later = {"role": "assistant", "content": "done"}
    messages = RESPONSES.ask({"input": [call, {**call, "call_id": "b"}, result, later, later]}).messages
    assert messages == (
        Message("assistant", "", (ToolCall("f", {}, "a"), ToolCall("f", {}, "b"))),
        result_of(ToolCall("f", {}, "a"), "1"),
        Message("assistant", "done"),
        Message("assistant", "done"),
    )


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"type": "object", "properties": None}])
def test_a_tool_without_parameters_is_shown_to_the_policy_without_any(parameters):
    tools = [{"type": "function", "function": {"name": "now", "description": None, "parameters": parameters}}]
    (tool,) = CHAT.ask(one_user(CHAT, tools=tools)).tools
    assert tool_schema(tool)["function"]["parameters"] == {"type": "object", "properties": {}}


def test_fields_that_change_nothing_are_let_through():
    settings = {
        "user": "u", "metadata": {}, "service_tier": "auto", "store": True, "safety_identifier": "s", "logprobs": False,
        "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {},
        "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"], "temperature": None,
    }  # fmt: skip
    request = CHAT.ask(one_user(CHAT, **settings))
    assert (request.overridden, request.max_new_tokens, request.stop, request.stream) == ((), None, (), False)


def test_sampling_settings_of_the_client_are_reported_as_overridden():
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "reasoning_effort", "reasoning", "thinking", "verbosity")
    assert CHAT.ask(one_user(CHAT, **dict.fromkeys(names, 0))).overridden == names


def test_limits_and_stops_are_read_from_each_dialects_fields():
    assert CHAT.ask(one_user(CHAT, max_tokens=9, max_completion_tokens=7, stop="X")).max_new_tokens == 7
    assert CHAT.ask(one_user(CHAT, stop="X")).stop == ("X",)
    assert CHAT.ask(one_user(CHAT, stop=["Observation:", "Calling tools:"])).stop == ("Observation:", "Calling tools:")
    assert RESPONSES.ask(one_user(RESPONSES, max_output_tokens=5)).max_new_tokens == 5
    anthropic = MESSAGES.ask(one_user(MESSAGES, max_tokens=3, stop_sequences=["X", "Y"]))
    assert (anthropic.max_new_tokens, anthropic.stop) == (3, ("X", "Y"))


FUNCTION = {"type": "function", "function": {"name": "f"}}
SETTINGS = [
    (CHAT, "response_format", {"type": "json_object"}),
    (CHAT, "tool_choice", "required"),
    (CHAT, "tool_choice", {"type": "function", "function": {"name": "f"}}),
    (CHAT, "logit_bias", {"1": 1}),
    (CHAT, "n", 2),
    (CHAT, "presence_penalty", 0.5),
    (CHAT, "frequency_penalty", -1),
    (CHAT, "logprobs", True),
    (CHAT, "functions", [{"name": "f"}]),
    (CHAT, "stream", "yes"),
    (CHAT, "stream_options", True),
    (CHAT, "max_tokens", 0),
    (CHAT, "max_completion_tokens", 1.5),
    (CHAT, "stop", ""),
    (CHAT, "stop", 1),
    (CHAT, "tools", {}),
    (CHAT, "messages", []),
    (RESPONSES, "previous_response_id", "resp_1"),
    (RESPONSES, "tool_choice", {"type": "function", "name": "f"}),
    (RESPONSES, "text", "plain"),
    (RESPONSES, "input", []),
    (RESPONSES, "instructions", []),
    (MESSAGES, "tool_choice", {"type": "any"}),
    (MESSAGES, "mcp_servers", [{"type": "url", "url": "https://example.org", "name": "a"}]),
    (MESSAGES, "system", 1),
    (MESSAGES, "max_tokens", "1"),
]


@pytest.mark.parametrize(("dialect", "field", "value"), SETTINGS)
def test_a_setting_that_is_not_served_is_refused_by_its_name(dialect, field, value):
    assert refused(dialect, one_user(dialect, **{field: value})).field == field


NESTED = [
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}}, "text.format"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
    (CHAT, {"stop": ["a", ""]}, "stop[1]"),
    (MESSAGES, {"system": [{"type": "image"}]}, "system[0].type"),
    (CHAT, {"tools": [FUNCTION], "tool_choice": "none"}, "tool_choice"),
    (CHAT, {"tools": [FUNCTION, FUNCTION]}, "tools[1].function.name"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    (RESPONSES, {"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type"),
    (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": {"properties": 1}}]}, "tools[0].input_schema.properties"),
]


@pytest.mark.parametrize(("dialect", "fields", "path"), NESTED)
def test_a_field_inside_another_is_refused_by_its_path(dialect, fields, path):
    assert refused(dialect, one_user(dialect, **fields)).field == path


def chat_call(**changed):
    return {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}", **changed}}


def holding(role, **part):
    """Return a message of one part."""
    return {"role": role, "content": [part]}


CALL_ITEM = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
HISTORIES = [
    (CHAT, "hi", ""),
    (CHAT, {"role": "function", "content": "1"}, ".role"),
    (CHAT, {"role": "user"}, ".content"),
    (CHAT, {"role": "user", "content": ["hi"]}, ".content[0]"),
    (CHAT, holding("user", type="input_audio"), ".content[0].type"),
    (CHAT, holding("user", type="text"), ".content[0].text"),
    (CHAT, holding("user", type="image_url", image_url="x"), ".content[0].image_url"),
    (CHAT, holding("user", type="image_url", image_url={"url": "/etc/passwd"}), ".content[0].image_url.url"),
    (CHAT, {"role": "assistant", "content": None}, ".content"),
    (CHAT, {"role": "assistant", "content": "", "function_call": {"name": "f"}}, ".function_call"),
    (CHAT, {"role": "assistant", "tool_calls": {}}, ".tool_calls"),
    (CHAT, {"role": "assistant", "tool_calls": [chat_call(arguments="[1]")]}, ".tool_calls[0].function.arguments"),
    (CHAT, {"role": "assistant", "tool_calls": [chat_call(arguments="{")]}, ".tool_calls[0].function.arguments"),
    (
        CHAT,
        {"role": "assistant", "tool_calls": [chat_call(arguments='{"a": "\\ud83d"}')]},
        ".tool_calls[0].function.arguments",
    ),
    (CHAT, {"role": "assistant", "tool_calls": [chat_call(arguments={})]}, ".tool_calls[0].function.arguments"),
    (CHAT, {"role": "assistant", "tool_calls": [chat_call(name=1)]}, ".tool_calls[0].function.name"),
    (CHAT, {"role": "assistant", "tool_calls": [{**chat_call(), "type": "custom"}]}, ".tool_calls[0].type"),
    (CHAT, {"role": "tool", "tool_call_id": "call_9", "content": "1"}, ".tool_call_id"),
    (CHAT, {"role": "user", "content": "hi", "name": 5}, ".name"),
    (RESPONSES, {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}, ""),
    (RESPONSES, {"type": "reasoning", "content": [{"type": "image"}]}, ".content[0].type"),
    (MESSAGES, holding("assistant", type="thinking"), ".content[0].thinking"),
    (RESPONSES, {"role": "tool", "content": "1"}, ".role"),
    (RESPONSES, {"type": "item_reference", "id": "msg_1"}, ".type"),
    (RESPONSES, {**CALL_ITEM, "arguments": "x"}, ".arguments"),
    (RESPONSES, {"type": "function_call_output", "call_id": "call_9", "output": "1"}, ".call_id"),
    (RESPONSES, {"type": "function_call_output", "call_id": "call_9"}, ".output"),
    (RESPONSES, holding("user", type="input_file", file_id="f"), ".content[0].type"),
    (RESPONSES, holding("user", type="input_image", file_id="f"), ".content[0].image_url"),
    (MESSAGES, {"role": "tool", "content": "1"}, ".role"),
    (MESSAGES, {"role": "assistant", "content": "Sure, "}, ".role"),
    (MESSAGES, holding("user", type="document"), ".content[0].type"),
    (MESSAGES, holding("user", type="tool_result", tool_use_id="t"), ".content[0].tool_use_id"),
    (MESSAGES, holding("user", type="image", source={"type": "file", "file_id": "f"}), ".content[0].source.type"),
    (MESSAGES, holding("assistant", type="server_tool_use"), ".content[0].type"),
    (MESSAGES, holding("assistant", type="tool_use", id="t", name="f", input="{}"), ".content[0].input"),
]


@pytest.mark.parametrize(("dialect", "entry", "path"), HISTORIES)
def test_a_malformed_message_is_refused_by_its_path(dialect, entry, path):
    history = "input" if dialect is RESPONSES else "messages"
    body = {history: [{"role": "user", "content": "hi"}, entry]}
    assert refused(dialect, body).field == f"{history}[1]{path}"


def history_of(dialect, *steps):
    """A history of a dialect: a user's text, calls as a list of (id, k), or a result as (id, text)."""
    messages = []
    for step in steps:
        if isinstance(step, str):
            entries = [{"role": "user", "content": step}]
        elif dialect is CHAT and isinstance(step, list):
            called = [("lookup", json.dumps({"k": k}), name) for name, k in step]
            calls = [
                {"id": name, "function": {"name": tool, "arguments": arguments}} for tool, arguments, name in called
            ]
            entries = [{"role": "assistant", "tool_calls": calls}]
        elif dialect is CHAT:
            entries = [{"role": "tool", "tool_call_id": step[0], "content": step[1]}]
        elif dialect is RESPONSES and isinstance(step, list):
            call = {"type": "function_call", "name": "lookup"}
            entries = [{**call, "call_id": name, "arguments": json.dumps({"k": k})} for name, k in step]
        elif dialect is RESPONSES:
            entries = [{"type": "function_call_output", "call_id": step[0], "output": step[1]}]
        elif isinstance(step, list):
            blocks = [{"type": "tool_use", "id": name, "name": "lookup", "input": {"k": k}} for name, k in step]
            entries = [{"role": "assistant", "content": blocks}]
        else:
            block = {"type": "tool_result", "tool_use_id": step[0], "content": step[1]}
            entries = [{"role": "user", "content": [block]}]
        messages += entries
    return {"input" if dialect is RESPONSES else "messages": messages}


TWO = [("callA", "A"), ("callB", "B")]
ORDERS = [
    ((TWO, ("callB", "is-B"), ("callA", "is-A")), "callB=is-B callA=is-A", "is-A is-B"),
    ((TWO, ("callB", "is-B")), "callB=is-B", "is-B"),
    ((TWO, ("callB", "is-B"), "wait", ("callA", "is-A")), "callB=is-B wait callA=is-A", "is-A wait is-B"),
    (
        (TWO, ("callB", "is-B"), ("callA", "is-A"), TWO, ("callB", "now-B"), ("callA", "now-A")),
        "callB=is-B callA=is-A callB=now-B callA=now-A",
        "is-A is-B now-A now-B",
    ),
    (
        (TWO, ("callB", "is-B"), [("callC", "C")], ("callC", "is-C"), ("callA", "is-A")),
        "callB=is-B callC=is-C callA=is-A",
        "is-B is-A is-C",
    ),
]
WITH_IDS, WITHOUT_IDS = (
    "{% for m in messages %}{% if m.tool_calls %}<{{ m.tool_calls | tojson }}>{% else %}"
    + shown
    + "{{ m.content }} {% endif %}{% endfor %}"
    for shown in ("{% if m.role == 'tool' %}{{ m.tool_call_id }}={% endif %}", "")
)


@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(("steps", "with_ids", "without_ids"), ORDERS)
def test_a_result_belongs_to_the_call_of_its_id_in_whatever_order_results_come(dialect, steps, with_ids, without_ids):
    messages = dialect.ask(history_of(dialect, "go", *steps, *(["on"] if dialect is MESSAGES else []))).messages
    messages = messages[:-1] if dialect is MESSAGES else messages
    for template, expected in ((WITH_IDS, with_ids), (WITHOUT_IDS, without_ids)):
        shown = ChatTemplate(template, "t", {}, datetime.now()).render(messages)
        assert re.sub(r"<.*?>", "", shown).split() == ["go", *expected.split()]


@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ((TWO, ("callB", "is-B"), ("callB", "is-B")), '"callB"; allowed: the id of an earlier call that has no result'),
        ((TWO, ("callC", "is-C")), '"callC"; allowed: the id of an earlier call that has no result'),
        ((TWO, (None, "is-C")), "got nothing; allowed: a string"),
        (([*TWO, ("callA", "C")],), '"callA"; allowed: calls of one turn with different ids'),
    ],
)
def test_a_result_without_a_call_of_its_own_is_refused(dialect, steps, why):
    assert why in str(refused(dialect, history_of(dialect, "go", *steps, "on")))


def test_the_name_of_a_result_is_that_of_its_call():
    body = copy.deepcopy(LANGGRAPH)
    body["messages"][3]["name"] = "climate"
    assert str(refused(CHAT, body)) == 'messages[3].name: got "climate"; allowed: weather, the name of the call'


@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, MESSAGES])
def test_a_body_that_is_not_an_object_is_refused(dialect):
    assert refused(dialect, []).field == "body"


def test_a_refusal_says_what_was_received_and_what_is_allowed():
    body = {"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}
    allowed = "text, refusal, image_url; text alone if the model is text only"
    assert str(refused(CHAT, body)) == f'messages[0].content[0].type: got "video_url"; allowed: {allowed}'
    assert len(refused(CHAT, {"messages": "x" * 10_000}).message) < 200


def test_reading_leaves_the_body_as_it_was():
    for dialect, body in ((CHAT, LANGGRAPH), (RESPONSES, OPENAI_AGENTS), (MESSAGES, CLAUDE_CODE)):
        before = json.dumps(body)
        dialect.ask(body)
        assert json.dumps(body) == before
