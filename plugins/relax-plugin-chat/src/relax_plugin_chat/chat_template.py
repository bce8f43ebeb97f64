# SPDX-License-Identifier: Apache-2.0
"""Chat templates: render messages to text as `transformers` does, and find the text that follows a policy's turn.

Templates work on text, not on tokens. This module also makes the JSON schemas of tools that templates show, and reads
the tokenizer and template files of a model folder without importing transformers or torch.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import jinja2
from tokenizers import Tokenizer

from relax_core.api.environment import RowTool, Tool
from relax_core.api.errors import ConfigError
from relax_core.api.files import read_text
from relax_core.api.message_words import BEGIN, END, NAME, missing_words
from relax_core.api.model_folder import placeholders
from relax_core.api.task import Message, Part, ToolCall
from relax_plugin_chat.message_marks import MARK, form_of, lost_marks, marked
from relax_plugin_chat.template_sandbox import compiled, rendered, to_json

FIELD = "model.chat_template"
THOUGHT = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Message fields that hold the thought of an assistant's turn, by the templates of several families."""
OPENED, CLOSED = re.compile(rf"{BEGIN}{NAME}{END}\s*\Z"), re.compile(rf"{BEGIN}/{NAME}{END}\s*\Z")
"""Patterns of the mark with which a prompt opens or closes the thought of the policy's turn, such as `<think>`."""
SHOWN = 60
"""Most characters of a message that an error quotes."""
MAX_FORMS = 4096
"""Most forms of conversations that a template remembers."""
MAX_IDS = 1 << 31
"""Upper bound of token ids (exclusive), above every real vocabulary."""
# Errors that template code raises: jinja's own, and Python's for wrong types inside an expression.
RENDER_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError,
)  # fmt: skip


