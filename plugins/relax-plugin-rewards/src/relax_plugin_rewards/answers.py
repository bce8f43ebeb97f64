# SPDX-License-Identifier: Apache-2.0
"""Extraction of the two texts that a reward compares: a task's gold answers and the answer in a response.

This module does not compare answers; each reward has its own comparison.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeAlias

from relax_core.api import Task

Think: TypeAlias = Literal["optional", "required", "ignored"]
"""The judged part of a response. `optional`: the text after the last `</think>`, or the whole response if it has no
`</think>`; `required`: the same, but a response without `</think>` has no answer; `ignored`: the whole response."""

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_WHOLE_BOX = re.compile(r"\s*\\(?:boxed|fbox)\s*\{(.*)\}\s*", re.DOTALL)


def gold_values(task: Task) -> tuple[Any, ...]:
    """Return the task's gold answers unchanged: the items of `answer` if it is a list, else `answer` itself.

    Raises ValueError if the answer is missing or the list empty, or if an answer is None, NaN or blank.
    """
    golds = tuple(task.answer) if isinstance(task.answer, (list, tuple)) else (task.answer,)
    if not golds or any(gold is None or gold != gold or not str(gold).strip() for gold in golds):
        raise ValueError(f"task {task.id} has no answer; give every row of the task file an `answer` column")
    return golds


def gold_texts(task: Task) -> tuple[str, ...]:
    """Return the task's gold answers as stripped strings."""
    return tuple(str(gold).strip() for gold in gold_values(task))


def after_thinking(response: str, think: Think) -> str:
    """Return the judged part of a response; empty if `<think>` is never closed, unless `think` is `ignored`."""
    if think == "ignored":
        return response
    _, ended, said = response.rpartition("</think>")
    if "<think>" in said or (think == "required" and not ended):
        return ""
    return said


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""Return start, end and content of each outermost `\boxed{...}` and `\fbox{...}`, in order.

    A single pass with a stack keeps the time linear, even for a response of opening braces alone. If a box is never
    closed, the response stopped in the middle of its answer: the box becomes the last entry, with empty content.
    """
    found: list[tuple[int, int, str]] = []
    opened: list[tuple[int, int, bool]] = []
    for sign in _BRACES.finditer(text):
        if sign[0][-1] == "{" and sign[0] != "\\{":
            opened.append((sign.start(), sign.end(), sign[0] != "{"))
        elif sign[0] == "}" and opened:
            start, inside, is_box = opened.pop()
            if is_box:
                while found and found[-1][0] > start:
                    found.pop()
                found.append((start, sign.end(), text[inside : sign.start()]))
    unclosed = next((start for start, _, is_box in opened if is_box), None)
    if unclosed is not None:
        found = [box for box in found if box[0] < unclosed]
        found.append((unclosed, len(text), ""))
    return found


def last_box(text: str) -> str:
    """Return the content of the last box, with nested boxes unwrapped; empty if there is no box or it is not closed."""
    found = boxes(text)
    content = found[-1][2] if found else ""
    while whole := _WHOLE_BOX.fullmatch(content):
        content = whole[1]
    return content.strip()


def last_tagged(text: str, tag: str) -> str:
    """Return the content of the last `<tag>...</tag>`; empty without such a tag."""
    before, closed, _ = text.rpartition(f"</{tag}>")
    _, opened, content = before.rpartition(f"<{tag}>")
    return content.strip() if closed and opened else ""
