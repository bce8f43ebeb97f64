# SPDX-License-Identifier: Apache-2.0
"""Tools in a chat: their JSON schema for the template, and the calls that the policy wrote, read back.

Calls are read in the Hermes form, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. A call that can't
be read is a message for the policy, never an exception.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from relax_core.api.environment import Tool
from relax_core.api.task import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THOUGHT_END = "</think>"
_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def tool_schema(tool: Tool) -> dict[str, Any]:
    """The function schema that chat templates expect."""
    parameters = dict(tool.parameters)
    if not (parameters.get("type") == "object" and "properties" in parameters):
        properties = {name: type_schema(kind) for name, kind in tool.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def type_schema(kind: Any) -> dict[str, Any]:
    """JSON schema of a parameter given as a type; a mapping is a schema already."""
    if isinstance(kind, Mapping):
        return dict(kind)
    if kind in _NAMES:
        return {"type": _NAMES[kind]}
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [type_schema(argument) for argument in arguments]}
    if origin in (list, tuple, set):
        return {"type": "array", "items": type_schema(arguments[0])} if arguments else {"type": "array"}
    if origin is dict:
        return {"type": "object"}
    raise TypeError(
        f"tool parameter type {kind!r} has no JSON schema; name str, int, float, bool, list, dict or a schema"
    )


def parse_calls(text: str) -> tuple[str, tuple[ToolCall, ...], str]:
    """(text without its calls, calls, error). Calls inside a thought are not calls."""
    thought, mark, said = text.rpartition(THOUGHT_END)
    head, *blocks = said.split(OPEN)
    calls: list[ToolCall] = []
    kept = [head]
    for block in blocks:
        body, closed, rest = block.partition(CLOSE)
        call = _call(body, len(calls)) if closed else f"{OPEN} was not closed with {CLOSE}"
        if isinstance(call, str):
            return text, (), call
        calls.append(call)
        kept.append(rest)
    return (thought + mark + "".join(kept).rstrip() if calls else text), tuple(calls), ""


def _call(body: str, number: int) -> ToolCall | str:
    """One call, or what is wrong with it. Ids have nine letters and digits, as strict templates demand."""
    try:
        call = json.loads(body)
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        return f"tool call is not JSON: {error}"
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return 'tool call must be {"name": ..., "arguments": {...}}'
    if not isinstance(arguments, dict):
        return f"arguments of tool call {call['name']} must be an object"
    return ToolCall(call["name"], arguments, f"call{number:05d}")
