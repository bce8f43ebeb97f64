# SPDX-License-Identifier: Apache-2.0
"""Extraction of the two texts that a reward compares: a task's gold answers and the answer in a response.

This module does not compare answers; each reward has its own comparison.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

from relax_core.api import Task

Think: TypeAlias = Literal["optional", "required", "ignored"]
"""The judged part of a response. `optional`: the text after the last `</think>`, or the whole response if it has no
`</think>`; `required`: the same, but a response without `</think>` has no answer; `ignored`: the whole response."""

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_EXACT_FLOATS = 2.0**53
"""Whole numbers below this are exact as floats."""


def gold_values(task: Task) -> tuple[str | int | float, ...]:
    """Return the task's gold answers unchanged: the items of `answer` if it is a list, else `answer` itself.

    Raises ValueError if the answer is missing or the list empty, if an answer is None, NaN, infinite or blank, or if an
    answer is a list or a table.
    """
    golds = tuple(task.answer) if isinstance(task.answer, (list, tuple)) else (task.answer,)
    if not golds or any(is_missing(gold) for gold in golds):
        raise ValueError(f"task {task.id} has no answer; give every row of the task file an `answer` column")
    for gold in golds:
        if not isinstance(gold, str | int | float):
            kind = (
                "a list"
                if isinstance(gold, list | tuple)
                else "a table"
                if isinstance(gold, Mapping)
                else type(gold).__name__
            )
            raise ValueError(
                f"task {task.id}: answer {gold!r} is {kind}; write text or a number in the column `answer`"
            )
        if isinstance(gold, float) and not math.isfinite(gold):
            raise ValueError(f"task {task.id}: answer {gold!r} is not finite; write it as text, such as `\\infty`")
    return golds


def is_missing(gold: object) -> bool:
    """Return True for None, NaN and blank text."""
    return gold is None or gold != gold or (isinstance(gold, str) and not gold.strip())


def gold_texts(task: Task) -> tuple[str, ...]:
    """Return the task's gold answers as stripped strings; 42.0 is `42`. Raises ValueError as `gold_values` does."""
    return tuple(gold_text(task, gold) for gold in gold_values(task))


def gold_text(task: Task, gold: str | int | float) -> str:
    """Return a gold answer as text. Raises ValueError for true and false, which responses write in many ways."""
    if isinstance(gold, bool):
        fix = "write the text that a response should have, such as `yes` or `True`"
        raise ValueError(f"task {task.id}: answer {gold} is a truth value; {fix}")
    if isinstance(gold, float) and gold.is_integer() and abs(gold) < _EXACT_FLOATS:
        return str(int(gold))
    return str(gold).strip()


def single_gold(task: Task) -> str:
    """Return the only gold answer of a task as text. Raises ValueError for a list, as `gold_values` does for a table."""
    if isinstance(task.answer, list | tuple):
        fix = "this reward takes one answer; write text or a number, such as `(1, 2)` for a pair"
        raise ValueError(f"task {task.id}: answer {task.answer!r} is a list; {fix}")
    return gold_texts(task)[0]


def unboxed(text: str) -> str:
    r"""Return the content of a text that consists of one box, with nested boxes unwrapped; any other text unchanged."""
    closed, unclosed = all_boxes(text)
    if unclosed is not None:
        return text.strip() if text[:unclosed].strip(" $.\n") else ""
    begin, end = 0, len(text)
    for start, inside, stop in reversed(closed):
        if (text[begin:start] + text[stop:end]).strip(" $.\n"):
            break
        begin, end = inside, stop - 1
    return text[begin:end].strip()


def after_thinking(response: str, think: Think) -> str:
    """Return the judged part of a response; empty if `<think>` is never closed, unless `think` is `ignored`."""
    if think == "ignored":
        return response
    _, ended, said = response.rpartition("</think>")
    if "<think>" in said or (think == "required" and not ended):
        return ""
    return said


def all_boxes(text: str) -> tuple[list[tuple[int, int, int]], int | None]:
    r"""Return start, start of the content and end of each closed `\boxed{...}` and `\fbox{...}`, an inner box first.

    The second result is the start of the first box that is never closed, or None. A single pass with a stack keeps the
    time linear, even for a response of opening braces alone.
    """
    closed: list[tuple[int, int, int]] = []
    opened: list[tuple[int, int, bool]] = []
    for sign in _BRACES.finditer(text):
        if sign[0][-1] == "{" and sign[0] != "\\{":
            opened.append((sign.start(), sign.end(), sign[0] != "{"))
        elif sign[0] == "}" and opened:
            start, inside, is_box = opened.pop()
            if is_box:
                closed.append((start, inside, sign.end()))
    return closed, next((start for start, _, is_box in opened if is_box), None)


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""Return start, end and content of each outermost `\boxed{...}` and `\fbox{...}`, in order.

    If a box is never closed, the response stopped in the middle of its answer: the box becomes the last entry, with
    empty content.
    """
    closed, unclosed = all_boxes(text)
    outer: list[tuple[int, int, int]] = []
    for box in closed:
        while outer and outer[-1][0] > box[0]:
            outer.pop()
        outer.append(box)
    found = [
        (start, end, text[inside : end - 1]) for start, inside, end in outer if unclosed is None or start < unclosed
    ]
    return found if unclosed is None else [*found, (unclosed, len(text), "")]


def last_box(text: str) -> str:
    """Return the content of the last box, with nested boxes unwrapped; empty if there is no box or it is not closed."""
    found = boxes(text)
    return unboxed(found[-1][2]) if found else ""


def last_tagged(text: str, tag: str) -> str:
    """Return the content of the last `<tag>...</tag>`; empty without such a tag."""
    before, closed, _ = text.rpartition(f"</{tag}>")
    _, opened, content = before.rpartition(f"<{tag}>")
    return content.strip() if closed and opened else ""


def untagged(text: str, tag: str) -> str:
    """Return the content of a text that consists of `<tag>...</tag>`; any other text unchanged."""
    inside = text.strip().removeprefix(f"<{tag}>").removesuffix(f"</{tag}>")
    is_tagged = text.strip() == f"<{tag}>{inside}</{tag}>" and f"<{tag}>" not in inside
    return inside.strip() if is_tagged else text
