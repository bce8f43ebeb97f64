# SPDX-License-Identifier: Apache-2.0
"""Mathematical expressions: cached parsing of gold answers, and comparison by math-verify.

math-verify's timeouts are disabled, because their signals work only in the main thread. Instead, the process that runs
the rewards can be killed. Answers that would take math-verify minutes are compared as text only.
"""

from __future__ import annotations

import logging
import math
import re
from functools import lru_cache
from typing import Any, Literal, TypeAlias

AnswerFormat: TypeAlias = Literal["auto", "latex", "plain"]

_SCIENTIFIC = re.compile(r"([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d+)")
_WORD = re.compile(r"[A-Za-z]{3,}(?![A-Za-z(])")
"""A word of prose, not a function call. A LaTeX parser would read the word as a product of its letters."""
_EXPLOSIVE = re.compile(
    r"\d[)}]*(?:\^|\*\*)[({]*-?\d+[)}]*(?:\^|\*\*)"  # a tower of numbers, 9^{9^9}
    r"|(?:\^|\*\*)[({]*-?\d{7}"  # an exponent in the millions
    r"|(?<![\\A-Za-z])[A-Za-z][^()]*\)(?:\^|\*\*)[({]*\d{3}"  # (x-1)^{1000}, which would be expanded
    r"|\d{5}!|!!|\([^()A-Za-z]*\)!"  # the factorial of a large number
    r"|\\(?:sum|prod|int|iint|lim)(?![A-Za-z])"  # a sum, product, integral or limit that would be evaluated
)
_PERCENT = re.compile(r"(?<=\d)\s*\\?%\s*$")
_LONGEST, _DEEPEST = 1000, 100
_LAYOUT = re.compile(r"\\(?:left|right|displaystyle|[!,;: ])|[\s$]|(?<=\d)\{,\}(?=\d)")
_WORDING = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")


def quiet() -> None:
    """Silence math-verify's warning about disabled timeouts."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def parse_gold(task_id: str, answer: str, answer_format: AnswerFormat = "auto") -> tuple[Any, ...]:
    """Return a gold answer as expressions. Raises ValueError naming the task if it is not a mathematical expression."""
    parsed = gold_expressions(answer, answer_format)
    if not parsed:
        raise ValueError(
            f"task {task_id}: answer {answer!r} is not a mathematical expression; correct the answer column"
        )
    return parsed


@lru_cache(maxsize=4096)
def gold_expressions(answer: str, answer_format: AnswerFormat = "auto") -> tuple[Any, ...]:
    """Return a gold answer as expressions; empty if the answer is words. All samples of a task share the result."""
    parsed: list[Any] = []
    if answer_format != "latex" and not _has_latex(answer):
        scientific = _SCIENTIFIC.fullmatch(answer)
        plain = f"{scientific[1]}*10**({scientific[2]})" if scientific else answer
        parsed = parse(plain, plain=True, latex=False)
    if not parsed and (
        answer_format == "latex" or (answer_format == "auto" and (_has_latex(answer) or not _WORD.search(answer)))
    ):
        delimited = "$" in answer or "\\boxed" in answer or "\\(" in answer
        parsed = parse(answer if delimited else f"${answer}$", plain=False, latex=True)
    return () if all(isinstance(one, str) for one in parsed) else tuple(parsed)


def parse(text: str, *, plain: bool, latex: bool) -> list[Any]:
    """Return the last expression in a text, followed by its source text; empty if the text has no expression.

    `plain`: accept plain expressions. `latex`: accept LaTeX.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    configs = [LatexExtractionConfig(boxed_match_priority=0)] if latex else []
    return list(parse(text, [*configs, *([ExprExtractionConfig()] if plain else [])], parsing_timeout=None))


def are_equal(gold: tuple[Any, ...], said: list[Any], precision: int = 6) -> bool:
    """Return True if the parsed answer equals the parsed gold answer.

    The arguments can't be swapped: an answer may write a gold inequality as an interval, but not the reverse.
    """
    from math_verify import verify

    return bool(gold and said) and bool(verify(list(gold), said, float_rounding=precision, timeout_seconds=None))


def states(answer: str, gold: str, precision: int = 6) -> bool:
    """Return True if an extracted answer, such as a box's content, equals a gold answer, a formula or words."""
    if not answer:
        return False
    if (bare := _PERCENT.sub("", answer)) != answer:  # 50% equals the gold answers 50%, 50 and 1/2
        part = f"\\frac{{{bare}}}{{100}}"
        return states(bare, _PERCENT.sub("", gold), precision) or ("%" not in gold and states(part, gold, precision))
    gold = gold.replace("\\%", "%")
    expressions = gold_expressions(gold)
    if plain_text(answer, words=not expressions) == plain_text(gold, words=not expressions):
        return True
    if not expressions or takes_long(answer):
        return False
    return are_equal(expressions, parse_answer(answer), precision)


def parse_answer(answer: str) -> list[Any]:
    """Parse an extracted answer as one LaTeX expression."""
    inside = answer.replace("$", "").removesuffix(".")
    return parse(f"\\boxed{{{inside}}}", plain=False, latex=True)


def plain_text(answer: str, *, words: bool) -> str:
    """Return an answer without markup that only changes its appearance. `words`: also ignore upper and lower case."""
    text = _LAYOUT.sub("", _WORDING.sub(r"\1", answer)).removesuffix(".")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return text.casefold() if words else text


def takes_long(answer: str) -> bool:
    """Return True if evaluating the answer could take minutes, as for `9^{9^9}`."""
    if len(answer) > _LONGEST or sum(map(answer.count, "({[")) > _DEEPEST:
        return True
    return bool(_EXPLOSIVE.search(re.sub(r"\\(?:left|right)|\s", "", answer)))


def number(parsed: tuple[Any, ...] | list[Any]) -> float | None:
    """Return the value of the first expression if it is a finite real number, else None."""
    try:
        value = complex(parsed[0])
    except (TypeError, ValueError, OverflowError, IndexError):
        return None
    return value.real if value.imag == 0 and math.isfinite(value.real) else None


def _has_latex(answer: str) -> bool:
    return any(sign in answer for sign in "\\^{$_")