class ChatTemplate:
    """A compiled chat template with its variables.

    To find the text that follows a turn, the conversation is rendered with a mark in place of the turn. Only the text
    after the mark is used, so a template may strip or rewrite earlier turns.

    Invariant: `render` and `after_turn` return no text that lacks words of a new message, but for white space, escapes
    and thoughts. For each form of a conversation (its roles, and which messages have words and calls), the template is
    first tried with a mark in place of each message. That finds lost messages of any length, also those whose words
    are by chance in the template, and the roles whose words are shown only as a list of parts.
    """

    def __init__(
        self, text: str, name: str, variables: Mapping[str, Any], now: datetime,
        call_id: Callable[[ToolCall, int], str] = lambda call, number: call.id, thinking: bool = False,
    ) -> None:  # fmt: skip
        """Compile a template. Raises ConfigError for a syntax error.

        `call_id(call, number)` returns an id that the template accepts; `number` is the call's index in the
        conversation. `thinking`: True if the template reads a turn's thought from a message field `thinking`.
        """
        self.name, self._text, self._call_id, self._thinking = name, text, call_id, thinking
        self._variables = dict(variables)
        self._in_parts: frozenset[str] = frozenset()
        """Roles whose content the template gets as a list of parts, since it does not show their content as text."""
        self._lost: dict[int, Sequence[int]] = {}
        """Indices of the messages that the template leaves out, by form of a conversation."""
        try:
            self._template = compiled(text, {"raise_exception": _raise, "strftime_now": now.strftime})
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(FIELD, f"{name} line {error.lineno}: {error.message}", "correct the template") from error

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), speak: bool = True) -> str:
        """Render the conversation; with `speak`, also open the policy's next turn.

        Raises ConfigError if the template leaves out words or a field of a message, or the tools that a row describes.
        """

        def write(messages: Sequence[Message], in_parts: Set[str]) -> _Written:
            fields = self._fields(messages, in_parts)
            return self._render(fields, tools, speak), fields

        text, fields = self._checked(messages, 0, write, (speak, bool(tools)))
        if any(isinstance(tool, RowTool) for tool in tools) and text == self._render(fields, (), speak):
            got = f"{self.name}, which shows no tools, for a row with tools"
            raise ConfigError(FIELD, got, "name a template that shows tools, or remove the column tools")
        return text

    def after_turn(self, before: Sequence[Message], appended: Sequence[Message], speak: bool = True) -> str:
        """Return the text after the policy's turn (the last of `before`); with `speak`, also open its next turn.

        Raises ConfigError if the template leaves out words or a field of `appended`.
        """

        def write(messages: Sequence[Message], in_parts: Set[str]) -> _Written:
            return self._after_turn(messages[: len(before)], messages[len(before) :], speak, in_parts)

        return self._checked((*before, *appended), len(before), write, (speak, "after"))[0]

    def _after_turn(
        self, before: Sequence[Message], appended: Sequence[Message], speak: bool, in_parts: Set[str]
    ) -> _Written:
        """Return the text after the policy's turn, and the fields of `appended`."""
        spoken = len(before) - 1 if before and before[-1].role == "assistant" else len(before)
        fields = self._fields((*before, *appended), in_parts)
        earlier, later = fields[:spoken], fields[len(before) :]
        for message in earlier:  # some templates refuse a conversation in which a turn has several calls
            if "tool_calls" in message:
                message["tool_calls"] = message["tool_calls"][:1]
        mark = MARK
        while any(mark in str(message) for message in (*earlier, *later)):
            mark += "X"
        try:
            turn = message_fields(Message("assistant", mark), None, "assistant" in in_parts)
            text = self._render([*earlier, turn, *later], speak=speak)
        except ConfigError:
            if not (before and before[-1].tool_calls and appended and appended[0].role == "tool"):
                raise
            return self._after_call(earlier, before[-1].tool_calls, later[0].get("name", ""), mark, later, speak), later
        if text.count(mark) != 1:
            got = f"{self.name}, which shows an assistant's turn {text.count(mark)} times"
            raise ConfigError(FIELD, got, "name a template that shows every turn once, or use one turn")
        return text.partition(mark)[2], later

    def _after_call(
        self, earlier: Sequence[dict[str, Any]], calls: Sequence[ToolCall], answers: str, mark: str,
        later: Sequence[dict[str, Any]], speak: bool,
    ) -> str:  # fmt: skip
        """Return the text of `after_turn` for a template that refuses a tool's answer after a turn without a call.

        The mark that precedes the text is put into the arguments of the call that is answered first.
        """
        called = next((call for call in calls if call.name == answers), calls[0])
        marked = message_fields(Message("assistant", "", (replace(called, arguments={mark: mark}),)), self._call_style)
        text = self._render([*earlier, marked, *later], speak=speak)
        _, is_shown, rest = text.rpartition(mark)
        if not is_shown or not rest.startswith('"}'):
            got = (
                f"{self.name}, which refuses a tool answer after a turn without calls and does not write calls as JSON"
            )
            raise ConfigError(FIELD, got, "name a template that accepts a tool's answer after a turn without calls")
        return rest.removeprefix('"}')

    def turn(self, before: Sequence[Message], message: Message) -> tuple[str, bool, str]:
        """Return (text of `message` as the policy's turn after `before`, whether the template wrote it, the prompt).

        The template does not write the text if adding the message changes the text of `before`, or drops words of the
        message; the text is then that of the message. If the prompt opens a thought, the text does not open the thought
        again. Raises ConfigError if a tool call or a further field would be missing, or a thought does not fit.
        """

        def write(messages: Sequence[Message], in_parts: Set[str]) -> _Written:
            return self._render(self._fields(messages, in_parts), speak=False), ()

        is_lost = bool(self._lost_in((*before, message), len(before), write, "turn")) and not message.tool_calls
        opened = self._render(self._fields(before))
        mark = OPENED.search(opened)
        said = None if is_lost else self._written(before, message, opened)
        if mark and not is_lost and (said is None or said.lstrip().startswith(mark[0].rstrip())):
            message = self._without_mark(message, mark)
            said = self._written(before, message, opened)
        if said is None and (message.tool_calls or message.extra):
            parts = ", ".join([*(["tool_calls"] if message.tool_calls else []), *message.extra])
            got = f"{self.name}, which leaves out words of an assistant's turn with {parts}, or changes earlier turns"
            raise ConfigError(FIELD, got, "remove words or fields, or name a template that writes all parts of a turn")
        text = message.text if said is None else said
        self._check_thought(opened, text)
        return text, said is not None, opened

    def _written(self, before: Sequence[Message], message: Message, opened: str) -> str | None:
        """Return a turn as the template writes it after `opened`; None if it changes `opened` or drops words."""
        fields = self._fields((*before, message))
        closed = self._render(fields, speak=False)
        self._check_read(fields[-1:])
        if not closed.startswith(opened):
            return None
        said = closed.removeprefix(opened)
        if left_out := [call.name for call in message.tool_calls if call.name not in said]:
            got = f"{self.name}, which leaves out the call of {left_out[0]!r} of an assistant's turn"
            raise ConfigError(FIELD, got, "name a template that writes tool calls")
        thought = THOUGHT.fullmatch(message.text)
        words = [*(thought.groups() if thought else (message.text,))]
        words += [message.extra[name] for name in THOUGHT_FIELDS if isinstance(message.extra.get(name), str)]
        shown = "".join(said.split())
        for one in words:
            if "".join(one.split()) not in shown and json.dumps(one)[1:-1] not in said:
                return None
        return said

    def _without_mark(self, message: Message, mark: re.Match[str]) -> Message:
        """Return a turn without the mark of a thought at its beginning, which the prompt has written already."""
        words, written = message.text.lstrip(), mark[0].rstrip()
        if not isinstance(message.content, str) or not words.startswith(written):
            return message
        words = words.removeprefix(written)
        return replace(message, content=words.removeprefix(mark[0].removeprefix(written)))

    def _check_thought(self, opened: str, said: str) -> None:
        """Raise ConfigError if the text of a turn does not fit the thought that the prompt opens or closes."""
        if mark := OPENED.search(opened):
            begins, ends = mark[0].rstrip(), f"{mark[1]}/{mark[2]}{mark[3]}"
            fault = f"an answer without {ends}" if ends not in said else ""
            state = f"opens a thought with {begins}"
        elif mark := CLOSED.search(opened):
            begins = f"{mark[1]}{mark[2]}{mark[3]}"
            fault, state = "", f"has closed the thought with {mark[0].rstrip()}"
        else:
            return
        if said.lstrip().startswith(begins):
            fault = f"an answer that begins with {begins}"
        if fault:
            fix = (
                "write the thought as the template expects it, or set model.chat_template_kwargs or model.chat_template"
            )
            raise ConfigError("data.train", f"{fault}, though {self.name} {state}", fix)

    def _checked(self, messages: Sequence[Message], new: int, write: _Write, form: Hashable) -> _Written:
        """Write messages, and raise ConfigError if words or fields of `messages[new:]` are missing in the text."""
        lost = self._lost_in(messages, new, write, form)
        text, fields = write(messages, self._in_parts)
        self._check_read(fields)
        said = [self._shown_words(each) for each in messages[new:]]
        lost = lost or [new + index for index in missing_words(said, text)]
        if lost:
            message = messages[lost[0]]
            role, words = message.role, message.text or f"call of {message.tool_calls[0].name!r}"
            got = f"{self.name}, which leaves out words of a message of {role!r}: {words[:SHOWN]!r}"
            fix = f"name a template that writes each message of {role!r}, or rename the role to one that it writes"
            raise ConfigError(FIELD, got, fix)
        return text, fields

    def _lost_in(self, messages: Sequence[Message], new: int, write: _Write, form: Hashable) -> Sequence[int]:
        """Return the indices from `new` on of messages that the template leaves out, by one trial of their form.

        Raises ConfigError, without a trial, if the template refuses the messages and does not read parts.
        """
        key = hash((form, new, *map(form_of, messages)))  # the forms themselves are as long as the conversations
        lost = self._lost.get(key)
        if lost is None:
            if not self._reads_parts:
                write(messages, self._in_parts)
            lost = self._tried(messages, new, write)
            if len(self._lost) >= MAX_FORMS:
                self._lost.clear()
            self._lost[key] = lost
        return lost

    def _tried(self, messages: Sequence[Message], new: int, write: _Write) -> Sequence[int]:
        """Return the indices from `new` on of messages whose marks the template leaves out.

        If it shows the messages of some roles only as lists of parts, give the content of these roles as parts from now
        on. A form that the template refuses to write with marks loses nothing: the words themselves are searched.
        """
        tried = [marked(self._shown_words(message), at) for at, message in enumerate(messages)]

        def lost(in_parts: Set[str]) -> list[int] | None:
            try:
                text = write(tried, in_parts)[0]
            except ConfigError:
                return None
            return [index for index in lost_marks(tried, text, in_parts) if index >= new]

        before, roles = self._in_parts, {message.role for message in messages}
        found = lost(before)
        if found != [] and self._reads_parts:
            of_lost = {messages[at].role for at in found or ()}
            for each in (of_lost or roles, roles, roles - {"system"}):
                if lost(before | each) == []:
                    self._in_parts = before | each
                    return ()
        return found or ()

    def _shown_words(self, message: Message) -> Message:
        """Return a message without the words of a turn with a call, which gpt-oss's template may drop as a thought."""
        return replace(message, content="") if self._thinking and message.tool_calls else message

    def _check_read(self, fields: Sequence[Mapping[str, Any]]) -> None:
        """Raise ConfigError naming a field of a message that the template did not read in the last rendering."""
        for message in fields:
            for name in message.unread if isinstance(message, _ReadFields) else ():
                if message["role"] == "assistant" and name in THOUGHT_FIELDS and self._mentions(name):
                    continue  # the template drops thoughts of earlier turns on purpose
                got = f"{self.name}, which does not show the field {name!r} of a message of {message['role']!r}"
                others = [other for other in THOUGHT_FIELDS if name in THOUGHT_FIELDS and self._mentions(other)]
                rename = f"rename the field to {others[0]!r}" if others else "remove the field"
                raise ConfigError(FIELD, got, f"{rename}, or name a template that shows it")

    @cached_property
    def _reads_parts(self) -> bool:
        """True if the template may read the content of a message as a list of parts."""
        return self._mentions("text")

    def _mentions(self, name: str) -> bool:
        return re.search(rf"""[.'"]{name}\b""", self._text) is not None

    def _render(self, fields: Sequence[dict[str, Any]], tools: Sequence[Tool] = (), speak: bool = True) -> str:
        try:
            shown = [tool_schema(tool) for tool in tools] or None
            messages = _one_call_each(fields) if self._thinking else fields
            given = {"messages": messages, "tools": shown, "documents": None, "add_generation_prompt": speak}
            return rendered(self._template, self._variables | given)
        except RENDER_ERRORS as error:
            roles = ", ".join(message["role"] for message in fields)
            fix = "change the messages or name a template that accepts them"
            raise ConfigError(FIELD, f"{self.name}, which can't render the roles {roles} ({error})", fix) from error

    def _fields(self, messages: Sequence[Message], in_parts: Set[str] | None = None) -> list[dict[str, Any]]:
        """Return the messages as dicts for the template. `in_parts`: roles whose content is a list of parts.

        A tool's answer gets the id of the unanswered call with its `tool_call_id`, or else of the first of the same
        name, or else of the first. For a template that shows no ids, the answers between two turns of the assistant
        follow the order of their calls.
        """
        in_parts = self._in_parts if in_parts is None else in_parts
        found: list[dict[str, Any]] = []
        unanswered: dict[int, ToolCall] = {}  # calls of the newest turn with calls, by number
        earlier: dict[int, ToolCall] = {}  # unanswered calls of the turns before
        ids: dict[str, str] = {}  # a call's own id by the id that the template gets
        order: dict[int, tuple[int, int]] = {}  # the index of an answer -> (number of turns before, number of its call)
        turns = number = 0
        for index, message in enumerate(messages):
            turns += message.role == "assistant"
            if message.tool_calls:
                calls = [
                    replace(call, id=self._call_id(call, number + at)) for at, call in enumerate(message.tool_calls)
                ]
                ids |= {made.id: call.id for made, call in zip(calls, message.tool_calls, strict=True)}
                earlier, unanswered = unanswered | earlier, dict(enumerate(calls, number))
                message, number = replace(message, tool_calls=tuple(calls)), number + len(calls)
            style = self._call_style if message.tool_calls else None
            fields = message_fields(message, style, message.role in in_parts)
            thought = THOUGHT.fullmatch(message.text) if self._thinking and message.role == "assistant" else None
            # In a turn with words and a call, gpt-oss's template takes no thought, and shows the words as the thought.
            if thought and not (message.tool_calls and thought[2].strip()):
                fields |= {"thinking": thought[1], "content": thought[2].strip()}
            if message.role == "tool":
                given = message.extra.get("tool_call_id")
                meant = [at for at, call in (unanswered | earlier).items() if given in (ids[call.id], call.id)]
                if given and not meant and any(ids.values()):
                    got = f"a tool's answer with tool_call_id {given!r}, which no unanswered call before the answer has"
                    raise ConfigError("data.train", got, "correct the id, or leave out the ids of calls and answers")
                meant = meant or [at for at, call in unanswered.items() if call.name == message.name] or [*unanswered]
                at = meant[0] if meant else number
                call = unanswered.pop(at, None) or earlier.pop(at, None) or ToolCall(message.name, {})
                fields["tool_call_id"], order[index] = call.id or self._call_id(call, number), (turns, at)
            watched = message.extra.keys() - {"tool_call_id"} if message.role == "tool" else {*message.extra}
            watched |= {"name"} if message.name and message.role != "tool" else set()
            found.append(_ReadFields(fields, watched) if watched else fields)
        ordered = sorted(order, key=order.__getitem__)
        if ordered != [*order] and not self._mentions("tool_call_id"):
            for index, answer in zip(order, [found[one] for one in ordered], strict=True):
                found[index] = answer
        return found

    @cached_property
    def _call_style(self) -> CallStyle:
        """The form in which the template accepts tool calls, found by trying each form.

        Most templates accept the first. Some need arguments as text. Some show calls only if the content is None.
        """
        asked = message_fields(Message("user", "x"))
        call = ToolCall("name", {MARK: MARK})
        call = replace(call, id=self._call_id(call, 0))
        for style in (CallStyle(), CallStyle(True), CallStyle(False, None), CallStyle(True, None)):
            try:
                said = self._render([asked, message_fields(Message("assistant", "", (call,)), style)], speak=False)
            except ConfigError:
                continue
            if MARK in said and repr(MARK) not in said:  # single quotes are Python's repr, not JSON
                return style
        return CallStyle()


