# SPDX-License-Identifier: Apache-2.0
"""The dialect of OpenAI's chat completions, which most agents use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from relax_core.api.task import Message, Part, ToolCall
from relax_plugin_agents.dialects.reading import (
    read_arguments,
    read_choice,
    read_content,
    read_field,
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
)
from relax_plugin_agents.dialects.writing import COMMENT, arguments_text, openai_error, sent_event
from relax_plugin_agents.model_request import Dialect, ModelRequest, ModelTurn, Sent

ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatCompletions(Dialect):
    """OpenAI's `/v1/chat/completions`."""

    path: ClassVar[str] = "/v1/chat/completions"

    def ask(self, body: Mapping[str, Any]) -> ModelRequest:
        body = read_object(body, "body")
        messages: list[Message] = []
        open_calls: dict[str, str] = {}
        for path, entry in read_objects(body.get("messages"), "messages"):
            messages.append(_read_message(entry, path, open_calls))
            open_calls.update((call.id, call.name) for call in messages[-1].tool_calls)
        read_field(body, "stream_options.include_usage")
        tools = read_tools(body, kind="function", schema="parameters", inside="function")
        return read_request(body, messages, tools, "messages", ("max_completion_tokens", "max_tokens"), "stop")

    def reply(self, turn: ModelTurn) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": _content(turn), "refusal": None}
        if turn.tool_calls:
            message["tool_calls"] = [_call(call) for call in turn.tool_calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": turn.finish}
        return {**_head(turn, "chat.completion"), "choices": [choice], "usage": _usage(turn)}

    def events(self, turn: ModelTurn, body: Mapping[str, Any], sent: Sent) -> Iterator[str]:
        wants_usage = bool(read_field(body, "stream_options.include_usage"))
        head = _head(turn, "chat.completion.chunk") | ({"usage": None} if wants_usage else {})

        def chunk(delta: dict[str, Any], finish: str | None = None) -> str:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
            return sent_event({**head, "choices": [choice]})

        if not sent.events:
            yield chunk({"role": "assistant", "content": None if _content(turn) is None else ""})
        if more := turn.text[len(sent.text) :]:
            yield chunk({"content": more})
        if not turn.finish:
            return
        for index, call in enumerate(turn.tool_calls):
            yield chunk({"tool_calls": [{"index": index, **_call(call)}]})
        yield chunk({}, turn.finish)
        if wants_usage:
            yield sent_event({**head, "choices": [], "usage": _usage(turn)})
        yield "data: [DONE]\n\n"

    def failed(self, message: str, kind: str, field: str | None = None) -> dict[str, Any]:
        return openai_error(message, kind, field)

    def failed_event(self, message: str) -> str:
        return sent_event(self.failed(message, "api_error"))

    @property
    def heartbeat(self) -> str:
        return COMMENT


def _read_message(entry: Mapping[str, Any], path: str, open_calls: dict[str, str]) -> Message:
    role = read_choice(entry.get("role"), f"{path}.role", ROLES)
    content = entry.get("content")
    if role == "tool":
        said = read_content(content, f"{path}.content", _read_part)
        result = read_result(entry.get("tool_call_id"), f"{path}.tool_call_id", open_calls, said)
        return with_fields(result, entry, path, "tool_call_id")
    if role != "assistant":
        said = read_content(content, f"{path}.content", _read_part)
        return with_fields(Message("system" if role == "developer" else role, said), entry, path)
    if entry.get("function_call") is not None:
        raise refusal(f"{path}.function_call", entry["function_call"], "nothing; send calls in tool_calls")
    calls = entry.get("tool_calls")
    tool_calls = tuple(_read_call(*call) for call in read_objects([] if calls is None else calls, f"{path}.tool_calls"))
    read = ["tool_calls"]
    if content is None:
        content = "" if tool_calls else entry.get("refusal")
        read += [] if tool_calls else ["refusal"]
    said = read_content(content, f"{path}.content", _read_part)
    return with_fields(Message("assistant", said, tool_calls), entry, path, *read)


def _read_part(part: Mapping[str, Any], path: str) -> Part:
    kind = read_part_type(part, path, ("text", "refusal", "image_url"))
    if kind == "image_url":
        image = read_object(part.get("image_url"), f"{path}.image_url")
        return read_image(image.get("url"), f"{path}.image_url.url")
    return Part(read_string(part.get(kind), f"{path}.{kind}"))


def _read_call(path: str, call: Mapping[str, Any]) -> ToolCall:
    read_choice(call.get("type"), f"{path}.type", ("function",), default="function")
    function = read_object(call.get("function"), f"{path}.function")
    return ToolCall(
        name=read_name(function.get("name"), f"{path}.function.name"),
        arguments=read_arguments(function.get("arguments"), f"{path}.function.arguments"),
        id=read_name(call.get("id"), f"{path}.id"),
    )


def _head(turn: ModelTurn, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{turn.id}", "object": kind, "created": turn.created, "model": turn.model}


def _content(turn: ModelTurn) -> str | None:
    """Return the turn's text; None for a turn with only tool calls, as clients expect."""
    return turn.text if turn.text or not turn.tool_calls else None


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_text(call)}}


def _usage(turn: ModelTurn) -> dict[str, int]:
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "total_tokens": turn.prompt_tokens + turn.completion_tokens,
    }
