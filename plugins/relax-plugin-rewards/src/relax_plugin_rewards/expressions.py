# SPDX-License-Identifier: Apache-2.0
"""Single mathematical expressions: parsing by the LaTeX grammar of math-verify, values, and equality.

math-verify's timeouts are disabled, because their signals work only in the main thread. Instead, the process that runs
the rewards can be killed. Answers that would take math-verify minutes are compared as text only.
"""

from __future__ import annotations

import logging
import re
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

_EXPLOSIVE = re.compile(
    r"\d[)}]*(?:\^|\*\*)[({]*-?\d+[)}]*(?:\^|\*\*)"  # a tower of numbers, 9^{9^9}
    r"|(?:\^|\*\*)[({]*-?\d{7}"  # an exponent in the millions
    r"|(?<![\\A-Za-z])[A-Za-z][^()]*\)(?:\^|\*\*)[({]*\d{3}"  # (x-1)^{1000}, which would be expanded
    r"|\d{5}!|!!|\([^()A-Za-z]*\)!"  # the factorial of a large number
    r"|\\(?:sum|prod|int|iint|lim)(?![A-Za-z])"  # a sum, product, integral or limit that would be evaluated
)
_LONGEST, _DEEPEST = 1000, 100
_DIGITS = 50
"""Digits to which two exact numbers, such as roots, are compared."""


class Unparsed(ValueError):
    """The error that a text is not an expression of the LaTeX grammar."""


def quiet() -> None:
    """Silence math-verify's warning about disabled timeouts."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def has_latex(text: str) -> bool:
    return any(sign in text for sign in "\\^{$_")


def takes_long(answer: str) -> bool:
    """Return True if evaluating the answer could take minutes, as for `9^{9^9}`."""
    if len(answer) > _LONGEST or sum(map(answer.count, "({[")) > _DEEPEST:
        return True
    return bool(_EXPLOSIVE.search(re.sub(r"\\(?:left|right)|\s", "", answer)))


def parsed(latex: str) -> tuple[Any, bool]:
    """Return (a whole LaTeX expression as sympy's, True if it has a decimal point); decimals become exact fractions.

    Raises Unparsed for any other text, and for sets and relations.
    """
    from latex2sympy2_extended.latex2sympy2 import latex2sympy
    from math_verify.grader import should_treat_as_complex
    from sympy import Expr, Float, I, MatrixBase, Rational, Symbol

    try:
        found = latex2sympy(latex, is_real=not should_treat_as_complex(latex), normalization_config=None)
        if not isinstance(found, Expr) or isinstance(found, MatrixBase):
            raise Unparsed(latex)
        imaginary = [one for one in found.free_symbols if isinstance(one, Symbol) and one.name == "i"]
        decimals = {one: Rational(str(one)) for one in found.atoms(Float)}
        return found.xreplace(decimals).subs(dict.fromkeys(imaginary, I)), bool(decimals)
    except (RecursionError, Exception) as error:  # the grammar raises bare Exceptions
        raise Unparsed(latex) from error


def symbol(name: str) -> Any:
    """Return the expression of a single letter, as `parsed` returns it."""
    return parsed(name)[0]


def is_undefined(expression: Any) -> bool:
    """Return True for the value of a division by zero."""
    from sympy import nan, zoo

    try:
        return bool(expression.has(nan, zoo) or (not expression.free_symbols and expression.doit().has(nan, zoo)))
    except Exception:
        return True


def is_infinite(expression: Any) -> bool:
    """Return True if an expression has an infinity."""
    from sympy import oo

    return bool(expression.has(oo, -oo))


def number(expression: Any) -> tuple[Fraction, Fraction] | None:
    """Return (real part, imaginary part) of a number or constant expression; None if it has no finite value."""
    if isinstance(expression, Fraction):
        return expression, Fraction(0)
    if expression.free_symbols:
        return None
    try:
        real, imaginary = expression.doit().evalf(_DIGITS).as_real_imag()
        return _exact(real), _exact(imaginary)
    except Exception:
        return None


def _exact(value: Any) -> Fraction:
    if value.is_finite is False or not value.is_number:
        raise ValueError(value)
    return Fraction(Decimal(str(value)))


def are_near(gold: Fraction, said: Fraction, precision: int) -> bool:
    """Return True if two numbers, of which one is rounded, agree after rounding to the precision of the gold answer.

    They agree in `precision` decimal places, and for a gold answer below 1 in as many significant digits.
    """
    if gold == said:
        return True
    if not gold:
        return False
    places = precision + max(-1 - _exponent(gold), 0)
    return round(gold, places) == round(said, places)


def _exponent(value: Fraction) -> int:
    """Return the exponent of the first significant digit: 0 for 5, -3 for 0.005."""
    context = Context(prec=30, Emax=10**9, Emin=-(10**9))
    return context.divide(Decimal(value.numerator), Decimal(value.denominator)).adjusted()


def are_equal(gold: Any, said: Any, *, is_rounded: bool, precision: int) -> bool:
    """Return True if two numbers or expressions are equal. `is_rounded`: one of them has a decimal point."""
    if gold == said:
        return True
    wanted, found = number(gold), number(said)
    if wanted is not None and found is not None:
        if is_rounded:
            return all(_parts_near(wanted, found, at, precision) for at in (0, 1))
        if isinstance(gold, Fraction) and isinstance(said, Fraction):
            return False
        size = max(map(abs, wanted))
        return all(abs(a - b) <= size / 10**30 for a, b in zip(wanted, found, strict=True))
    if wanted is not None or found is not None:
        return _is_zero_difference(gold, said)
    from math_verify import verify

    if _differ_somewhere(gold, said):
        return False
    return bool(verify(gold, said, float_rounding=precision, timeout_seconds=None))


def _differ_somewhere(gold: Any, said: Any) -> bool:
    """Return True if two expressions with letters have different values for some values of the letters.

    This decides at once what simplification decides slowly. A single name is left out, since names may be spelt apart.
    """
    from sympy import Rational

    names = sorted({letter.name for one in (gold, said) for letter in one.free_symbols})
    if len({frozenset(letter.name for letter in one.free_symbols) for one in (gold, said)}) > 1 and (
        gold.is_Symbol or said.is_Symbol
    ):
        return False
    values = {name: Rational(37 + 10 * at, 29 + 6 * at) for at, name in enumerate(names)}
    try:
        wanted, found = (
            complex(one.subs({letter: values[letter.name] for letter in one.free_symbols}).doit().evalf(20))
            for one in (gold, said)
        )
    except Exception:
        return False
    return bool(abs(wanted - found) > 1e-3 * (abs(wanted) + abs(found)))


def _parts_near(gold: tuple[Fraction, Fraction], said: tuple[Fraction, Fraction], at: int, precision: int) -> bool:
    size = max(map(abs, gold))
    if abs(gold[at]) * 10**30 <= size:  # a part that is zero but for the last digits of the evaluation
        return abs(said[at]) * 10**precision <= size
    return are_near(gold[at], said[at], precision)


def _is_zero_difference(gold: Any, said: Any) -> bool:
    """Return True if an expression with letters simplifies to a number, such as `x - x + 2`, or infinities are equal."""
    from sympy import Rational, oo, simplify, sympify

    left, right = (
        Rational(one.numerator, one.denominator) if isinstance(one, Fraction) else sympify(one) for one in (gold, said)
    )
    if left.has(oo) or right.has(oo):
        return bool(left == right)
    try:
        return not _differ_somewhere(left, right) and bool(simplify(left - right) == 0)
    except Exception:
        return False