@dataclass(frozen=True, slots=True)
class CallStyle:
    """The form in which a template accepts tool calls."""

    arguments_are_text: bool = False
    """Arguments are JSON text instead of an object."""
    no_words: str | None = ""
    """Content of a turn that has calls and no words."""


def message_fields(message: Message, style: CallStyle | None = None, in_parts: bool = False) -> dict[str, Any]:
    """Return a message as a dict for templates. Empty fields are left out: templates test whether a field exists.

    `in_parts`: the content is a list of parts also if it is text.
    """
    style = style or CallStyle()
    content: Any = message.text
    parts = (Part(message.content),) if isinstance(message.content, str) else message.content
    if any(part.media for part in parts) or (in_parts and content):
        content = [{"type": part.media.kind} if part.media else {"type": "text", "text": part.text} for part in parts]
    fields: dict[str, Any] = {"role": message.role, "content": content}
    if message.name:
        fields["name"] = message.name
    if message.tool_calls:
        fields["content"] = content or style.no_words
        arguments = [dict(call.arguments) for call in message.tool_calls]
        written = map(to_json, arguments) if style.arguments_are_text else arguments
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": one}}
            for call, one in zip(message.tool_calls, written, strict=True)
        ]
    return fields | dict(message.extra)


def _one_call_each(fields: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split turns with several calls into turns with one call, each followed by its answers: gpt-oss shows one call."""
    pieces: list[list[dict[str, Any]]] = []
    by_id: dict[str, list[dict[str, Any]]] = {}  # the piece of each call of the last turn with several calls
    for message in fields:
        calls = message.get("tool_calls", [])
        if len(calls) > 1:
            split = [copy(message), *({"role": "assistant", "content": ""} for _ in calls[1:])]
            for turn, call in zip(split, calls, strict=True):
                turn["tool_calls"] = [call]
                pieces.append([turn])
                by_id[call["id"]] = pieces[-1]
        elif message["role"] == "tool" and message["tool_call_id"] in by_id:
            by_id[message["tool_call_id"]].append(message)
        else:
            by_id = {} if message["role"] == "assistant" else by_id
            pieces.append([message])
    return [message for piece in pieces for message in piece]


_Written = tuple[str, Sequence[dict[str, Any]]]
"""The text that a template wrote, and the fields of the new messages."""
_Write = Callable[[Sequence[Message], Set[str]], _Written]
"""A function of the messages, and of the roles whose content is given as a list of parts."""


class _ReadFields(dict[str, Any]):
    """The fields of a message, with a record of the watched fields that a template has not read."""

    def __init__(self, fields: Mapping[str, Any], watched: Set[str]) -> None:
        super().__init__(fields)
        self.unread = set(watched)

    def __copy__(self) -> _ReadFields:
        made = _ReadFields(self, self.unread)
        made.unread = self.unread
        return made

    def __getitem__(self, key: str) -> Any:
        self.unread.discard(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.unread.discard(key)
        return super().get(key, default)

    def items(self) -> Any:
        self.unread.clear()
        return super().items()

    def values(self) -> Any:
        self.unread.clear()
        return super().values()


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


# -- tools -----------------------------------------------------------------------------------------------------------

_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def tool_schema(tool: Tool) -> dict[str, Any]:
    """Return the function schema that chat templates expect. Raises TypeError for parameters that are not a schema.

    If `parameters["type"]` is the string `object`, the mapping is a whole JSON schema. Any other mapping holds types by
    parameter name, even if a parameter is named `type` or `properties`: a parameter's type is never a string.
    """
    if isinstance(tool, RowTool):
        return dict(tool.schema)
    parameters = dict(tool.parameters)
    if parameters.get("type") == "object":
        parameters = {"properties": {}, **parameters}
        if not all(map(_is_json, parameters.values())):
            fix = 'list parameters in `properties`; give a parameter named `type` a type or a schema, {"type": str}'
            raise TypeError(f"tool {tool.name}: got {tool.parameters}, which is not a JSON schema; {fix}")
    else:
        properties = {name: type_schema(kind) for name, kind in tool.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _is_json(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | list | tuple | Mapping)


def type_schema(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a parameter's type; a mapping is already a schema. Raises TypeError for other types."""
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
        f"tool parameter type {kind!r} has no JSON schema; use str, int, float, bool, list, dict or a schema, "
        'or write a whole schema with "type": "object"'
    )


