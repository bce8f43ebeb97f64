# SPDX-License-Identifier: Apache-2.0
"""The dialect of Anthropic's messages, which Claude Code and Anthropic's SDK use.

In this dialect, tool results are blocks of a user message. Each block becomes a message before the user's text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from relax_core.api.task import Message, Part, ToolCall
from relax_plugin_agents.dialects.reading import (
    join_parts,
    read_choice,
    read_content,
    read_image,
    read_name,
    read_object,
    read_objects,
    read_part_type,
    read_request,
    read_result,
    read_string,
    read_tools,
    refusal,
    with_fields,
    with_thought,
)
from relax_plugin_agents.dialects.writing import arguments_text, sent_event
from relax_plugin_agents.model_request import Dialect, ModelRequest, ModelTurn, Sent

ROLES = ("user", "assistant", "system")
BILLING = "x-anthropic-billing-header:"
"""Prefix of a line that Claude Code puts before its system prompt. The line differs in every request and is removed,
since otherwise no request would continue from the tokens of an earlier request."""
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicMessages(Dialect):
    """Anthropic's `/v1/messages`."""

    path: ClassVar[str] = "/v1/messages"

    def ask(self, body: Mapping[str, Any]) -> ModelRequest:
        body = read_object(body, "body")
        messages: list[Message] = []
        open_calls: dict[str, str] = {}
        for path, entry in read_objects(body.get("messages"), "messages"):
            role = read_choice(entry.get("role"), f"{path}.role", ROLES)
            if role == "user":
                messages.extend(_read_user(entry.get("content"), f"{path}.content", open_calls))
            elif role == "system":
                messages.append(Message("system", read_content(entry.get("content"), f"{path}.content", _read_part)))
            else:
                messages.append(_read_assistant(entry.get("content"), f"{path}.content"))
                open_calls.update((call.id, call.name) for call in messages[-1].tool_calls)
            messages[-1] = with_fields(messages[-1], entry, path)
        if messages and messages[-1].role == "assistant":
            allowed = "a user message at the end, because the policy begins its turns itself"
            raise refusal(f"messages[{len(body['messages']) - 1}].role", "assistant", allowed)
        system = _read_system(body.get("system"))
        if system and messages:
            messages.insert(0, Message("system", system))
        tools = read_tools(body, kind="custom", schema="input_schema", default="custom")
        return read_request(body, messages, tools, "messages", ("max_tokens",), "stop_sequences")

    def reply(self, turn: ModelTurn) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        stop_text = turn.stop_text if turn.finish == "stop" and turn.stop_text else None
        if turn.text or not turn.tool_calls:
            content.append({"type": "text", "text": turn.text})
        for call in turn.tool_calls:
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)})
        return {
            "id": f"msg_{turn.id}",
            "type": "message",
            "role": "assistant",
            "model": turn.model,
            "content": content,
            "stop_reason": "stop_sequence" if stop_text else STOP_REASONS.get(turn.finish),
            "stop_sequence": stop_text,
            "usage": {
                "input_tokens": turn.prompt_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": turn.completion_tokens,
            },
        }

    def events(self, turn: ModelTurn, body: Mapping[str, Any], sent: Sent) -> Iterator[str]:
        whole = self.reply(turn)
        if not sent.events:
            unfinished = {"content": [], "stop_reason": None, "stop_sequence": None}
            started = {**whole, **unfinished, "usage": {**whole["usage"], "output_tokens": 0}}
            yield _event("message_start", message=started)
        calls = iter(turn.tool_calls)
        for index, block in enumerate(whole["content"]):
            if block["type"] == "text":
                begun_block, delta = {**block, "text": ""}, {"type": "text_delta", "text": turn.text[len(sent.text) :]}
            else:
                begun_block = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": arguments_text(next(calls))}
            if block["type"] != "text" or not sent.text:
                yield _event("content_block_start", index=index, content_block=begun_block)
            yield _event("content_block_delta", index=index, delta=delta)
            if turn.finish:
                yield _event("content_block_stop", index=index)
        if not turn.finish:
            return
        ended = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=ended, usage=whole["usage"])
        yield _event("message_stop")

    def failed(self, message: str, kind: str, field: str | None = None) -> dict[str, Any]:
        return {"type": "error", "error": {"type": kind, "message": message}}

    def failed_event(self, message: str) -> str:
        return sent_event(self.failed(message, "api_error"), "error")

    @property
    def heartbeat(self) -> str:
        return _event("ping")


def _event(kind: str, **fields: Any) -> str:
    return sent_event({"type": kind, **fields}, kind)


def _read_system(value: Any) -> str:
    if isinstance(value, str):
        return _without_billing(value)
    texts = []
    for path, block in read_objects([] if value is None else value, "system"):
        read_choice(block.get("type"), f"{path}.type", ("text",))
        texts.append(read_string(block.get("text"), f"{path}.text"))
    return "\n".join(text for text in map(_without_billing, texts) if text)


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING) else text


def _read_user(value: Any, path: str, open_calls: dict[str, str]) -> Iterator[Message]:
    """Yield the tool results in a user message, and then the rest of the message."""
    if not isinstance(value, list):
        yield Message("user", read_content(value, path, _read_part))
        return
    said: list[Part] = []
    for place, block in read_objects(value, path):
        if block.get("type") != "tool_result":
            read_part_type(block, place, ("text", "image", "tool_result"))
            said.append(_read_part(block, place))
            continue
        content = block.get("content")
        result = read_content("" if content is None else content, f"{place}.content", _read_part)
        yield read_result(block.get("tool_use_id"), f"{place}.tool_use_id", open_calls, result)
    if said or not value:
        yield Message("user", join_parts(said))


def _read_assistant(value: Any, path: str) -> Message:
    if not isinstance(value, list):
        return Message("assistant", read_content(value, path, _read_part))
    said: list[Part] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    for place, block in read_objects(value, path):
        kinds = ("text", "tool_use", "thinking", "redacted_thinking")
        kind = read_choice(block.get("type"), f"{place}.type", kinds)
        if kind == "text":
            said.append(_read_part(block, place))
        elif kind == "tool_use":
            name = read_name(block.get("name"), f"{place}.name")
            arguments = read_object(block.get("input"), f"{place}.input")
            calls.append(ToolCall(name, arguments, read_name(block.get("id"), f"{place}.id")))
        elif kind == "thinking":
            thoughts.append(read_string(block.get("thinking"), f"{place}.thinking"))
    return with_thought(Message("assistant", join_parts(said), tuple(calls)), list(filter(None, thoughts)))


def _read_part(block: Mapping[str, Any], path: str) -> Part:
    if read_part_type(block, path, ("text", "image")) == "text":
        return Part(read_string(block.get("text"), f"{path}.text"))
    source = read_object(block.get("source"), f"{path}.source")
    if read_choice(source.get("type"), f"{path}.source.type", ("base64", "url")) == "url":
        return read_image(source.get("url"), f"{path}.source.url")
    media_type = read_name(source.get("media_type"), f"{path}.source.media_type")
    data = read_name(source.get("data"), f"{path}.source.data")
    return read_image(f"data:{media_type};base64,{data}", f"{path}.source")
