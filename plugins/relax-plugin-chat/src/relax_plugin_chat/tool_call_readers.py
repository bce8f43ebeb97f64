# SPDX-License-Identifier: Apache-2.0
"""Readers of tool calls, one for each format in which families of models write them.

A reader takes a text, the start and the end of an opening mark (equal if calls began without a mark), and the
parameters of each tool. It returns the calls and the position of their end, or raises CallError with a message for the
policy. Each reader reads its text once, from left to right, because a policy may write long and adversarial text.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

Parameters = Mapping[str, Mapping[str, Any]]
"""JSON schemas of parameters by tool name."""
MAX_DEPTH = 64
"""Levels of nesting in a call's arguments; deeper calls are refused before they break the code that handles them."""


class CallError(ValueError):
    """A tool call that can't be read; its message is shown to the policy."""


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A tool call as the policy wrote it, unchecked."""

    name: Any
    arguments: Any
    id: str = ""


Reader = Callable[[str, int, int, Parameters], tuple[list[WrittenCall], int]]


def hermes(text: str, start: int, at: int, parameters: Parameters) -> tuple[list[WrittenCall], int]:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    if text.find("</tool_call>", at) < 0:
        raise CallError("<tool_call> was not closed with </tool_call>")
    call, at = read_json(text, at)
    return [object_call(call)], passed(text, at, "</tool_call>")


_PARAMETER_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")


def qwen3_coder(text: str, start: int, at: int, parameters: Parameters) -> tuple[list[WrittenCall], int]:
    """Read `<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`.

    Models may leave the outer marks out.
    """
    wrapped = text.startswith("<tool_call>", start)
    at = passed(text, at if wrapped else start, "<function=")
    name, at = until(text, at, ">")
    name, at = name.strip(), at + 1
    arguments: dict[str, Any] = {}
    while text.startswith("<parameter=", at := skip_space(text, at)):
        key, at = until(text, at + len("<parameter="), ">")
        end = _PARAMETER_END.search(text, at := at + 1)
        if end is None:
            raise CallError(f"parameter {key!r} of tool call {name} was not closed with </parameter>")
        put(arguments, key, text[at : end.start()].removeprefix("\n").removesuffix("\n"), name, parameters)
        at = end.end()
    at = passed(text, at, "</function>", "<parameter=")
    return [WrittenCall(name, arguments)], passed(text, at, "</tool_call>") if wrapped else at


_VALUE_END = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))")


def glm(text: str, start: int, at: int, parameters: Parameters) -> tuple[list[WrittenCall], int]:
    """Read `<tool_call>NAME<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`."""
    name, at = until(text, at, "<")
    name, arguments = name.strip(), dict[str, Any]()
    while text.startswith("<arg_key>", at):
        key, at = until(text, at + len("<arg_key>"), "</arg_key>")
        at = passed(text, at + len("</arg_key>"), "<arg_value>")
        end = _VALUE_END.search(text, at)
        if end is None:
            raise CallError(f"value of {key!r} of tool call {name} was not closed with </arg_value>")
        put(arguments, key, text[at : end.start()], name, parameters)
        at = skip_space(text, end.end())
    return [WrittenCall(name, arguments)], passed(text, at, "</tool_call>", "<arg_key>")


def llama(text: str, start: int, at: int, parameters: Parameters) -> tuple[list[WrittenCall], int]:
    """Read `{"name": ..., "parameters": {...}}` or `NAME.call(key=value)` after `<|python_tag|>`.

    Objects may also begin a turn without the mark. Several objects may be separated by `;`.
    """
    bare, at = start == at, skip_space(text, at)
    if not bare and not text.startswith("{", at):
        called, end = _python_calls(text, at, text.find("(", at))
        return [replace(call, name=call.name.removesuffix(".call")) for call in called], end
    calls: list[WrittenCall] = []
    while text.startswith("{", at):
        try:
            call, end = read_json(text, at)
        except CallError:
            if bare and not calls and not _begins_call(text, at, parameters):
                return [], start  # an ordinary answer that begins with a brace
            raise
        inner = call["function"] if isinstance(call, dict) and isinstance(call.get("function"), dict) else call
        if bare and not (isinstance(inner, dict) and "name" in inner and inner.keys() & {"parameters", "arguments"}):
            return calls, at
        calls.append(object_call(call))
        at = skip_space(text, end)
        if text.startswith(";", at):
            at = skip_space(text, at + 1)
    return calls, at


_NAMED = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"function"\s*:\s*\{\s*)?"name"\s*:\s*"([^"\\]*)')


def _begins_call(text: str, at: int, parameters: Parameters) -> bool:
    named = _NAMED.match(text, at)
    return named is not None and named[1] in parameters


_AFTER_NAME = re.compile(r"[\[{]")


def mistral(text: str, start: int, at: int, parameters: Parameters) -> tuple[list[WrittenCall], int]:
    """Read `[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}]` or `[TOOL_CALLS]NAME[CALL_ID]id[ARGS]{...}`."""
    at = skip_space(text, at)
    if text.startswith("[", at):
        return object_list(text, at)
    begins = _AFTER_NAME.search(text, at)
    if begins is None:
        raise CallError("the call was cut off: [TOOL_CALLS] must continue with a list of calls or NAME[ARGS]{...}")
    name, at, number = text[at : begins.start()].strip(), begins.start(), ""
    if text.startswith("[CALL_ID]", at):
        number, at = until(text, at + len("[CALL_ID]"), "[ARGS]")
    if not text.startswith("{", at):
        at = passed(text, at, "[ARGS]", "[CALL_ID]")
    arguments, at = read_json(text, at)
    return [WrittenCall(name, arguments, number.strip())], at


SECTION, SECTION_END, CALL, CALL_SEP, CALL_END = (
    f"<\N{FULLWIDTH VERTICAL LINE}tool▁{words}\N{FULLWIDTH VERTICAL LINE}>"
    for words in ("calls▁begin", "calls▁end", "call▁begin", "sep", "call▁end")
)


def deepseek(text: str, start: int, at: int, parameters: Parameters) -> tuple[list[WrittenCall], int]:
    """Read a section of calls of DeepSeek's models.

    A call is name, separator and arguments (V3.1), or `function`, separator, name and JSON in a fence (V3, R1).
    """
    calls = []
    while text.startswith(CALL, at := skip_space(text, at)):
        name, at = until(text, at + len(CALL), CALL_SEP)
        at = skip_space(text, at + len(CALL_SEP))
        fenced = name.strip() == "function" and not text.startswith("{", at)
        if fenced:
            name, at = until(text, at, "\n")
            at = passed(text, at, "```json")
        arguments, at = read_json(text, at)
        at = passed(text, passed(text, at, "```") if fenced else at, CALL_END)
        calls.append(WrittenCall(name.strip(), arguments))
    return calls, _section_end(text, at, calls, SECTION_END, CALL)


KIMI, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_ARGUMENTS, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def kimi(text: str, start: int, at: int, parameters: Parameters) -> tuple[list[WrittenCall], int]:
    """Read a section of calls of Kimi's models. Each call is an id, `functions.NAME:number`, and arguments."""
    calls = []
    while text.startswith(KIMI_CALL, at := skip_space(text, at)):
        number, at = until(text, at + len(KIMI_CALL), KIMI_ARGUMENTS)
        arguments, at = read_json(text, at + len(KIMI_ARGUMENTS))
        at = passed(text, at, KIMI_CALL_END)
        name, colon, place = (number := number.strip()).removeprefix("functions.").rpartition(":")
        calls.append(
            WrittenCall(name if colon and place.isdigit() else number.removeprefix("functions."), arguments, number)
        )
    return calls, _section_end(text, at, calls, KIMI_END, KIMI_CALL)


