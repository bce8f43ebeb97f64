# SPDX-License-Identifier: Apache-2.0
"""The dialect of OpenAI's responses without server state: every request contains the whole history as items.

In this dialect, a turn of the policy is several items: a message, and an item for each tool call. All items of a turn
become one message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from relax_core.api.task import Message, Part, ToolCall
from relax_plugin_agents.dialects.reading import (
    read_arguments,
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
from relax_plugin_agents.dialects.writing import COMMENT, arguments_text, openai_error, sent_event
from relax_plugin_agents.model_request import Dialect, ModelRequest, ModelTurn, Sent

ITEMS = ("message", "function_call", "function_call_output", "reasoning")
ROLES = ("system", "developer", "user", "assistant")


class Responses(Dialect):
    """OpenAI's `/v1/responses`."""

    path: ClassVar[str] = "/v1/responses"

    def ask(self, body: Mapping[str, Any]) -> ModelRequest:
        body = read_object(body, "body")
        given = body.get("input")
        messages = [Message("user", given)] if isinstance(given, str) else _read_items(given)
        instructions = read_string(body.get("instructions"), "instructions", default="")
        if instructions and messages:
            messages.insert(0, Message("system", instructions))
        tools = read_tools(body, kind="function", schema="parameters")
        return read_request(body, messages, tools, "input", ("max_output_tokens",), "stop")

    def reply(self, turn: ModelTurn) -> dict[str, Any]:
        is_cut = turn.finish == "length"
        return {
            "id": f"resp_{turn.id}",
            "object": "response",
            "created_at": turn.created,
            "status": "incomplete" if is_cut else "completed",
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": None,
            "max_output_tokens": None,
            "metadata": {},
            "model": turn.model,
            "output": _items(turn),
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": None,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "truncation": "disabled",
            "usage": {
                "input_tokens": turn.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": turn.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": turn.prompt_tokens + turn.completion_tokens,
            },
        }

    def events(self, turn: ModelTurn, body: Mapping[str, Any], sent: Sent) -> Iterator[str]:
        for number, (kind, fields) in enumerate(self._steps(turn, sent), sent.events):
            yield sent_event({"type": kind, "sequence_number": number, **fields}, kind)

    def failed(self, message: str, kind: str, field: str | None = None) -> dict[str, Any]:
        return openai_error(message, kind, field)

    def failed_event(self, message: str) -> str:
        return sent_event({"type": "error", **self.failed(message, "api_error")}, "error")

    @property
    def heartbeat(self) -> str:
        return COMMENT

    def _steps(self, turn: ModelTurn, sent: Sent) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the type and the fields of each event that the client still needs, in order."""
        whole = self.reply(turn)
        if not sent.events:
            started = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
            yield "response.created", {"response": started}
            yield "response.in_progress", {"response": started}
        for index, item in enumerate(whole["output"]):
            grown, empty = ("content", []) if item["type"] == "message" else ("arguments", "")
            begun_item = {**item, "status": "in_progress", grown: empty}
            if item["type"] != "message" or not sent.text:
                yield "response.output_item.added", {"output_index": index, "item": begun_item}
            yield from (
                _message_steps(item, index, turn, sent) if item["type"] == "message" else _call_steps(item, index)
            )
            if turn.finish:
                yield "response.output_item.done", {"output_index": index, "item": item}
        if turn.finish:
            yield f"response.{whole['status']}", {"response": whole}


def _message_steps(
    item: Mapping[str, Any], index: int, turn: ModelTurn, sent: Sent
) -> Iterator[tuple[str, dict[str, Any]]]:
    part = item["content"][0]
    place = {"item_id": item["id"], "output_index": index, "content_index": 0}
    if not sent.text:
        yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
    if more := turn.text[len(sent.text) :]:
        yield "response.output_text.delta", {**place, "delta": more, "logprobs": []}
    if turn.finish:
        yield "response.output_text.done", {**place, "text": part["text"], "logprobs": []}
        yield "response.content_part.done", {**place, "part": part}


def _call_steps(item: Mapping[str, Any], index: int) -> Iterator[tuple[str, dict[str, Any]]]:
    place = {"item_id": item["id"], "output_index": index}
    yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
    yield "response.function_call_arguments.done", {**place, "name": item["name"], "arguments": item["arguments"]}


def _items(turn: ModelTurn) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if turn.text or not turn.tool_calls:
        message = {"id": f"msg_{turn.id}", "type": "message", "role": "assistant"}
        status = "incomplete" if turn.finish == "length" else "completed"
        part = {"type": "output_text", "text": turn.text, "annotations": [], "logprobs": []}
        items.append({**message, "status": status, "content": [part]})
    for call in turn.tool_calls:
        names = {"id": f"fc_{call.id}", "call_id": call.id, "name": call.name}
        items.append({"type": "function_call", **names, "arguments": arguments_text(call), "status": "completed"})
    return items


def _read_items(value: Any) -> list[Message]:
    """Return the messages in `input`; join an assistant's message and the calls that follow it into one message."""
    messages: list[Message] = []
    open_calls: dict[str, str] = {}
    turn_has_text = False
    thoughts: list[str] = []
    thought_at = ""
    for path, item in read_objects(value, "input"):
        kind = read_choice(item.get("type"), f"{path}.type", ITEMS, default="message")
        in_turn = bool(messages) and messages[-1].role == "assistant"
        if kind == "function_call":
            call = _read_call(item, path)
            open_calls[call.id] = call.name
            if not in_turn:
                messages.append(Message("assistant", ""))
                turn_has_text = False
            messages[-1] = replace(messages[-1], tool_calls=(*messages[-1].tool_calls, call))
        elif kind == "function_call_output":
            output = read_content(item.get("output"), f"{path}.output", _read_part)
            messages.append(read_result(item.get("call_id"), f"{path}.call_id", open_calls, output))
        elif kind == "reasoning":
            thoughts += _read_thoughts(item, path)
            thought_at = path
            continue
        elif kind == "message":
            role = read_choice(item.get("role"), f"{path}.role", ROLES)
            content = read_content(item.get("content"), f"{path}.content", _read_part)
            if role == "assistant" and in_turn and not turn_has_text:
                messages[-1] = replace(messages[-1], content=content)
            else:
                messages.append(Message("system" if role == "developer" else role, content))
            messages[-1] = with_fields(messages[-1], item, path)
            turn_has_text = True
        if thoughts:
            _check_thinks(messages[-1].role == "assistant", thought_at, thoughts)
            earlier = messages[-1].extra.get("reasoning_content")
            messages[-1] = with_thought(messages[-1], [*([earlier] if earlier else []), *thoughts])
            thoughts = []
    _check_thinks(not thoughts, thought_at, thoughts)
    return messages


