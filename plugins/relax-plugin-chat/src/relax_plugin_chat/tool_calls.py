# SPDX-License-Identifier: Apache-2.0
"""Tool calls in the format of the model's family: a table of formats, and one way to read a turn in each format.

This module works on text, without tokens or a template engine. A new format needs a reader in `tool_call_readers` and
an entry in `FORMATS`. A format whose turns have headers, such as `harmony`, also needs a class.
"""

from __future__ import annotations

import json
import re
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, ClassVar

from relax_core.api.environment import Tool
from relax_core.api.errors import ConfigError
from relax_core.api.task import ToolCall
from relax_plugin_chat import harmony, tool_call_readers as readers
from relax_plugin_chat.chat_template import tool_schema
from relax_plugin_chat.tool_call_readers import CallError, Parameters, Reader, WrittenCall

FIELD = "model.tool_calls"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A format of tool calls.

    `parse` never raises: for every text it returns the text without calls, the calls and an error. `parse` takes time
    in proportion to the text's length. Calls inside a thought are ignored, even if the prompt opened the thought.
    """

    name: str
    shown: tuple[tuple[str, ...], ...]
    """Texts that identify the format: a chat template must contain every text of one of these tuples."""
    opens: tuple[str, ...]
    """Marks that open calls."""
    read: Reader
    marks: tuple[str, ...] = ()
    """Further marks of the format. Marks that are special tokens of the model are left out of the returned text."""
    bare: str = ""
    """Character with which a turn of calls may begin instead of a mark; empty: only marks open calls."""
    thought: tuple[str, str] = ("<think>", "</think>")
    """Marks that open and close a thought."""
    ids: str = ""
    """Regular expression of the call ids that models write and templates require; empty if models write no ids."""
    ends: tuple[str, ...] = ()
    """Marks that end a turn, if there are several: the template may write another mark than the policy sampled."""
    has_headers: ClassVar[bool] = False
    """True if turns have headers even without calls, so that only `words` extracts their words."""
    _pieces: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        begins, ends = self.thought
        pieces = "|".join(map(re.escape, (begins, ends, *self.opens)))
        bare = rf"|(?:\A|(?<={re.escape(ends)}))\s*{re.escape(self.bare)}" if self.bare else ""
        object.__setattr__(self, "_pieces", re.compile(pieces + bare))

    @property
    def all_marks(self) -> tuple[str, ...]:
        """All marks of calls and thoughts."""
        return (*self.opens, *self.marks, *self.thought)

    def parse(
        self, text: str, tools: Sequence[Tool] = (), thinking: bool = False
    ) -> tuple[str, tuple[ToolCall, ...], str]:
        """Read the calls of one turn; return (text without calls, calls, error).

        If a call can't be read, the error is a message for the policy, and no calls are returned. `thinking`: True if
        the prompt has opened a thought. `tools` give the types of arguments that the format writes as text.
        """
        begins, ends = self.thought
        parameters: Parameters = {tool.name: tool_schema(tool)["function"]["parameters"] for tool in tools}
        calls: list[ToolCall] = []
        spans: list[tuple[int, int]] = []
        error, quoted = "", list[tuple[int, int]]()
        at = _behind(text, ends, 0) if thinking else 0
        may_close = not thinking  # the prompt may have opened a thought in a way that `thinking` does not show
        while found := self._pieces.search(text, at):
            start, at = found.span()
            if found[0] == begins:
                at = _behind(text, ends, at)
                may_close = may_close and bool(error)
            elif found[0] == ends:
                place = bisect(quoted, (start,))
                if may_close and not (place and start < quoted[place - 1][1]):
                    calls, spans, error = [], [], ""  # all text before was a thought
                    may_close = False
            elif not error:
                bare = found[0] not in self.opens
                if bare:
                    start = at = at - 1
                try:
                    written, end = self.read(text, start, at, parameters)
                    calls += [self._call(call, len(calls) + place) for place, call in enumerate(written)]
                except CallError as problem:
                    error = str(problem)
                    quoted = [value.span() for value in _QUOTED[self.name == "pythonic"].finditer(text, start)]
                    at += bare
                    continue
                if written:
                    spans.append((start, end))
                at = max(end, at + bare)
        if error or not calls:
            return text, (), error
        return _without_spans(text, spans), tuple(calls), ""

    def beginning(self, text: str, thinking: bool = False) -> str:
        """Return the part of an unfinished turn before the first text that is, or may become, a call.

        The text that `parse` returns for the finished turn begins with this part. `thinking`: as in `parse`.
        """
        marks = (found.start() for found in self._pieces.finditer(text) if found[0] not in self.thought)
        before = text[: next(marks, len(text))]
        held = max(
            (end for mark in self.opens for end in range(1, len(mark)) if before.endswith(mark[:end])), default=0
        )
        return before[: len(before) - held].rstrip()

    def words(self, text: str, special: Iterable[str] = (), thinking: bool = False) -> str:
        """Return the words of a text without calls: remove the marks in `special`, which are special tokens."""
        for mark in special:
            text = text.replace(mark, "")
        return text

    def call_id(self, call: ToolCall, number: int) -> str:
        """Return an id that the family's templates accept: the call's own id if it fits, else a new one."""
        if re.fullmatch(self.ids or ".+", call.id, re.DOTALL):
            return call.id
        if self.name == "kimi":
            return f"functions.{call.name}:{number}"
        # Nine letters and digits, as Mistral's templates demand.
        own = blake2b(call.id.encode(errors="surrogatepass"), digest_size=5).hexdigest()[:9]
        return own if call.id else f"call{number:05d}"

    def _call(self, written: WrittenCall, number: int) -> ToolCall:
        """Check a written call; return the call with arguments that can be written as JSON. Raises CallError."""
        name, arguments = written.name, written.arguments
        if not isinstance(name, str) or not name:
            raise CallError("tool call has no name")
        if isinstance(arguments, str):
            arguments = readers.read_all_json(arguments)
        if not isinstance(arguments, dict):
            raise CallError(f"arguments of tool call {name} must be an object")
        level: list[Any] = [arguments]
        for _ in range(readers.MAX_DEPTH):
            held = (
                value.values() if isinstance(value, dict) else value
                for value in level
                if isinstance(value, dict | list)
            )
            level = [one for values in held for one in values]
        if level:
            raise CallError(f"arguments of tool call {name} are nested more than {readers.MAX_DEPTH} deep")
        try:
            json.dumps([name, arguments, written.id], ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError) as error:
            raise CallError(f"arguments of tool call {name} can't be written as JSON text: {error}") from error
        call = ToolCall(name, arguments, written.id if self.ids else "")
        return replace(call, id=self.call_id(call, number))


def _behind(text: str, mark: str, at: int) -> int:
    end = text.find(mark, at)
    return len(text) if end < 0 else end + len(mark)


_VALUES = r'"(?:[^"\\]|\\.)*+"?|<parameter=.*?(?:</parameter>|\Z)|<arg_value>.*?(?:</arg_value>|\Z)'
_QUOTED = [re.compile(one, re.DOTALL) for one in (_VALUES, rf"{_VALUES}|'(?:[^'\\]|\\.)*+'?")]
"""Strings and values of a call, which may hold marks; the second pattern also finds Python's single quotes."""


