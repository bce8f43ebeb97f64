# SPDX-License-Identifier: Apache-2.0
"""Equality of two answers that were read whole: a response's answer, and a task's gold answer.

An answer may say more than the gold answer (a unit, a percent sign, `x =`), never less. A list or set equals another in
any order; a tuple and a matrix have an order. A gold answer with a unit is equal only to an answer in this unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from relax_plugin_rewards import expressions
from relax_plugin_rewards.values import Unread, Value, read

_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", "=": "=", r"\ne": r"\ne"}
_SCALAR = ("number", "expression")


def are_equal(gold: Value, said: Value, precision: int = 6) -> bool:
    """Return True if an answer equals a gold answer. `precision`: digits in which rounded numbers must agree."""
    if gold.kind == said.kind and gold.source == said.source and gold.source:
        return True
    if "relation" in (gold.kind, said.kind):
        return _relations_equal(gold, said, precision)
    if gold.kind in _SCALAR and said.kind in _SCALAR:
        return _scalars_equal(gold, said, precision)
    if {gold.kind, said.kind} <= {"list", "set", "union"}:
        return _members_equal(gold, said, precision)
    if gold.kind == said.kind and gold.kind in ("tuple", "matrix"):
        return gold.signs == said.signs and _all_equal(gold.items, said.items, precision)
    return False


def _all_equal(golds: Sequence[Value], said: Sequence[Value], precision: int) -> bool:
    return len(golds) == len(said) and all(
        are_equal(one, other, precision) for one, other in zip(golds, said, strict=True)
    )


def _members_equal(gold: Value, said: Value, precision: int) -> bool:
    """Return True if two collections have the same members, in any order and without repetitions."""
    ranges = said.kind == "union" and all(one.kind == "relation" for one in gold.items)
    if "union" in (gold.kind, said.kind) and gold.kind != said.kind and not ranges:
        return False
    wanted, found = _distinct(gold.items, precision), _distinct(said.items, precision)
    if len(wanted) != len(found):
        return False
    named = len({one.items[0].source for one in wanted if _is_assignment(one)}) > 1
    for one in wanted:
        at = next(
            (
                at
                for at, other in enumerate(found)
                if (not named or other.kind == one.kind) and are_equal(one, other, precision)
            ),
            None,
        )
        if at is None:
            return False
        del found[at]
    return True


def _distinct(items: Sequence[Value], precision: int) -> list[Value]:
    kept: list[Value] = []
    for one in items:
        if not any(one.kind == other.kind and are_equal(other, one, precision) for other in kept):
            kept.append(one)
    return kept


def _spelt(value: Value, other: Value) -> Value:
    r"""Return a number with a unit of one letter as a product if the other value is an expression with letters.

    So `5\text{ m}` equals the expression `5 m`. Any other value is returned unchanged.
    """
    letters = other.kind == "expression" and not other.unit and bool(other.number.free_symbols)
    if not letters or len(value.unit) != 1 or not value.unit.isalpha():
        return value
    return replace(value, kind="expression", number=_scaled(expressions.symbol(value.unit), value.number), unit="")


def _scalars_equal(gold: Value, said: Value, precision: int) -> bool:
    gold, said = _spelt(gold, said), _spelt(said, gold)
    scale = Fraction(1)
    if gold.unit == "%" and said.unit != "%":
        if said.unit:
            return False
        scale = Fraction(100)  # 0.5 is 50%, and 50 is not
    elif gold.unit and gold.unit != said.unit:
        return False
    elif (
        not gold.unit
        and said.unit == "%"
        and _equal(gold.number, _scaled(said.number, Fraction(1, 100)), gold, said, precision)
    ):
        return True
    return _equal(gold.number, _scaled(said.number, scale), gold, said, precision)


def _equal(gold: Any, said: Any, left: Value, right: Value, precision: int) -> bool:
    return expressions.are_equal(gold, said, is_rounded=left.is_rounded or right.is_rounded, precision=precision)


def _scaled(number: Any, scale: Any) -> Any:
    if scale == 1:
        return number
    if not isinstance(scale, Fraction) or isinstance(number, Fraction):
        return number * scale
    from sympy import Rational

    return number * Rational(scale.numerator, scale.denominator)


def _is_assignment(value: Value) -> bool:
    """Return True for `x = 5` and `(x, y) = (1, 2)`: the left side consists of names."""
    return value.kind == "relation" and set(value.signs) <= {"=", r"\in"} and _is_name(value.items[0])


def _is_name(value: Value) -> bool:
    if value.kind == "expression":
        return bool(value.number.free_symbols) and not value.number.is_Add
    return value.kind == "text" or (value.kind == "tuple" and all(map(_is_name, value.items)))


def _relations_equal(gold: Value, said: Value, precision: int) -> bool:
    """Compare values of which one or both are relations."""
    if gold.kind != "relation":
        stated = set(said.signs) <= {"=", r"\in"}
        return stated and are_equal(gold, said.items[-1], precision)
    if said.kind != "relation":
        if _is_assignment(gold):
            return are_equal(gold.items[-1], said, precision)
        found = _range(gold)
        return found is not None and found[1].equals(said, precision)
    if gold.signs == said.signs and _all_equal(gold.items, said.items, precision):
        return True
    flipped = tuple(_FLIPPED.get(sign, "") for sign in reversed(said.signs))
    if gold.signs == flipped and _all_equal(gold.items, said.items[::-1], precision):
        return True
    if _is_assignment(gold) and _is_assignment(said) and len(gold.signs) == len(said.signs) == 1:
        return False
    return _solutions_equal(gold, said, precision)


@dataclass(frozen=True, slots=True)
class _Range:
    """The numbers between two bounds; None: no bound."""

    low: Any = None
    high: Any = None
    low_open: bool = True
    high_open: bool = True
    is_rounded: bool = False
    """True if the relation has a number with a decimal point."""

    def equals(self, said: Value, precision: int) -> bool:
        """Return True if an answer is this range, written as an interval."""
        signs = "(" if self.low_open else "[", ")" if self.high_open else "]"
        if said.kind != "tuple" or len(said.items) != 2 or said.signs != signs:
            return False
        ends = (self.low, "-\\infty"), (self.high, "\\infty")
        golds = [read(infinite) if end is None else _value(end, self.is_rounded) for end, infinite in ends]
        return _all_equal(golds, said.items, precision)


def _value(number: Any, is_rounded: bool) -> Value:
    return Value("expression", "", number=number, is_rounded=is_rounded)


def _sides(value: Value) -> list[Any] | None:
    """Return the sides of a relation between scalars as sympy's expressions; None for any other relation."""
    import sympy

    if any(one.kind not in _SCALAR or one.unit for one in value.items):
        return None
    return [
        sympy.Rational(one.number.numerator, one.number.denominator) if isinstance(one.number, Fraction) else one.number
        for one in value.items
    ]


