# SPDX-License-Identifier: Apache-2.0
"""A chat template: messages to text, as `transformers` renders them, and the text that follows a policy's turn.

It knows no tokens. Below it stand the tools of a chat (their JSON schema for the template, and the calls that the policy
wrote, read back) and the files of a model folder that say how its text is made, read without transformers or torch.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from relax_core.api.environment import Tool
from relax_core.api.errors import ConfigError
from relax_core.api.task import Message, ToolCall
from relax_core.config.model_folder import placeholders

FIELD = "model.chat_template"
MARK = "RELAXTURN"
MAX_IDS = 1 << 31
"""Beyond the ids of any vocabulary."""
# What template code raises by itself: jinja's errors, and Python's own for wrong types inside an expression.
RENDER_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError,
)  # fmt: skip
MAX_BITS = 1 << 12
MAX_REPEATED = 1 << 20
"""Sizes of numbers and of repeated text that a template may make: it comes with a model, and is often a stranger's."""


class ChatTemplate:
    """One compiled template with the variables it sees.

    Text that follows a turn is found by rendering the conversation with a mark in the turn's place: text before the mark is
    never used, so a template may strip or rewrite earlier turns as it likes.
    """

    def __init__(self, text: str, name: str, variables: Mapping[str, Any], now: datetime) -> None:
        self.name = name
        self._variables = dict(variables)
        environment = _BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": now.strftime}
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(FIELD, f"{name} line {error.lineno}: {error.message}", "correct the template") from error

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), speak: bool = True) -> str:
        """Render the conversation; `speak` ends it where the policy's turn begins."""
        try:
            return self._template.render(
                **self._variables,
                messages=[message_fields(message) for message in messages],
                tools=[tool_schema(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=speak,
            )
        except RENDER_ERRORS as error:
            roles = ", ".join(message.role for message in messages)
            fix = "change the messages or name a template that takes them"
            raise ConfigError(FIELD, f"{self.name}, which refused messages of {roles} ({error})", fix) from error

    def after_turn(self, before: Sequence[Message], appended: Sequence[Message], speak: bool = True) -> str:
        """Text from the end of the policy's turn (the last of `before`) to where it speaks next."""
        earlier = before[:-1] if before and before[-1].role == "assistant" else before
        mark = MARK
        while any(mark in message.text for message in (*earlier, *appended)):
            mark += "X"
        text = self.render((*earlier, Message("assistant", mark), *appended), speak=speak)
        if text.count(mark) != 1:
            got = f"{self.name}, which shows an assistant's turn {text.count(mark)} times"
            raise ConfigError(FIELD, got, "name a template that shows every turn once, or use one turn")
        return text.partition(mark)[2]

    def turn(self, before: Sequence[Message], message: Message) -> str | None:
        """The text that the policy says where the conversation goes on with `message`; None where the template rewrites what
        came before it."""
        opened, closed = self.render(before), self.render((*before, message), speak=False)
        return closed.removeprefix(opened) if closed.startswith(opened) else None


def message_fields(message: Message) -> dict[str, Any]:
    """A message as templates know it; empty fields are left out because templates test for their presence."""
    content: Any = message.text
    if not isinstance(message.content, str) and any(part.media for part in message.content):
        content = [
            {"type": part.media.kind} if part.media else {"type": "text", "text": part.text} for part in message.content
        ]
    fields: dict[str, Any] = {"role": message.role, "content": content}
    if message.name:
        fields["name"] = message.name
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in message.tool_calls
        ]
    return fields


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of jinja, in which powers and repetitions that would take all time or memory are errors too."""

    intercepted_binops = frozenset({"**", "*"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if right * left.bit_length() > MAX_BITS:
                raise jinja2.TemplateError(f"a power of more than {MAX_BITS} bits")
        elif operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(text, Sequence) and len(text) * times > MAX_REPEATED:
                    raise jinja2.TemplateError(f"a repetition of more than {MAX_REPEATED} items")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for other trainers; here its body is all there is to it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


# -- tools -----------------------------------------------------------------------------------------------------------

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
    """Read calls, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes): (text without them, calls, error).

    A call that can't be read is a message for the policy, never an exception. Calls inside a thought are not calls."""
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
    """Read one call, or say what is wrong with it. Ids have nine letters and digits, as strict templates demand."""
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