def _without_spans(text: str, spans: Sequence[tuple[int, int]]) -> str:
    kept = (text[end:start] for (_, end), (start, _) in zip([(0, 0), *spans], [*spans, (len(text), 0)], strict=True))
    return "".join(kept).rstrip()


class HarmonyFormat(CallFormat):
    """The format of gpt-oss: turns consist of messages with headers, and a call is a message to a function."""

    __slots__ = ()
    has_headers = True

    def parse(
        self, text: str, tools: Sequence[Tool] = (), thinking: bool = False
    ) -> tuple[str, tuple[ToolCall, ...], str]:
        parameters: Parameters = {tool.name: {} for tool in tools}
        calls: list[ToolCall] = []
        spans: list[tuple[int, int]] = []
        at = harmony.body_end(text, 0)[1] if thinking else 0
        try:
            while (header := harmony.next_header(text, at)) is not None:
                if header.is_cut:
                    raise CallError(f"a message was cut off: {harmony.MESSAGE} is missing")
                if not header.is_call:
                    _, at = harmony.body_end(text, header.body)
                    continue
                (written,), at = self.read(text, header.start, header.body, parameters)
                calls.append(self._call(written, len(calls)))
                spans.append((header.start, at))
        except CallError as problem:
            return text, (), str(problem)
        return (_without_spans(text, spans) if calls else text), tuple(calls), ""

    def beginning(self, text: str, thinking: bool = False) -> str:
        return harmony.beginning(text, thinking)

    def words(self, text: str, special: Iterable[str] = (), thinking: bool = False) -> str:
        return harmony.words(text, thinking)


