# SPDX-License-Identifier: Apache-2.0
"""A chat template: messages to text, as `transformers` renders them, and the text that follows a policy's turn.

It knows no tokens. Below it stand the JSON schema of tools, as templates show them, and the files of a model folder that say
how its text is made, read without transformers or torch.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
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
THOUGHT = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
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

    def __init__(
        self, text: str, name: str, variables: Mapping[str, Any], now: datetime,
        call_id: Callable[[ToolCall, int], str] = lambda call, number: call.id, thinking: bool = False,
    ) -> None:  # fmt: skip
        """`call_id` gives a call, the number-th of the conversation, an id that the template takes. `thinking`: the template
        takes the thought of a turn as a field of that name, apart from its words."""
        self.name, self._call_id, self._thinking = name, call_id, thinking
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
        return self._render(self._fields(messages), tools, speak)

    def after_turn(self, before: Sequence[Message], appended: Sequence[Message], speak: bool = True) -> str:
        """Text from the end of the policy's turn (the last of `before`) to where it speaks next."""
        spoken = len(before) - 1 if before and before[-1].role == "assistant" else len(before)
        fields = self._fields((*before, *appended))
        earlier, later = fields[:spoken], fields[len(before) :]
        for message in earlier:  # some templates take no more than one call a turn, and refuse the whole conversation
            if "tool_calls" in message:
                message["tool_calls"] = message["tool_calls"][:1]
        mark = MARK
        while any(mark in str(message) for message in (*earlier, *later)):
            mark += "X"
        try:
            text = self._render([*earlier, {"role": "assistant", "content": mark}, *later], speak=speak)
        except ConfigError:
            if not (before and before[-1].tool_calls and appended and appended[0].role == "tool"):
                raise
            return self._after_call(earlier, before[-1].tool_calls, appended[0].name, mark, later, speak)
        if text.count(mark) != 1:
            got = f"{self.name}, which shows an assistant's turn {text.count(mark)} times"
            raise ConfigError(FIELD, got, "name a template that shows every turn once, or use one turn")
        return text.partition(mark)[2]

    def _after_call(
        self, earlier: Sequence[Mapping[str, Any]], calls: Sequence[ToolCall], answers: str, mark: str,
        later: Sequence[Mapping[str, Any]], speak: bool,
    ) -> str:  # fmt: skip
        """As `after_turn`, of a template that refuses answers of tools behind a turn without a call: the mark stands in the
        arguments of the call that is answered first."""
        called = next((call for call in calls if call.name == answers), calls[0])
        marked = message_fields(Message("assistant", "", (replace(called, arguments={mark: mark}),)), self._call_style)
        text = self._render([*earlier, marked, *later], speak=speak)
        _, is_shown, rest = text.rpartition(mark)
        if not is_shown or not rest.startswith('"}'):
            got = f"{self.name}, which refuses answers of tools behind words, and writes calls otherwise than as JSON"
            raise ConfigError(FIELD, got, "name a template that takes answers of tools behind words")
        return rest.removeprefix('"}')

    def turn(self, before: Sequence[Message], message: Message) -> str | None:
        """The text that the policy says where the conversation goes on with `message`; None where the template rewrites what
        came before it."""
        opened, closed = self.render(before), self.render((*before, message), speak=False)
        if not closed.startswith(opened):
            return None
        said = closed.removeprefix(opened)
        if left_out := [call.name for call in message.tool_calls if call.name not in said]:
            got = f"{self.name}, which leaves out the call of {left_out[0]!r} of an assistant's turn"
            raise ConfigError(FIELD, got, "name a template that writes tool calls")
        return said

    def _render(self, fields: Sequence[Mapping[str, Any]], tools: Sequence[Tool] = (), speak: bool = True) -> str:
        try:
            return self._template.render(
                **self._variables,
                messages=fields,
                tools=[tool_schema(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=speak,
            )
        except RENDER_ERRORS as error:
            roles = ", ".join(message["role"] for message in fields)
            fix = "change the messages or name a template that takes them"
            raise ConfigError(FIELD, f"{self.name}, which refused messages of {roles} ({error})", fix) from error

    def _fields(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages as templates know them. An answer of a tool has the id of the call that it answers: the first unanswered one
        of the turn before it, by its name where it has one."""
        found: list[dict[str, Any]] = []
        unanswered: list[ToolCall] = []
        number = 0
        for message in messages:
            if message.tool_calls:
                calls = [
                    replace(call, id=self._call_id(call, number + at)) for at, call in enumerate(message.tool_calls)
                ]
                message, unanswered, number = replace(message, tool_calls=tuple(calls)), calls, number + len(calls)
            fields = message_fields(message, self._call_style if message.tool_calls else None)
            thought = THOUGHT.fullmatch(message.text) if self._thinking and message.role == "assistant" else None
            # Beside words and a call gpt-oss's template takes no thought, and shows the words as one.
            if thought and not (message.tool_calls and thought[2].strip()):
                fields |= {"thinking": thought[1], "content": thought[2].strip()}
            if message.role == "tool":
                meant = [call for call in unanswered if call.name == message.name] or unanswered[:1]
                fields["tool_call_id"] = meant[0].id if meant else self._call_id(ToolCall(message.name, {}), number)
                unanswered = [call for call in unanswered if call is not meant[0]]
            found.append(fields)
        return found

    @cached_property
    def _call_style(self) -> CallStyle:
        """The way in which the template takes calls, found by trying: most take the first, some join text to text, and some
        show calls only beside no words at all."""
        asked = message_fields(Message("user", "x"))
        call = ToolCall("name", {MARK: MARK})
        call = replace(call, id=self._call_id(call, 0))
        for style in (CallStyle(), CallStyle(True), CallStyle(False, None), CallStyle(True, None)):
            try:
                said = self._render([asked, message_fields(Message("assistant", "", (call,)), style)], speak=False)
            except ConfigError:
                continue
            if MARK in said and repr(MARK) not in said:  # Python's quotation marks are no JSON
                return style
        return CallStyle()


@dataclass(frozen=True, slots=True)
class CallStyle:
    """The way in which a template takes tool calls."""

    arguments_are_text: bool = False
    """Arguments are JSON text, and no object."""
    no_words: str | None = ""
    """Content of a turn that only calls."""


def message_fields(message: Message, style: CallStyle | None = None) -> dict[str, Any]:
    """A message as templates know it; empty fields are left out because templates test for their presence."""
    style = style or CallStyle()
    content: Any = message.text
    if not isinstance(message.content, str) and any(part.media for part in message.content):
        content = [
            {"type": part.media.kind} if part.media else {"type": "text", "text": part.text} for part in message.content
        ]
    fields: dict[str, Any] = {"role": message.role, "content": content}
    if message.name:
        fields["name"] = message.name
    if message.tool_calls:
        fields["content"] = content or style.no_words
        arguments = [dict(call.arguments) for call in message.tool_calls]
        written = map(_to_json, arguments) if style.arguments_are_text else arguments
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": one}}
            for call, one in zip(message.tool_calls, written, strict=True)
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

_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def tool_schema(tool: Tool) -> dict[str, Any]:
    """The function schema that chat templates expect. Parameters whose `type` is the text `object` are a whole JSON schema, for
    no parameter's type is a text; all others are parameters by name, those that are named `type` or `properties` too."""
    parameters = dict(tool.parameters)
    if parameters.get("type") == "object":
        parameters = {"properties": {}, **parameters}
        if not all(map(_is_json, parameters.values())):
            fix = 'its parameters stand in `properties`; one that is named `type` has a type or a schema, {"type": str}'
            raise TypeError(f"tool {tool.name}: got {tool.parameters}, which is no JSON schema; {fix}")
    else:
        properties = {name: type_schema(kind) for name, kind in tool.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _is_json(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | list | tuple | Mapping)


def type_schema(kind: Any) -> dict[str, Any]:
    """JSON schema of a parameter given as a type; a mapping is a schema already."""
    if isinstance(kind, Mapping):
        return dict(kind)
    if isinstance(kind, Hashable) and kind in _NAMES:
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
        f"tool parameter type {kind!r} has no JSON schema; name str, int, float, bool, list, dict or a schema, "
        'and write a whole schema with "type": "object"'
    )


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
