# SPDX-License-Identifier: Apache-2.0
"""Strict reading of a request's body, as all dialects need it.

Everything that is malformed, or asks for what would change the distribution that is trained, raises `Refused` with the
field's path, such as `messages[2].content[0].type`, what was received and what is allowed. Fields that can't change what is
sampled are not looked at. A setting that is served only at some values is a line in `SERVED`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from relax_core.api.environment import Tool
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
"""Settings for which the run has its own."""

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
"""The values at which a setting is served; leaving it out, or null, always is."""

LONGEST_SHOWN = 80
"""Most characters of a value that a refusal repeats."""


def refusal(path: str, value: Any, allowed: str) -> Refused:
    """The refusal of a value, which says what was received and what is allowed."""
    shown = "nothing" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    if len(shown) > LONGEST_SHOWN:
        shown = shown[:LONGEST_SHOWN] + "..."
    return Refused(path, f"got {shown}; allowed: {allowed}")


def read_object(value: Any, path: str) -> Mapping[str, Any]:
    """An object of JSON."""
    if not isinstance(value, Mapping):
        raise refusal(path, value, "an object")
    return value


def read_objects(value: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The objects of a list, each with its path."""
    if not isinstance(value, list):
        raise refusal(path, value, "a list of objects")
    for index, entry in enumerate(value):
        yield f"{path}[{index}]", read_object(entry, f"{path}[{index}]")


def read_string(value: Any, path: str, default: str | None = None) -> str:
    """A string, which may be empty, or the default where there is none."""
    string = default if value is None else value
    if not isinstance(string, str):
        raise refusal(path, value, "a string")
    return string


def read_name(value: Any, path: str) -> str:
    """A name or an id: a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise refusal(path, value, "a string that is not empty")
    return value


def read_choice(value: Any, path: str, allowed: Sequence[str], default: str | None = None) -> str:
    """One of the allowed strings, or the default where there is none."""
    chosen = default if value is None else value
    if not isinstance(chosen, str) or chosen not in allowed:
        raise refusal(path, value, ", ".join(allowed))
    return chosen


def read_field(body: Mapping[str, Any], path: str) -> Any:
    """The value at a path of names with dots between, None where it is left out."""
    value: Any = body
    names = path.split(".")
    for depth, name in enumerate(names):
        if value is None:
            return None
        value = read_object(value, ".".join(names[:depth]) or "body").get(name)
    return value


def read_content(value: Any, path: str, read_part: Callable[[Mapping[str, Any], str], Part]) -> str | tuple[Part, ...]:
    """A message's content, which is a string or a list of parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refusal(path, value, "a string or a list of parts")
    return join_parts([read_part(part, place) for place, part in read_objects(value, path)])


def join_parts(parts: Sequence[Part]) -> str | tuple[Part, ...]:
    """Parts as a message's content: one string where there are no media."""
    return tuple(parts) if any(part.media for part in parts) else "".join(part.text for part in parts)


def read_image(value: Any, path: str) -> Part:
    """An image by its URL."""
    source = read_string(value, path)
    if not source.lower().startswith(("data:", "http://", "https://")):
        raise refusal(path, value, "a URL that begins with data:, http:// or https://")
    return Part(media=Media("image", source))


def read_arguments(value: Any, path: str) -> dict[str, Any]:
    """A call's arguments from their JSON text; a blank text is a call without arguments."""
    text = read_string(value, path)
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise refusal(path, value, "a JSON object as text")
    return arguments


def read_result(call_id: Any, path: str, tools_of_calls: Mapping[str, str], content: str | tuple[Part, ...]) -> Message:
    """A tool's result, which names the call before it that it answers."""
    if read_string(call_id, path) not in tools_of_calls:
        raise refusal(path, call_id, "the id of a call before it")
    return Message("tool", content, name=tools_of_calls[call_id])


def read_tools(
    body: Mapping[str, Any], kind: str, schema: str, inside: str = "", default: str | None = None
) -> tuple[Tool, ...]:
    """The functions that the policy may call.

    `kind` is the only type that is served and `default` the type of a tool that names none. The tool's JSON schema is
    called `schema`, and lies with its name in the object called `inside` where the dialect has one.
    """
    tools: dict[str, Tool] = {}
    for path, entry in read_objects([] if body.get("tools") is None else body["tools"], "tools"):
        read_choice(entry.get("type"), f"{path}.type", (kind,), default)
        if inside:
            path = f"{path}.{inside}"
            entry = read_object(entry.get(inside), path)
        name = read_name(entry.get("name"), f"{path}.name")
        if name in tools:
            raise refusal(f"{path}.name", name, "a name that no tool before it has")
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
    """The request for an answer to these messages: reads the settings that all dialects have.

    `history` is the field that the messages came in, `limits` are the fields of the most tokens of the answer, the one that
    counts first, and `stop` the field of the stop strings.
    """
    if not messages:
        raise refusal(history, body.get(history), "at least one message")
    for path, served in SERVED.items():
        value = read_field(body, path)
        if value is not None and value not in served:
            values = " or ".join([json.dumps(one) for one in served] + ["leaving it out"])
            raise refusal(path, value, f"{values}, because the policy is sampled as the run says")
    _check_tool_choice(body.get("tool_choice"), tools)
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
    """A tool's JSON schema with its type and properties spelled out, without which `Tool` would take it for types by name."""
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
        allowed = "auto, or none where there are no tools, because the policy chooses its calls itself"
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