FORMATS: Mapping[str, CallFormat] = {
    each.name: each
    for each in (
        CallFormat(
            "qwen3-coder", (("<function=", "<parameter="),), ("<tool_call>", "<function="), readers.qwen3_coder,
            ("</tool_call>",),
        ),
        CallFormat(
            "glm", (("<arg_key>", "<arg_value>"),), ("<tool_call>",), readers.glm,
            ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        CallFormat(
            "kimi", ((readers.KIMI,),), (readers.KIMI,), readers.kimi,
            (readers.KIMI_END, readers.KIMI_CALL, readers.KIMI_ARGUMENTS, readers.KIMI_CALL_END),
            ids=r"functions\..+:\d+",
        ),
        CallFormat(
            "deepseek", ((readers.SECTION,),), (readers.SECTION,), readers.deepseek,
            (readers.SECTION_END, readers.CALL, readers.CALL_SEP, readers.CALL_END),
        ),
        CallFormat(
            "mistral", (("[TOOL_CALLS]",),), ("[TOOL_CALLS]",), readers.mistral, ("[ARGS]", "[CALL_ID]"),
            thought=("[THINK]", "[/THINK]"), ids="[A-Za-z0-9]{9}",
        ),
        CallFormat(
            "phi", (("functools",), ("<|/tool|>",)), ("functools[", "<|tool_call|>"), readers.phi, ("<|/tool_call|>",)
        ),
        CallFormat(
            "pythonic", (("func_name1(",),), ("<|python_start|>",), readers.pythonic, ("<|python_end|>",), bare="["
        ),
        HarmonyFormat(
            "harmony", ((harmony.CHANNEL, harmony.MESSAGE, harmony.CALL),),
            (harmony.CHANNEL, harmony.START, harmony.MESSAGE), harmony.read_call, (harmony.CONSTRAIN, *harmony.ENDS),
            thought=(f"{harmony.CHANNEL}{harmony.THOUGHT}{harmony.MESSAGE}", harmony.END), ends=harmony.ENDS,
        ),
        CallFormat("hermes", (("<tool_call>",),), ("<tool_call>",), readers.hermes, ("</tool_call>",)),
        CallFormat(
            "llama", (("<|python_tag|>",), ('{"name": function name, "parameters": ',)), ("<|python_tag|>",), readers.llama,
            bare="{",
        ),
    )
}  # fmt: skip
"""Formats by name. With `auto`, a template gets the first format whose texts it contains, so the order matters."""


def call_format(name: str, template: str) -> CallFormat | None:
    """Return the format that `[model] tool_calls` names; for `auto`, the template's format, or None if unknown."""
    if name != "auto":
        if name not in FORMATS:
            raise ConfigError(FIELD, repr(name), f"write auto, {', '.join(sorted(FORMATS))}")
        return FORMATS[name]
    return next(
        (each for each in FORMATS.values() if any(all(map(template.__contains__, one)) for one in each.shown)), None
    )
