# SPDX-License-Identifier: Apache-2.0
"""The words of messages in a rendered text: find the messages that the text lacks.

`missing_words` searches the words themselves. `marked` and `lost_marks` search a mark in place of each text, which also
finds a lost message whose words are in the text by chance, such as a short answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import chain
from typing import Any

from markupsafe import escape

from relax_core.api.task import Message

MARK = "RELAXTURN"
MARKS = rf"{MARK.casefold()}\d+(?:[pc]\d+)?x"
"""Pattern of a mark of `marked` in small letters."""
AS_TEXT = r"""(?<!'text': ')(?<!"text": ")(?<!"text":")"""
"""Pattern of a place that is not inside a list of parts which a template writes as data."""
BEGIN, NAME, END = r"([<\[\u25c1]\|?)", r"((?i:(?:seed:)?think(?:ing)?|thought|reasoning))", r"(\|?[>\]\u25b7])"
CLOSES = re.compile(rf"{BEGIN}/{NAME}{END}")
"""Pattern of a mark that closes a thought anywhere in a text."""
THINKS = re.compile(rf"{BEGIN}/?{NAME}{END}")
"""Pattern of a mark of thoughts anywhere in a text."""


def missing_words(messages: Sequence[Message], text: str) -> Iterator[int]:
    """Yield the indices of messages whose words are not in the text, but for thoughts, white space, escapes and capitals.

    Each message is first searched where the last one ended, since a text usually has them in their order.
    """
    shown, at = "".join(text.split()), 0
    for index, message in enumerate(messages):
        for words in _texts(message):
            if message.role == "assistant":  # the template may drop the thought
                words = words[max((mark.end() for mark in CLOSES.finditer(words)), default=0) :]
            for each in chain([words], _escaped(words.strip())):
                wanted = "".join(each.split())
                place = shown.find(wanted, at)
                place = shown.find(wanted) if place < 0 else place
                if place >= 0:
                    at = max(at, place + len(wanted))
                    break
            else:
                if "".join(words.casefold().split()) not in shown.casefold():
                    yield index


def _escaped(words: str) -> Iterator[str]:
    """Yield words as templates escape them: in JSON, as Python's repr, in HTML."""
    yield json.dumps(words)[1:-1]
    yield json.dumps(words, ensure_ascii=False)[1:-1]
    yield repr(words)[1:-1]
    yield str(escape(words))


def form_of(message: Message) -> Hashable:
    """Return the facts about a message, besides its words, on which it may depend whether a template shows the words."""
    content = "" if isinstance(message.content, str) else "parts"
    shows = tuple(bool(text.strip()) for text in _texts(message))
    return message.role, content, shows, bool(message.name), len(message.tool_calls), tuple(message.extra)


def marked(message: Message, index: int) -> Message:
    """Return a message with a mark of its own in place of each of its texts and of the arguments of each call."""
    mark = f"{MARK}{index}"
    if isinstance(message.content, str):
        content: Any = f"{mark}X" if message.content.strip() else message.content
    else:
        parts = enumerate(message.content)
        content = tuple(replace(part, text=f"{mark}P{at}X") if part.text.strip() else part for at, part in parts)
    calls = [replace(call, arguments={f"{mark}C{at}X": at}) for at, call in enumerate(message.tool_calls)]
    return replace(message, content=content, tool_calls=tuple(calls))


def lost_marks(tried: Sequence[Message], text: str, in_parts: Set[str]) -> list[int]:
    """Return the indices of marked messages that the text lacks.

    `in_parts`: roles whose content the template got as a list of parts, and may have written as data.
    """
    text, found = text.casefold(), []
    shown, shown_as_text = {*re.findall(MARKS, text)}, {*re.findall(AS_TEXT + MARKS, text)}
    for index, message in enumerate(tried):
        marks = {mark.casefold() for mark in _texts(message) if mark.strip()}
        marks |= {mark.casefold() for call in message.tool_calls for mark in call.arguments}
        if not marks <= (shown_as_text if message.role in in_parts else shown):
            found.append(index)
    return found


def _texts(message: Message) -> tuple[str, ...]:
    return (message.content,) if isinstance(message.content, str) else tuple(part.text for part in message.content)
