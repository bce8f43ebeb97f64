# SPDX-License-Identifier: Apache-2.0
"""Strict parsing of request bodies, shared by all dialects.

A malformed field, or a setting that would change the trained distribution, raises `Refused`. The error contains the
field's path, such as `messages[2].content[0].type`, the received value and the allowed values. Fields that cannot
affect sampling are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from relax_core.api.environment import Tool
from relax_core.api.http_requests import parse_json
from relax_core.api.task import Media, Message, Part
from relax_plugin_agents.model_request import ModelRequest, Refused

OVERRIDDEN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "reasoning_effort",
    "reasoning",
    "thinking",
    "verbosity",
    "text.verbosity",
    "output_config.effort",
    "chat_template_kwargs",
)
"""Settings of a request that are ignored, because the run's configuration sets them."""

SERVED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "bad_words": ([],),
    "stop_token_ids": ([],),
    "response_format": ({"type": "text"},),
    "text.format": ({"type": "text"},),
    "output_format": (),
    "output_config.format": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "web_search_options": (),
    "mcp_servers": ([],),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
}
"""Settings that are served only at the listed values. Null or a missing setting is always allowed."""

UNSHOWN = frozenset((
    "annotations", "cache_control", "extra", "id", "model", "provider_specific_fields", "status", "stop_reason",
    "stop_sequence", "thinking_blocks", "type", "usage",
))  # fmt: skip
"""Fields of a message that are records of a client or of an answer, and are ignored."""

LONGEST_SHOWN = 80
"""Maximum number of characters of a value that an error quotes."""


def refusal(path: str, value: Any, allowed: str) -> Refused:
    """Return the error for a field at `path`; its text contains the received value and the allowed values."""
    shown = "nothing" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    if len(shown) > LONGEST_SHOWN:
        shown = shown[:LONGEST_SHOWN] + "..."
    return Refused(path, f"got {shown}; allowed: {allowed}")


def read_object(value: Any, path: str) -> Mapping[str, Any]:
    """Return `value` if it is a JSON object, else raise Refused."""
    if not isinstance(value, Mapping):
        raise refusal(path, value, "an object")
    return value


