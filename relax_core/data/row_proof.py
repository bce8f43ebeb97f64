# SPDX-License-Identifier: Apache-2.0
"""The proof of a row: its tokens have all words of its messages, and read as the tokens of its whole text.

`relax data check`, `relax try` and step 1 prove the rows that they show. A fault is a mistake of the chat template, of
the tokenizer, or of the code that joins turns.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import compress
from typing import TypeVar

from relax_core.api.environment import Tool
from relax_core.api.errors import ConfigError
from relax_core.api.family import ModelFamily
from relax_core.api.message_words import missing_words
from relax_core.api.task import Message
from relax_core.data.repeated_prompt import Text

SPEAKER = "assistant"
SHOWN_TEXT = 60
"""Most characters of a text that a fault quotes."""
T = TypeVar("T", str, Message)


def prompt_faults(family: ModelFamily, prompt: Text, tools: Sequence[Tool], tokens: Sequence[int]) -> Iterator[str]:
    """Yield the first difference between the text that the template wrote and the text of a prompt's tokens.

    The first token may only mark the beginning of a sequence, so the text is also read without this token. The family
    checks that its text has all messages.
    """
    read = [_squeezed(_read(family, each)) for each in (tokens, tokens[1:])]
    written = _squeezed(_normal(family.text(prompt, tools)))
    if written not in read:
        nearest = max(read, key=lambda text: shared(written, text))
        yield _difference("the template wrote", written, "its tokens read", nearest)


def example_faults(
    family: ModelFamily, prompt: Text, completion: Text | None, tools: Sequence[Tool], tokens: Sequence[int],
    mask: Sequence[int],
) -> Iterator[str]:  # fmt: skip
    """Yield messages whose words the tokens lack, and the first space by which the tokens differ from the whole text.

    Arguments as in `data.dataset.example`; `tokens` and `mask` of the example, not cut. A template that changes earlier
    turns writes another whole text; then only the words are compared.
    """
    whole: Text
    if isinstance(prompt, str):
        whole = prompt + str(completion or "")
        said: tuple[Message, ...] = (Message("user", prompt), Message(SPEAKER, str(completion or "")))
        given = 1
    else:
        added = (Message(SPEAKER, completion),) if isinstance(completion, str) else completion or ()
        said, given = (*prompt, *added), 0 if completion is None else len(prompt)
        while said and said[-1].role != SPEAKER:  # messages after the last turn are not rendered
            said = said[:-1]
        whole = said
    read, said = _read(family, tokens), tuple(map(_normal, said))
    for index in missing_words([replace(each, content="") if each.tool_calls else each for each in said], read):
        yield f"the tokens leave out words of the {said[index].role} message {said[index].text[:SHOWN_TEXT]!r}"
    trained = _read(family, [*tokens[:1], *compress(tokens[1:], mask[1:])])  # no token precedes the first
    answers = [each for each in said[given:] if each.role == SPEAKER]
    for index in missing_words(answers, trained):
        yield f"the trained tokens read {trained[:SHOWN_TEXT]!r}, without words of {answers[index].text[:SHOWN_TEXT]!r}"
    try:
        wanted = _read(family, family.start(whole, tools).tokens)
    except ConfigError:  # the template refuses to open another turn here, which no run asks for
        return
    read = read.removesuffix(_read(family, family.stop_tokens[:1]))
    if _squeezed(wanted).startswith(_squeezed(read)) and not wanted.startswith(read):
        yield _difference("the tokens of the whole text read", wanted, "those of its parts", read)


def shared(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common beginning."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _difference(begins: str, wanted: str, continues: str, got: str) -> str:
    start = max(0, shared(wanted, got) - SHOWN_TEXT // 4)
    return f"{begins} {wanted[start : start + SHOWN_TEXT]!r}, and {continues} {got[start : start + SHOWN_TEXT]!r}"


def _read(family: ModelFamily, tokens: Sequence[int]) -> str:
    return _normal(family.decode(tokens, skip_special=False))


def _normal(said: T) -> T:
    """Return a text, or a message with its texts, in the one form of Unicode that some tokenizers write."""
    if isinstance(said, str):
        return unicodedata.normalize("NFKC", said)
    if isinstance(said.content, str):
        return replace(said, content=_normal(said.content))
    return replace(said, content=tuple(replace(part, text=_normal(part.text)) for part in said.content))


def _squeezed(text: str) -> str:
    """Return a text without white space, which templates and tokenizers may change."""
    return "".join(text.split())