def _range(value: Value) -> tuple[Any, _Range] | None:
    """Return (letter, numbers that solve) of linear inequalities in one letter, such as `1 < 2x < 4`, else None."""
    import sympy

    sides = _sides(value)
    letters = set().union(*(one.free_symbols for one in sides)) if sides else set()
    if not sides or len(letters) != 1 or not set(value.signs) <= {"<", ">", r"\le", r"\ge"}:
        return None
    (letter,) = letters
    found = _Range(is_rounded=any(one.is_rounded for one in value.items))
    for left, right, sign in zip(sides, sides[1:], value.signs, strict=False):
        try:
            slope, offset = sympy.Poly(left - right, letter).all_coeffs()
            bound, is_upper = -offset / slope, (sign in ("<", r"\le")) == bool(slope > 0)
            current = found.high if is_upper else found.low
            if current is not None and bool(bound >= current if is_upper else bound <= current):
                return None
        except (sympy.PolynomialError, TypeError, ValueError):
            return None
        is_open = sign in ("<", ">")
        found = (
            replace(found, high=bound, high_open=is_open) if is_upper else replace(found, low=bound, low_open=is_open)
        )
    return letter, found


def _solutions_equal(gold: Value, said: Value, precision: int) -> bool:
    """Return True if two relations have the same solutions: the same range, or equations with a constant ratio."""
    import sympy

    wanted, found = _range(gold), _range(said)
    if wanted is not None and found is not None:
        left, right = wanted[1], found[1]
        is_rounded = left.is_rounded or right.is_rounded
        same = (left.low_open, left.high_open) == (right.low_open, right.high_open) and wanted[0] == found[0]
        return same and all(
            one is other
            or (
                one is not None
                and other is not None
                and expressions.are_equal(one, other, is_rounded=is_rounded, precision=precision)
            )
            for one, other in ((left.low, right.low), (left.high, right.high))
        )
    golds, answers = _sides(gold), _sides(said)
    if not golds or not answers or len(golds) != 2 or gold.signs != said.signs or gold.signs[0] not in ("=", r"\ne"):
        return False
    one, other = golds[0] - golds[1], answers[0] - answers[1]
    if one.free_symbols != other.free_symbols or not one.free_symbols:
        return False
    try:
        ratio = sympy.simplify(one / other)
        return bool(ratio.is_number and ratio != 0 and ratio.is_finite)
    except Exception:
        return False


def states(answer: str, gold: Value, precision: int = 6) -> bool:
    """Return True if an extracted answer, such as a box's content, equals a gold answer, a formula or words."""
    if not answer.strip():
        return False
    try:
        return are_equal(gold, read(answer, words=True), precision)
    except Unread:
        return False
