# SPDX-License-Identifier: Apache-2.0
"""The final answer of a response in free text, read whole.

The answer is the last box; else the whole response, if it is a value; else the text after the last "answer is"; else
the last formula or number. Values joined by commas, "and" or "or" are one list, so a hedge is not an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from relax_plugin_rewards.answers import boxes
from relax_plugin_rewards.units import unit_name
from relax_plugin_rewards.values import Unread, Value, read

_ANSWER = re.compile(r"(?i)\b(?:final\s+)?(?:answer|result)\**+\s*+(?:\bis\b|:|=)\s*+\**+\s*+:?\s*+([^\n]++)")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\$])\$([^$\n]+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_BETWEEN = re.compile(r"[\s,;$]*+(?:and|or)?[\s,;$]*+")
_JOINING = re.compile(r"(?:[-+*/=<>^,;(\[]|\\[a-z]+|\band|\bor|^and|^or|^[<>=]+)$", re.IGNORECASE)
_MOST_WORDS, _MOST_TRIED = 16, 8
_MOST_SEARCHED = 2000
"""Characters at the end of a response that are searched for a formula or number."""


def final_answer(response: str, *, words: bool, boxed_only: bool = False) -> Value | None:
    """Return the final answer of a response; None if the response states none that can be read whole.

    `words`: the gold answer has words, so the answer may have words; else words are the text around the answer.
    """
    found = boxes(response)
    if found:
        start = len(found) - 1
        while start and _BETWEEN.fullmatch(response[found[start - 1][1] : found[start][0]]):
            start -= 1
        contents = [content for _, _, content in found[start:]]
        return _value(", ".join(dict.fromkeys(contents)))
    if boxed_only:
        return None
    for candidate in _candidates(response):
        value = _value(candidate)
        if value is not None and (words or not value.has_words):
            return value
    return None


def _candidates(response: str) -> Iterator[str]:
    """Yield the texts that may be the final answer, the most certain first."""
    yield response
    if stated := list(_ANSWER.finditer(response)):
        yield from _starts(stated[-1][1])
    tail = response[-_MOST_SEARCHED:]
    formulas = list(_FORMULA.finditer(tail))
    after = tail[formulas[-1].end() :] if formulas else tail
    if not re.search(r"\d", after) and formulas:
        yield _joined(tail, formulas)
        return
    yield from _last_number(after)


def _starts(text: str) -> Iterator[str]:
    """Yield the beginnings of a stated answer: the sentence, then fewer and fewer of its words."""
    formula = _FORMULA.match(text)
    if formula:
        yield formula[0]
    words = re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0].split()
    for count in range(min(len(words), _MOST_WORDS), 0, -1):
        said = " ".join(words[:count]).rstrip(".,;:!*")
        if count == len(words) or not (_JOINING.search(words[count - 1]) or _JOINING.match(words[count])):
            yield said


def _joined(text: str, formulas: list[re.Match[str]]) -> str:
    """Return the last formula, with the formulas before it that are joined to it by commas, "and" or "or"."""
    start = len(formulas) - 1
    while start and _BETWEEN.fullmatch(text[formulas[start - 1].end() : formulas[start].start()]):
        if not re.search(r"[,;]|and|or", text[formulas[start - 1].end() : formulas[start].start()]):
            break
        start -= 1
    return ", ".join(next(group for group in one.groups() if group) for one in formulas[start:])


def _last_number(text: str) -> Iterator[str]:
    """Yield the run of words around the last digit, the longest readable run first."""
    words = text.split()
    last = next((at for at in reversed(range(len(words))) if re.search(r"\d", words[at])), None)
    if last is None:
        return
    runs = []
    for start in range(last, max(last - _MOST_WORDS, -1), -1):
        run = " ".join(words[start : last + 1]).strip("*_`").rstrip(".,;:!?*").replace("**", "")
        if start < last and not _is_joined(words, start):
            break
        runs.append(run)
    following = words[last + 1].rstrip(".,;:!?*") if last + 1 < len(words) else ""
    with_unit = [f"{words[last]} {following}"] if unit_name(following, alone=True) else []
    yield from reversed([*runs[:1], *with_unit, *runs[1:]])


def _is_joined(words: list[str], start: int) -> bool:
    """Return True if the word at `start` belongs to the formula or list that follows it."""
    run = " ".join(words[start + 1 :])
    opened = sum(map(run.count, "([{")) < sum(map(run.count, ")]}"))
    own, following = words[start], words[start + 1]
    if opened:
        return True
    signs = r"[-+*/=<>^]+|\\[a-z]+|and|or"
    if re.fullmatch(signs, own):
        return start > 0
    if re.fullmatch(signs, following):
        return bool(re.search(r"[\d)\]}]|^[A-Za-z]$", own))
    return bool(re.search(r"[\d)\]}][,;]$", own)) or bool(
        re.fullmatch(r"\d+", own) and re.match(r"\d+/\d+|\\frac", following)
    )


def _value(text: str) -> Value | None:
    try:
        return read(text.strip())
    except Unread:
        return None