def read_objects(value: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield path and object of each entry of a list. Raises Refused if `value` is not a list of objects."""
    if not isinstance(value, list):
        raise refusal(path, value, "a list of objects")
    for index, entry in enumerate(value):
        yield f"{path}[{index}]", read_object(entry, f"{path}[{index}]")


def read_string(value: Any, path: str, default: str | None = None) -> str:
    """Return `value` if it is a string, empty or not; `default` if the value is missing. Raises Refused."""
    string = default if value is None else value
    if not isinstance(string, str):
        raise refusal(path, value, "a string")
    return string


def read_name(value: Any, path: str) -> str:
    """Return a name or an id. Raises Refused if it is not a non-empty string."""
    if not isinstance(value, str) or not value:
        raise refusal(path, value, "a string that is not empty")
    return value


def read_choice(value: Any, path: str, allowed: Sequence[str], default: str | None = None) -> str:
    """Return `value` if it is an allowed string; `default` if the value is missing. Raises Refused."""
    chosen = default if value is None else value
    if not isinstance(chosen, str) or chosen not in allowed:
        raise refusal(path, value, ", ".join(allowed))
    return chosen


def read_part_type(part: Mapping[str, Any], path: str, types: Sequence[str]) -> str:
    """Return the type of a part of a message. Raises Refused if no model takes such parts."""
    value = part.get("type")
    if not isinstance(value, str) or value not in types:
        raise refusal(f"{path}.type", value, f"{', '.join(types)}; text alone if the model is text only")
    return value


def read_field(body: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path of names separated by dots; None if the value is missing."""
    value: Any = body
    names = path.split(".")
    for depth, name in enumerate(names):
        if value is None:
            return None
        value = read_object(value, ".".join(names[:depth]) or "body").get(name)
    return value


def read_content(value: Any, path: str, read_part: Callable[[Mapping[str, Any], str], Part]) -> str | tuple[Part, ...]:
    """Return the content of a message, given as a string or a list of parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refusal(path, value, "a string or a list of parts")
    return join_parts([read_part(part, place) for place, part in read_objects(value, path)])


def join_parts(parts: Sequence[Part]) -> str | tuple[Part, ...]:
    """Return parts as the content of a message: one string if no part has media, else a tuple of parts."""
    return tuple(parts) if any(part.media for part in parts) else "".join(part.text for part in parts)


def read_image(value: Any, path: str) -> Part:
    """Return the image at a URL as a part of a message. Raises Refused for a URL that is not data:, http or https."""
    source = read_string(value, path)
    if not source.lower().startswith(("data:", "http://", "https://")):
        raise refusal(path, value, "a URL that begins with data:, http:// or https://")
    return Part(media=Media("image", source))


def read_arguments(value: Any, path: str) -> dict[str, Any]:
    """Parse the arguments of a tool call from JSON text; a blank text means no arguments."""
    text = read_string(value, path)
    try:
        arguments = parse_json(text) if text.strip() else {}
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise refusal(path, value, "a JSON object as text")
    if "\\u" in text:
        check_characters(arguments, path)
    return arguments


def check_characters(data: Any, path: str) -> None:
    """Raise Refused for JSON data with half of a surrogate pair, which is not a character and can't be sent."""
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise refusal(
            path, f"\\u{ord(error.object[error.start]):04x}", "whole characters, not half of a pair"
        ) from error


def with_fields(message: Message, entry: Mapping[str, Any], path: str, *read: str) -> Message:
    """Return a message with its name and its further fields, which the chat template gets, or refuses by name.

    `read`: fields of `entry` that the message has already. Empty fields count as missing. Raises Refused.
    """
    extra = {
        name: value for name, value in entry.items()
        if name not in ("role", "content", "name", *read) and name not in UNSHOWN and value not in (None, "", [], {})
    }  # fmt: skip
    name = read_string(entry.get("name"), f"{path}.name", default="")
    if message.role == "tool" and name not in ("", message.name):
        raise refusal(f"{path}.name", name, f"{message.name}, the name of the call")
    return replace(message, name=name or message.name, extra={**message.extra, **extra})


def with_thought(message: Message, texts: Sequence[str]) -> Message:
    """Return an assistant's message with the texts of its thoughts, if any, in the field `reasoning_content`."""
    return replace(message, extra={**message.extra, "reasoning_content": "\n".join(texts)}) if texts else message


def read_result(call_id: Any, path: str, open_calls: dict[str, str], content: str | tuple[Part, ...]) -> Message:
    """Return the message with a tool's result, and remove its call from `open_calls`: tool by id of the call.

    Raises Refused if `call_id` is not the id of an earlier call without a result.
    """
    if read_string(call_id, path) not in open_calls:
        raise refusal(path, call_id, "the id of an earlier call that has no result yet")
    return Message("tool", content, name=open_calls.pop(call_id), extra={"tool_call_id": call_id})


def read_tools(
    body: Mapping[str, Any], kind: str, schema: str, inside: str = "", default: str | None = None
) -> tuple[Tool, ...]:
    """Return the tools that the policy may call, from the body's field `tools`.

    `kind` is the only allowed `type` of a tool, and `default` the type if the field is missing. `schema` is the name of
    the field with the JSON schema. If `inside` is set, name, description and schema are in the tool's field `inside`.
    """
    tools: dict[str, Tool] = {}
    for path, entry in read_objects([] if body.get("tools") is None else body["tools"], "tools"):
        read_choice(entry.get("type"), f"{path}.type", (kind,), default)
        if inside:
            path = f"{path}.{inside}"
            entry = read_object(entry.get(inside), path)
        name = read_name(entry.get("name"), f"{path}.name")
        if name in tools:
            raise refusal(f"{path}.name", name, "a name that no earlier tool has")
        description = read_string(entry.get("description"), f"{path}.description", default="")
        tools[name] = Tool(name, _parameters(entry.get(schema), f"{path}.{schema}"), description)
    return tuple(tools.values())


def read_request(
    body: Mapping[str, Any],
    messages: Sequence[Message],
    tools: tuple[Tool, ...],
    history: str,
    limits: Sequence[str],
    stop: str,
) -> ModelRequest:
    """Return the request for an answer to these messages, with the settings that all dialects share.

    `history` is the name of the field with the messages, `stop` of the field with stop strings. `limits` are names of
    fields with the maximum number of answer tokens; the first field that is set counts.
    """
    if not messages:
        raise refusal(history, body.get(history), "at least one message")
    for path, served in SERVED.items():
        value = read_field(body, path)
        if value is not None and value not in served:
            values = " or ".join([json.dumps(one) for one in served] + ["leaving it out"])
            raise refusal(path, value, f"{values}, because the run's configuration sets how the policy is sampled")
    _check_tool_choice(body.get("tool_choice"), tools)
    for calls in (message.tool_calls for message in messages):
        if repeated := [call.id for number, call in enumerate(calls) if call.id in (one.id for one in calls[:number])]:
            raise refusal(history, repeated[0], "calls of one turn with different ids")
    numbers = [_positive(body[field], field) for field in limits if body.get(field) is not None]
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise refusal("stream", stream, "true or false")
    return ModelRequest(
        messages=tuple(messages),
        tools=tools,
        max_new_tokens=numbers[0] if numbers else None,
        stop=_stop_strings(body.get(stop), stop),
        stream=bool(stream),
        overridden=tuple(path for path in OVERRIDDEN if read_field(body, path) is not None),
    )


def _parameters(value: Any, path: str) -> dict[str, Any]:
    """Return a tool's JSON schema, with `type` and `properties` added: `Tool` misreads a schema without these keys."""
    schema = dict(read_object({} if value is None else value, path))
    read_choice(schema.setdefault("type", "object"), f"{path}.type", ("object",))
    if schema.get("properties") is None:
        schema["properties"] = {}
    read_object(schema["properties"], f"{path}.properties")
    return schema


def _check_tool_choice(value: Any, tools: Sequence[Tool]) -> None:
    if value is None:
        return
    choice = value.get("type") if isinstance(value, Mapping) else value
    if choice != "auto" and (choice != "none" or tools):
        allowed = "auto, or none without tools, because the policy chooses its calls itself"
        raise refusal("tool_choice", value, allowed)


def _positive(value: Any, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise refusal(path, value, "a whole number from 1")
    return value


def _stop_strings(value: Any, path: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (read_name(value, path),)
    if not isinstance(value, list):
        raise refusal(path, value, "a string or a list of strings")
    return tuple(read_name(one, f"{path}[{index}]") for index, one in enumerate(value))
