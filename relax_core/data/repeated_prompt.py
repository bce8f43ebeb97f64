# SPDX-License-Identifier: Apache-2.0
"""Completions that repeat their prompt: rows of many data sets have whole conversations beside the prompt.

The prompt must reach the model once, so the common opening stays in the prompt alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

from relax_core.api.task import Message, Part
from relax_core.data.task_row import MediaOrigin, RowError, text_or_messages

Text = str | tuple[Message, ...]


def without_prompt(prompt: Text, completion: Any, column: str) -> tuple[Text, object]:
    """Return a row's prompt, and the value of a column with a completion without the prompt that the value repeats.

    White space around the texts does not count. A prompt of text becomes the messages that repeat the prompt. A prompt
    without a system message gets the system message of the completion. If the prompt ends with the completion, this
    answer is removed from the prompt. Raises RowError for a conversation with another prompt.
    """
    if isinstance(completion, str):
        if isinstance(prompt, str):
            return prompt, _continuation(prompt, completion)
        answered = len(prompt) > 1 and prompt[-1].role == "assistant" and prompt[-1].text.strip() == completion.strip()
        return prompt[:-1] if answered else prompt, completion
    first = completion[0] if isinstance(completion, list) and completion else None
    if not isinstance(first, Mapping) or first.get("role") in ("assistant", "tool"):
        return prompt, completion
    try:
        said = cast(tuple[Message, ...], text_or_messages(completion, column, MediaOrigin(Path())))
    except RowError:  # the reader of the column reports it
        return prompt, completion
    asked = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    system_before, system = _system(asked), _system(said)
    question, size = asked[len(system_before) :], len(system) + len(asked) - len(system_before)
    pairs: list[tuple[Any, Any]] = [
        *zip(system_before, system, strict=False),
        *zip_longest(question, said[len(system) : size]),
    ]
    differing = next(((left, right) for left, right in pairs if not right or _shown(left) != _shown(right)), None)
    if differing is None and size:
        opening = said[:size] if isinstance(prompt, str) else prompt if system_before else (*system, *prompt)
        return opening, completion[size:]
    if differing is not None and (asked[-1].role == "user" or system):
        there, here = (f"{message.role} {message.text[:80]!r}" if message else "nothing" for message in differing)
        also = " with other fields" if there == here else ""
        raise RowError(f"{column!r} begins with another prompt: it has {here}{also} where the prompt has {there}")
    return prompt, completion


def _system(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the system message at the beginning, if any."""
    return messages[:1] if messages and messages[0].role == "system" else ()


def _continuation(prompt: str, completion: str) -> str:
    """Return a text without the prompt at its beginning; unchanged if nothing follows or the prompt ends inside a word."""
    opening, said = prompt.strip(), completion.lstrip()
    rest = said[len(opening) :] if opening and said.startswith(opening) else ""
    if not rest.strip() or (opening[-1].isalnum() and rest[0].isalnum()):
        return completion
    return rest.lstrip() if prompt[-1].isspace() else rest


def _shown(message: Message) -> tuple[object, ...]:
    """Return what a template shows of a message: first the role, then the text with a mark for each medium."""
    content = message.content if isinstance(message.content, tuple) else (Part(message.content),)
    text = "".join(part.text if part.media is None else f"<{part.media.kind}>" for part in content)
    return message.role, text.strip(), message.tool_calls, message.name, dict(message.extra)