def _section_end(text: str, at: int, calls: list[WrittenCall], mark: str, other: str) -> int:
    """Return the end of a section of calls. Some templates leave out its closing mark at the end of a turn."""
    at = skip_space(text, at)
    return at if calls and at == len(text) else passed(text, at, mark, other)


def phi(text: str, start: int, at: int, parameters: Parameters) -> tuple[list[WrittenCall], int]:
    """Read `functools[{...}, ...]` or `<|tool_call|>[{...}, ...]<|/tool_call|>`."""
    if text.startswith("functools", start):
        return object_list(text, start + len("functools"))
    calls, at = object_list(text, at)
    return calls, passed(text, at, "<|/tool_call|>")


_PYTHONIC = re.compile(r"\[\s*([\w.]+)\s*\(")


def pythonic(text: str, start: int, at: int, parameters: Parameters) -> tuple[list[WrittenCall], int]:
    """Read `[NAME(key=value), ...]` at the beginning of a turn, or between `<|python_start|>` and `<|python_end|>`."""
    bare, at = start == at, skip_space(text, at)
    begins = _PYTHONIC.match(text, at)
    if begins is None:
        if bare:
            return [], start
        passed(text, at, "[")
        raise CallError("calls must be [NAME(key=value), ...], or they were cut off")
    try:
        calls, at = _python_calls(text, at, at)
    except CallError:
        if bare and begins[1] not in parameters:
            return [], start  # an ordinary answer that begins with a bracket
        raise
    return calls, at if bare else passed(text, at, "<|python_end|>")