# -- files of a model folder -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChatFiles:
    """Files of a model folder that say how its text is made."""

    tokenizer: Tokenizer
    settings: Mapping[str, Any]
    """`tokenizer_config.json`."""
    special: Mapping[str, str]
    """Special tokens by the names that templates use: `bos_token`, `eos_token`, ..."""
    templates: Mapping[str, str]
    """Chat templates by name: `default`, and `tool_use` where the model has its own."""
    template_source: str
    """The file or key that the templates came from, for messages to people."""
    end_ids: tuple[int, ...]
    """End-of-sequence ids of `generation_config.json`, else of `config.json`."""
    config: Mapping[str, Any]
    """`config.json`."""
    placeholders: Mapping[str, int]
    """By kind of medium, the id that `config.json` names for it."""

    @classmethod
    def read(cls, model: Mapping[str, Any]) -> ChatFiles:
        """Raises ConfigError naming the key of `[model]` whose folder or file is missing or broken."""
        folder = _folder("model.path", str(model.get("path") or ""))
        texts = _folder("model.tokenizer", str(model["tokenizer"])) if model.get("tokenizer") else folder
        settings, config = _json(texts / "tokenizer_config.json"), _json(folder / "config.json")
        templates, source = _templates(texts, settings, str(model.get("chat_template") or ""))
        return cls(
            tokenizer=_tokenizer(texts / "tokenizer.json"),
            settings=settings,
            special=_special(_json(texts / "special_tokens_map.json")) | _special(settings),
            templates=templates,
            template_source=source,
            end_ids=_end_ids(_json(folder / "generation_config.json")) or _end_ids(config),
            config=config,
            placeholders=placeholders(folder),
        )


def _folder(field: str, path: str) -> Path:
    folder = Path(path)
    if not path or not folder.is_dir():
        raise ConfigError(field, repr(path), "name a folder with a model in the Hugging Face layout")
    return folder


def _tokenizer(file: Path) -> Tokenizer:
    if not file.is_file():
        fix = "write one with `AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)` of transformers"
        raise ConfigError("model.path", f"no {file.name} in {file.parent}", fix)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a file it can't read
        raise ConfigError(
            "model.path", f"{file}, which can't be read: {error}", "restore it from the model's source"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _json(file: Path) -> dict[str, Any]:
    """A JSON object, empty where the folder lacks the file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            "model.path", f"{file}, which can't be read: {error}", "restore it from the model's source"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError("model.path", f"{file}: no JSON object", "restore the file from the model's source")
    return value


def _special(settings: Mapping[str, Any]) -> dict[str, str]:
    """`*_token` entries, which are strings or objects with `content`."""
    found = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _templates(folder: Path, settings: Mapping[str, Any], chosen: str) -> tuple[dict[str, str], str]:
    """Templates and where they are from: the configuration, then `chat_template.jinja`, then the tokenizer's."""
    if "{" in chosen or "\n" in chosen:
        return {"default": chosen}, "[model] chat_template"
    if chosen:
        try:
            return {"default": Path(chosen).read_text(encoding="utf-8")}, chosen
        except (OSError, UnicodeDecodeError) as error:
            fix = "name a readable file, or write the template itself"
            raise ConfigError("model.chat_template", chosen, fix) from error
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return {"default": file.read_text(encoding="utf-8")}, str(file)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(FIELD, f"{file}, which can't be read: {error}", "restore the file") from error
    known = settings.get("chat_template")
    source = str(folder / "tokenizer_config.json")
    if isinstance(known, list):
        if not all(isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in known):
            raise ConfigError(
                FIELD, f"{source}, whose list has other things than name and template", "restore the file"
            )
        return {str(entry["name"]): str(entry["template"]) for entry in known}, source
    return ({"default": known} if isinstance(known, str) else {}), source


def _end_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    ids, text = config.get("eos_token_id"), config.get("text_config")
    if ids is None and isinstance(text, dict):
        ids = text.get("eos_token_id")
    found = tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)
    if not all(type(number) is int and 0 <= number < MAX_IDS for number in found):
        raise ConfigError(
            "model.path", f"an eos_token_id of {ids!r} in its configuration", "write an id, or a list of ids"
        )
    return found
