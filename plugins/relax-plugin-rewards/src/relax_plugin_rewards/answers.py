# SPDX-License-Identifier: Apache-2.0
"""The two sides that a reward compares: a task's gold answers, and the place where a response states its own.

Nothing here decides what is equal; that is each reward's own matter.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeAlias

from relax_core.api import Task

Think: TypeAlias = Literal["optional", "required", "ignored"]
"""`optional`: what follows the last `</think>` counts, and everything where nothing was thought; `required`: a response
without `</think>` states nothing; `ignored`: everything counts."""

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_WHOLE_BOX = re.compile(r"\s*\\(?:boxed|fbox)\s*\{(.*)\}\s*", re.DOTALL)


def gold_values(task: Task) -> tuple[Any, ...]:
    """Return the task's gold answers as they are: its `answer`, or each one where that is a list."""
    golds = tuple(task.answer) if isinstance(task.answer, (list, tuple)) else (task.answer,)
    if not golds or any(gold is None or gold != gold or not str(gold).strip() for gold in golds):
        raise ValueError(f"task {task.id} has no answer; give every row of the task file an `answer` column")
    return golds


def gold_texts(task: Task) -> tuple[str, ...]:
    """Return the task's gold answers as texts, without white space around them."""
    return tuple(str(gold).strip() for gold in gold_values(task))


def after_thinking(response: str, think: Think) -> str:
    """Return the part of a response in which its answer counts; a thought that never ends is followed by none."""
    if think == "ignored":
        return response
    _, ended, said = response.rpartition("</think>")
    if "<think>" in said or (think == "required" and not ended):
        return ""
    return said


def boxes(text: str) -> list[tuple[int, int, str]]:
    """Find each outermost `\\boxed{...}` and `\\fbox{...}`, in order: where it begins and ends, and its content.

    One pass with a stack, so that a response of nothing but opening braces costs no more than prose. A box that never
    closes ends the list with a content that is empty: the response stopped in the middle of its answer.
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
    """Return what stands in the last box, without boxes around it; empty where there is none, or an unfinished one."""
    found = boxes(text)
    content = found[-1][2] if found else ""
    while whole := _WHOLE_BOX.fullmatch(content):
        content = whole[1]
    return content.strip()


def last_tagged(text: str, tag: str) -> str:
    """Return what stands in the last `<tag>...</tag>`, empty where there is none."""
    before, closed, _ = text.rpartition(f"</{tag}>")
    _, opened, content = before.rpartition(f"<{tag}>")
    return content.strip() if closed and opened else ""
