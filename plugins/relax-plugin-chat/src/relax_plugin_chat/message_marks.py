# SPDX-License-Identifier: Apache-2.0
"""Marks in place of the texts of messages: find the messages that a template leaves out.

A mark also finds a lost message whose words are in the rendered text by chance, such as a short answer.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence, Set
from dataclasses import replace
from typing import Any

from relax_core.api.message_words import texts_of
from relax_core.api.task import Message

MARK = "RELAXTURN"
MARKS = rf"{MARK.casefold()}\d+(?:[pc]\d+)?x"
"""Pattern of a mark of `marked` in small letters."""
AS_TEXT = r"""(?<!'text': ')(?<!"text": ")(?<!"text":")"""
"""Pattern of a place that is not inside a list of parts which a template writes as data."""


def form_of(message: Message) -> Hashable:
    """Return the facts about a message, besides its words, on which it may depend whether a template shows the words."""
    content = "" if isinstance(message.content, str) else "parts"
    shows = tuple(bool(text.strip()) for text in texts_of(message))
    return message.role, content, shows, bool(message.name), len(message.tool_calls), tuple(message.extra)


def marked(message: Message, index: int) -> Message:
    """Return a message in which a unique mark replaces each text, and the arguments of each call."""
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
        marks = {mark.casefold() for mark in texts_of(message) if mark.strip()}
        marks |= {mark.casefold() for call in message.tool_calls for mark in call.arguments}
        if not marks <= (shown_as_text if message.role in in_parts else shown):
            found.append(index)
    return found