# -- files of a model folder -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChatFiles:
    """The tokenizer, chat templates and configuration of a model folder."""

    tokenizer: Tokenizer
    settings: Mapping[str, Any]
    """Content of `tokenizer_config.json`; empty without the file."""
    special: Mapping[str, str]
    """Special tokens by the names that templates use: `bos_token`, `eos_token`, ..."""
    templates: Mapping[str, str]
    """Chat templates by name: `default`, and `tool_use` if the model has a separate one for prompts with tools."""
    template_source: str
    """File or configuration key that the templates came from, for error messages."""
    end_ids: tuple[int, ...]
    """End-of-sequence ids of `generation_config.json`, else of `config.json`."""
    config: Mapping[str, Any]
    """Content of `config.json`; empty without the file."""
    placeholders: Mapping[str, int]
    """Ids of placeholder tokens by kind of medium, from `config.json`."""

    @classmethod
    def read(cls, model: Mapping[str, Any]) -> ChatFiles:
        """Read the files of a `[model]` table. Raises ConfigError naming the key whose file is missing or broken."""
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
    """Return the JSON object of a file, or an empty dict if the file does not exist."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            "model.path", f"{file}, which can't be read: {error}", "restore it from the model's source"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError("model.path", f"{file}, which is not a JSON object", "restore it from the model's source")
    return value


def _special(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the `*_token` entries as strings; each is a string or an object with `content`."""
    found = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _templates(folder: Path, settings: Mapping[str, Any], chosen: str) -> tuple[dict[str, str], str]:
    """Return (templates by name, source) from the configuration, else the folder's template files, else `settings`."""
    if "{" in chosen or "\n" in chosen:
        return {"default": chosen}, "[model] chat_template"
    if chosen:
        try:
            return {"default": read_text(chosen)}, chosen
        except (OSError, UnicodeDecodeError) as error:
            fix = "name a readable file, or write the template itself"
            raise ConfigError("model.chat_template", chosen, fix) from error
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    texts: dict[str, str] = {}
    for name, file in files.items():
        try:
            texts |= {name: file.read_text(encoding="utf-8")} if file.is_file() else {}
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(FIELD, f"{file}, which can't be read: {error}", "restore the file") from error
    if texts:
        return texts, str(files["default"] if "default" in texts else folder / "additional_chat_templates")
    known = settings.get("chat_template")
    source = str(folder / "tokenizer_config.json")
    if isinstance(known, list):
        if not all(isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in known):
            raise ConfigError(
                FIELD, f"{source}, whose list of templates has an entry without name and template", "restore the file"
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
