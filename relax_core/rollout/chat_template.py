# SPDX-License-Identifier: Apache-2.0
"""A chat template: messages to text, as `transformers` renders them, and the text that follows a policy's turn.

It knows no tokens. What follows a turn is found by rendering the conversation with a mark in the turn's place:
text before the mark is never used, so a template may strip or rewrite earlier turns as it likes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from relax_core.api.environment import Tool
from relax_core.api.errors import ConfigError
from relax_core.api.task import Message
from relax_core.rollout.chat_tools import tool_schema

FIELD = "model.chat_template"
MARK = "RELAXTURN"
# What template code raises by itself: jinja's errors, and Python's own for wrong types inside an expression.
RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


class ChatTemplate:
    """One compiled template with the variables it sees."""

    def __init__(self, text: str, name: str, variables: Mapping[str, Any], now: datetime) -> None:
        self.name = name
        self._variables = dict(variables)
        try:
            self._template = _environment(now).from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(FIELD, f"{name} line {error.lineno}: {error.message}", "correct the template") from error

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), speak: bool = True) -> str:
        """The conversation; `speak` ends it where the policy's turn begins."""
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
        mark = _unused(MARK, (*earlier, *appended))
        text = self.render((*earlier, Message("assistant", mark), *appended), speak=speak)
        if text.count(mark) != 1:
            got = f"{self.name}, which shows an assistant's turn {text.count(mark)} times"
            raise ConfigError(FIELD, got, "name a template that shows every turn once, or use one turn")
        return text.partition(mark)[2]

    def turn(self, before: Sequence[Message], message: Message) -> str | None:
        """What the policy has to say for the conversation to go on with `message`; None where the template rewrites what
        came before it."""
        opened, closed = self.render(before), self.render((*before, message), speak=False)
        return closed.removeprefix(opened) if closed.startswith(opened) else None


def message_fields(message: Message) -> dict[str, Any]:
    """A message as templates know it; empty fields are left out because templates test for their presence."""
    fields: dict[str, Any] = {"role": message.role, "content": _content(message)}
    if message.name:
        fields["name"] = message.name
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in message.tool_calls
        ]
    return fields


def _content(message: Message) -> str | list[dict[str, str]]:
    if isinstance(message.content, str) or not any(part.media for part in message.content):
        return message.text
    return [
        {"type": part.media.kind} if part.media else {"type": "text", "text": part.text} for part in message.content
    ]


def _unused(mark: str, messages: Sequence[Message]) -> str:
    while any(mark in message.text for message in messages):
        mark += "X"
    return mark


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for other trainers; here its body is all there is to it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: datetime) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = now.strftime
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