_PYTHON = re.compile(
    r"""
    "[^"\\]*(?:\\.[^"\\]*)*" | '[^'\\]*(?:\\.[^'\\]*)*'  # a string
    | ["']  # the quote of an unfinished string
    | [\[({\])}]
    """,
    re.DOTALL | re.VERBOSE,
)


def _python_calls(text: str, start: int, opened: int) -> tuple[list[WrittenCall], int]:
    """Parse a Python call or a list of calls without running it; `opened` is the position of its first bracket."""
    if opened < 0:
        raise CallError("the call is not written as NAME(key=value), or was cut off")
    depth, end = 0, -1
    for piece in _PYTHON.finditer(text, opened):
        if piece[0] in "\"'":
            break
        depth += (piece[0] in "[({") - (piece[0] in "])}")
        if depth > MAX_DEPTH:
            raise CallError(f"arguments are nested more than {MAX_DEPTH} deep")
        if depth == 0:
            end = piece.end()
            break
    if end < 0:
        raise CallError("a call was not closed: it was cut off, or a bracket or quotation mark is missing")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes in the policy's strings
            tree = _JsonNames().visit(ast.parse(text[start:end], mode="eval")).body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_python_call(call) for call in calls], end
    except CallError:
        raise
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise CallError(f"calls must be NAME(key=value) with values of plain data: {error}") from error


def _python_call(call: ast.expr) -> WrittenCall:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name | ast.Attribute):
        raise CallError("a call must be NAME(key=value)")
    name, arguments = ast.unparse(call.func), dict[str, Any]()
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise CallError(f"an argument of tool call {name} has no name, or the name of another")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    if call.args:
        raise CallError(f"an argument of tool call {name} has no name; write key=value")
    return WrittenCall(name, json.loads(json.dumps(arguments)))  # turns tuples into lists


_JSON_WORDS = {"true": True, "false": False, "null": None}


