# SPDX-License-Identifier: Apache-2.0
"""The words of messages in a rendered text: find the messages that the text lacks."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain

from relax_core.api.task import Message

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
        for words in texts_of(message):
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
    yield html.escape(words, quote=False).replace('"', "&#34;").replace("'", "&#39;")  # as Jinja does


def texts_of(message: Message) -> tuple[str, ...]:
    """Return the content of a message as it is, or the text of each of its parts."""
    return (message.content,) if isinstance(message.content, str) else tuple(part.text for part in message.content)
