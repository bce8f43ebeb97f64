# SPDX-License-Identifier: Apache-2.0
"""Turns in harmony, the format of gpt-oss: messages with headers that name a channel and, for calls, a recipient.

A turn continues `<|start|>assistant`, so its first header may begin with ` to=functions.NAME` or with `<|channel|>`:

    <|channel|>analysis<|message|>a thought<|end|><|start|>assistant<|channel|>commentary<|message|>a preamble<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

Every function reads its text once, from left to right. Text outside of messages counts as words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from relax_plugin_chat.tool_call_readers import CallError, Parameters, WrittenCall, passed, read_json, skip_space

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
CALL, END, RETURN = ENDS = "<|call|>", "<|end|>", "<|return|>"
MARKS = (CHANNEL, START, MESSAGE, CONSTRAIN, *ENDS)
THOUGHT = "analysis"
"""Name of the channel for thoughts."""
THINK, THINK_END = "<think>", "</think>"
"""Marks put around thoughts in a turn's words, because rewards and environments look for these marks."""


def _any(*marks: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))


_MARK, _BEGINS, _HEADER_END, _BODY_END = (
    _any(*MARKS), _any(START, CHANNEL, MESSAGE), _any(MESSAGE, START, *ENDS), _any(START, *ENDS),
)  # fmt: skip
_RECIPIENT, _CHANNEL = re.compile(r"(?:\A|[\s>])to=([^\s<]*)"), re.compile(r"<\|channel\|>\s*([^\s<]*)")
_FIRST, _FIRST_SO_FAR = re.compile(r"\s*(?:to=[^\s<]+\s*)?"), re.compile(r"\s*(?:t|to|to=[^\s<]*\s*)?")
"""Patterns of the text allowed before a turn's first mark, and of an unfinished beginning of such text."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one message, `text[start:body]`; the message's body begins at `body`."""

    start: int
    body: int
    channel: str
    recipient: str
    has_body: bool
    is_cut: bool
    """True if the text ends before the header is complete."""

    @property
    def is_call(self) -> bool:
        return self.recipient not in ("", "assistant", "user")

    @property
    def is_thought(self) -> bool:
        return self.channel == THOUGHT and not self.recipient


def next_header(text: str, at: int) -> Header | None:
    """Return the next message header at or after `at`, or None. `at` must not lie inside a message."""
    begins = _BEGINS.search(text, at)
    if begins is None:
        return None
    start = 0 if at == 0 and _FIRST.fullmatch(text, 0, begins.start()) else begins.start()
    ends = begins if begins[0] == MESSAGE else _HEADER_END.search(text, begins.end())
    has_body = ends is not None and ends[0] == MESSAGE
    body = len(text) if ends is None else ends.end() if has_body else ends.start()
    head = text[start:body]
    recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
    return Header(
        start, body, channel[1] if channel else "", recipient[1] if recipient else "", has_body, ends is None
    )  # fmt: skip


def body_end(text: str, at: int) -> tuple[int, int]:
    """Return the end of the message body that contains `at`, and the position at which to read on.

    A body ends before `<|start|>`, which is left unread, or before an end mark, which is skipped.
    """
    ends = _BODY_END.search(text, at)
    if ends is None:
        return len(text), len(text)
    return ends.start(), ends.start() if ends[0] == START else ends.end()


def read_call(text: str, start: int, at: int, parameters: Parameters) -> tuple[list[WrittenCall], int]:
    """Read a call, `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`.

    `text[start:at]` is the call's header. At a turn's end, the mark after the arguments may be missing.
    Raises CallError.
    """
    recipient = _RECIPIENT.search(text[start:at])
    written = recipient[1] if recipient else ""
    name = written.removeprefix("functions.")
    if not text.startswith(MESSAGE, at - len(MESSAGE)):
        raise CallError(f"the call of {name} must continue with {MESSAGE}")
    if name == written and name not in parameters:
        raise CallError(f"a call must go to=functions.NAME, got to={written[:40]}")
    arguments, at = read_json(text, at)
    at = skip_space(text, at)
    if at < len(text) and not text.startswith(START, at):
        ended = next((mark for mark in ENDS if text.startswith(mark, at)), "")
        at = at + len(ended) if ended else passed(text, at, CALL, END)
    return [WrittenCall(name, arguments)], at


def words(text: str, thinking: bool = False) -> str:
    """Return the words of a turn: bodies without headers and marks, with thoughts between `<think>` and `</think>`.

    `thinking`: True if the prompt has opened a thought. The words of `beginning(text)` are a prefix of a turn's words.
    """
    at, pieces = 0, list[str]()
    if thinking:
        end, at = body_end(text, 0)
        pieces += [text[:end], THINK_END if end < len(text) else ""]
    spoken = False
    while (header := next_header(text, at)) is not None:
        if between := _words_outside(text[at : header.start]):
            pieces.append(between)
            spoken = True
        end, at = body_end(text, header.body)
        said = text[header.body : end] if header.has_body else ""
        if header.has_body and header.is_thought:
            pieces += [THINK, said, THINK_END if end < len(text) else ""]
            spoken = False
        elif said:
            pieces += ["\n" if spoken else "", said]
            spoken = True
    pieces.append(_words_outside(text[at:]))
    return "".join(_MARK.sub("", piece) for piece in pieces)


def _words_outside(text: str) -> str:
    return "" if not _MARK.sub("", text).strip() else text


def beginning(text: str, thinking: bool = False) -> str:
    """Return the part of an unfinished turn before the first text that is, or may become, a call or a header."""
    text = _without_half_mark(text)
    if not thinking and _FIRST_SO_FAR.fullmatch(text):
        return ""
    at, sure = body_end(text, 0)[1] if thinking else 0, len(text)
    while (header := next_header(text, at)) is not None:
        if header.is_call or header.is_cut:
            sure = header.start
            break
        _, at = body_end(text, header.body)
    return _without_half_mark(text[:sure]).rstrip()


def _without_half_mark(text: str) -> str:
    held = max((end for mark in MARKS for end in range(1, len(mark)) if text.endswith(mark[:end])), default=0)
    return text[: len(text) - held]