def _read_thoughts(item: Mapping[str, Any], path: str) -> list[str]:
    """Return the texts of a reasoning item, or else of its summary; none of an encrypted item."""
    for field, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        texts = []
        for place, part in read_objects(item.get(field) or [], f"{path}.{field}"):
            read_choice(part.get("type"), f"{place}.type", (kind,))
            texts.append(read_string(part.get("text"), f"{place}.text"))
        if texts := [text for text in texts if text]:
            return texts
    return []


def _check_thinks(has_turn: bool, path: str, thoughts: Sequence[str]) -> None:
    """Raise Refused for a thought that no message or call of the assistant follows."""
    if not has_turn:
        raise refusal(path, thoughts[0], "a thought before a message or call of the assistant")


def _read_part(part: Mapping[str, Any], path: str) -> Part:
    kinds = ("input_text", "output_text", "text", "refusal", "input_image")
    kind = read_part_type(part, path, kinds)
    if kind == "input_image":
        return read_image(part.get("image_url"), f"{path}.image_url")
    field = "refusal" if kind == "refusal" else "text"
    return Part(read_string(part.get(field), f"{path}.{field}"))


def _read_call(item: Mapping[str, Any], path: str) -> ToolCall:
    return ToolCall(
        name=read_name(item.get("name"), f"{path}.name"),
        arguments=read_arguments(item.get("arguments"), f"{path}.arguments"),
        id=read_name(item.get("call_id"), f"{path}.call_id"),
    )