class _JsonNames(ast.NodeTransformer):
    """Replaces the names `true`, `false` and `null` of a parsed Python call, because models mix Python and JSON."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node


# -- pieces of texts -------------------------------------------------------------------------------------------------


_SPACE = re.compile(r"\s*")


def skip_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it always matches


def until(text: str, at: int, mark: str) -> tuple[str, int]:
    """Return the text up to a mark, and the position of the mark. Raises CallError without the mark."""
    end = text.find(mark, at)
    if end < 0:
        raise CallError(f"the call was cut off: {mark!r} is missing")
    return text[at:end], end


def passed(text: str, at: int, mark: str, *others: str) -> int:
    """Return the end of a mark that must follow at `at`, after optional white space. Raises CallError if it does not.

    `others`: further marks that the error message names as allowed here.
    """
    at = skip_space(text, at)
    if text.startswith(mark, at):
        return at + len(mark)
    if any(one.startswith(text[at:]) for one in (mark, *others)):
        raise CallError(f"the call was cut off: it was not closed with {mark}")
    raise CallError(f"the call must continue with {' or '.join((mark, *others))}, got {text[at : at + 20]!r}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise CallError(f"tool call has the key {key!r} twice")
        found[key] = value
    return found


def _refuse(word: str) -> NoReturn:
    raise CallError(f"tool call is not JSON: {word} is not a number in JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse)

_JSON_PIECES = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)


def read_json(text: str, at: int) -> tuple[Any, int]:
    """Read the JSON value at `at`, after optional white space; return it and the position of its end. Raises CallError.

    Nesting is counted before the value is decoded. Python's recursion limit is a setting of the whole process; if a
    library raised it, a deep value would overflow the stack and crash the process.
    """
    at = skip_space(text, at)
    depth = 0
    for piece in _JSON_PIECES.finditer(text, at):
        depth += (piece[0] in "[{") - (piece[0] in "]}")
        if depth > 2 * MAX_DEPTH:  # includes the levels around the arguments
            raise CallError(f"tool call is nested more than {MAX_DEPTH} deep")
        if depth <= 0:
            break
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        rest = text[error.pos :].strip()
        if error.msg.startswith("Unterminated") or any(word.startswith(rest) for word in ("true", "false", "null")):
            raise CallError("tool call was cut off: its JSON does not end") from error
        raise CallError(f"tool call is not JSON: {error.msg} at character {error.pos - at}") from error
    except CallError:
        raise
    except ValueError as error:
        raise CallError(f"tool call is not JSON: {error}") from error


def read_all_json(text: str) -> Any:
    """Read a text that is one JSON value. Raises CallError."""
    value, end = read_json(text, 0)
    if text[end:].strip():
        raise CallError(f"tool call is not JSON: {text[end : end + 20]!r} follows the value")
    return value


def object_call(call: Any) -> WrittenCall:
    """Return the call that a JSON object describes. Raises CallError.

    Some models write `parameters` instead of `arguments`, or put name and arguments below `function`.
    """
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = {"id": call.get("id")} | call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise CallError('tool call must be {"name": ..., "arguments": {...}}')
    number = call.get("id")
    arguments = call["arguments"] if "arguments" in call else call.get("parameters", {})
    return WrittenCall(call["name"], arguments, number if isinstance(number, str) else "")


def object_list(text: str, at: int) -> tuple[list[WrittenCall], int]:
    """Read a list of call objects; return the calls and the position of the list's end. Raises CallError."""
    calls, at = read_json(text, at)
    if not isinstance(calls, list):
        raise CallError("tool calls must be a list, [{...}, ...]")
    return [object_call(call) for call in calls], at


# -- values that are written as text ---------------------------------------------------------------------------------

_KINDS: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null",
}  # fmt: skip
_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Python literal -> JSON literal; chat templates print values in Python's spelling."""


def put(arguments: dict[str, Any], key: str, written: str, name: str, parameters: Parameters) -> None:
    """Add an argument that the call `name` gives as text. Raises CallError.

    The text is kept if the tool's schema allows a string or names no type; else it is decoded as JSON.
    """
    if key in arguments:
        raise CallError(f"tool call {name} has the argument {key!r} twice")
    whole = parameters.get(name, {})
    properties = whole.get("properties")
    kinds = kinds_of(properties.get(key) if isinstance(properties, Mapping) else None, whole)
    arguments[key] = written
    if not kinds or "string" in kinds:
        return
    wanted = f"argument {key!r} of tool call {name} must be {' or '.join(sorted(kinds))} in JSON"
    try:
        value = read_all_json(_WORDS.get(written.strip(), written))
    except CallError as error:
        raise CallError(f"{wanted}: {error}") from error
    kind = _KINDS[type(value)]
    if kind not in kinds and not (kind == "integer" and "number" in kinds):
        raise CallError(f"{wanted}, got {written[:40]!r}")
    arguments[key] = value


def kinds_of(schema: Any, whole: Mapping[str, Any], depth: int = 8) -> frozenset[str]:
    """Return the JSON types that a schema names as allowed; empty if it names none.

    `whole`: the schema in which references (`$ref`) are looked up.
    """
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    if isinstance(reference := schema.get("$ref"), str):
        found: Any = whole
        for step in reference.removeprefix("#").strip("/").split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        return kinds_of(found, whole, depth - 1)
    kinds = schema.get("type")
    if kinds is not None:
        return frozenset(one for one in ([kinds] if isinstance(kinds, str) else _listed(kinds)) if isinstance(one, str))
    if values := [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]:
        return frozenset(_KINDS.get(type(value), "string") for value in values)
    options = [
        kinds_of(one, whole, depth - 1) for one in (*_listed(schema.get("anyOf")), *_listed(schema.get("oneOf")))
    ]
    return frozenset().union(*options) if all(options) else frozenset()


def _listed(value: Any) -> Sequence[Any]:
    """Return a value of a schema if it is a list, else an empty tuple: clients send schemas that nothing checked."""
    return value if isinstance(value, list | tuple) else ()
