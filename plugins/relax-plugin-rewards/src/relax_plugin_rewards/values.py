# SPDX-License-Identifier: Apache-2.0
"""The reader of answers: one text becomes one value, from its first character to its last, or `Unread` says why not.

A task's gold answer, the content of a box and a plain response go through the same reader, so that every gold that can
be read equals itself. math-verify's own extraction is not used: it searches for an expression and drops the rest of the
text, such as the `1` of `(1, 2)`. Only single expressions are left to its LaTeX grammar, which reads to the end.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from relax_core.api import Task
from relax_plugin_rewards import expressions, notation
from relax_plugin_rewards.answers import unboxed
from relax_plugin_rewards.units import unit_name

AnswerFormat: TypeAlias = Literal["auto", "latex", "plain"]
Kind: TypeAlias = Literal[
    "number", "expression", "relation", "list", "set", "union", "tuple", "matrix", "text", "literal"
]  # fmt: skip

_SHOWN = 60
LONGEST = 4000
"""Most characters of a text that is read as one value."""
_DEEPEST, _LARGEST_EXPONENT = 20, 5000
_SHORT_WORDS = ("no", "ok", "on", "up", "in", "am", "pm", "so", "to", "or", "if", "it", "is")
"""Words that would be products of two letters: `on` is not `no`."""
_NO_VALUE = ("nan", "null", "none", "n/a", "na")
_RELATION = re.compile(r"<=|>=|!=|\\(?:leq?|geq?|neq?|lt|gt|in)(?![A-Za-z])|[<>=]")
_SAME_RELATION = {
    "<=": r"\le", ">=": r"\ge", "!=": r"\ne", r"\leq": r"\le", r"\geq": r"\ge", r"\neq": r"\ne", r"\lt": "<", r"\gt": ">",
}  # fmt: skip
_WORDED = r"\\text\s*\{\s*(?:,\s*)?(?:and|or)\s*\}"
_SEPARATOR = re.compile(rf"(?:[,;]\s*)?(?:{_WORDED}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))|[,;]")
_UNION = re.compile(r"\\cup(?![A-Za-z])|(?<=[\])}])\s*U\s*(?=[\[({\\])")
_MATRIX = re.compile(r"\\begin\{([pb]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_DECIMAL_COMMA = re.compile(r"[+-]?0,\d+")
_COMMA = re.compile(r"[,;]")
_GROUPED = re.compile(r"(?<![\w.,])[1-9]\d{0,2}(?:,\d{3})+(?!\w|,\d|\.\d+,\d)")
_DIGITS = r"(?:[1-9]\d{0,2}(?:(?:,|\{,\})\d{3})+|[1-9]\d{0,2}(?: \d{3})+|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_POWER_OF_TEN = (
    r"(?:\s*[eE]|\s*(?:\\times|\\cdot|\*|[xX])\s*10\s*(?:\^|\*\*))\s*[{(]?\s*(?P<exponent>[+-]?\s*\d+)\s*[)}]?"
)
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:"
    rf"(?P<whole>\d*)\.(?P<head>\d*)(?:\\overline\s*\{{(?P<bar>\d+)\}}|\((?P<cycle>\d+)\))"
    rf"|(?:(?P<units>\d+)(?:\s+and\s+|\s+|\s*(?=\\frac)))?(?:(?P<above>{_DECIMAL})\s*/\s*(?P<below>{_DECIMAL})"
    rf"|\\frac\s*\{{\s*(?P<upper>-?{_DECIMAL})\s*\}}\s*\{{\s*(?P<under>-?{_DECIMAL})\s*\}})"
    rf"|(?P<decimal>{_DECIMAL})(?:{_POWER_OF_TEN})?"
    rf")"
)
_PERCENT = re.compile(
    r"(.*?)\s*(?:\\?%|\\text\s*\{\s*(?:percent|per cent)\s*\}|(?<![A-Za-z])(?:percent|per cent|pct)\.?)", re.DOTALL
)
_CURRENCIES = {
    r"\$": "dollar", "$": "dollar", "US$": "dollar", "USD": "dollar", "\u20ac": "euro", "EUR": "euro",
    "\u00a3": "pound sterling", "GBP": "pound sterling", "\u00a5": "yen", "\u20b9": "rupee", "Rs.": "rupee", "Rs": "rupee",
}  # fmt: skip
_CURRENCY = re.compile(
    rf"(-?)\s*({'|'.join(map(re.escape, sorted(_CURRENCIES, key=len, reverse=True)))})\s*(-?)\s*(?=[\d.\\])"
)
_CURRENCY_BEHIND = re.compile(r"(.*\d)\s*(\\\$|\$|[\u20ac\u00a3\u00a5\u20b9])", re.DOTALL)
_WORD = re.compile(r"(?<![A-Za-z\\])[^\W\d_]{3,}")
_TWO_WORDS = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,} +(?=[\w(])")
_ONE_WORD = re.compile(r"[^\W\d_](?:[^\W\d_]|['-](?=[^\W\d_]))+")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_COMMAND = re.compile(r"\\(?:text|begin|end|mathbb|mathcal)\s*\{[^{}]*\}")
_NOT_ARITHMETIC = re.compile(
    r"[+-]?0(?:[xX][0-9a-fA-F]+|[oO][0-7]+|[bB][01]+)|\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])"
)
"""Pattern of numbers in base 16, 8 or 2, and of dates, which would be read as products and differences."""
_LABEL = re.compile(r"\(?([A-Za-z])[).]?")


class Unread(ValueError):
    """The error that a text can't be read as one value. The message is the reason; callers put the text before it."""


@dataclass(frozen=True, slots=True)
class Value:
    """The value of an answer."""

    kind: Kind
    source: str
    """The text in normal form. Two answers with the same source are equal."""
    items: tuple[Value, ...] = ()
    """Members of a list, set, union or tuple; both sides of each sign of a relation; the rows of a matrix."""
    signs: tuple[str, ...] = ()
    """Signs between the items of a relation; opening and closing bracket of a tuple."""
    number: Any = None
    """Fraction of a number; sympy expression of an expression."""
    is_rounded: bool = False
    """True for a number written with a decimal point or as a power of ten, which may be rounded."""
    unit: str = ""
    """Unit of a number or expression: `%`, the name of a currency, `cm`, `degree`; empty: none."""

    @property
    def has_words(self) -> bool:
        """Return True for a text that is compared as words, or a value with such a part."""
        return self.kind in ("text", "literal") or any(one.has_words for one in self.items)

    def __str__(self) -> str:
        """Return the value to show to a person, with its kind."""
        items = list(map(str, self.items))
        if self.kind == "tuple":
            return f"{self.signs[0]}{', '.join(items)}{self.signs[1]}"
        if self.kind == "relation":
            return " ".join([items[0], *(f"{sign} {item}" for sign, item in zip(self.signs, items[1:], strict=True))])
        if self.kind in ("number", "expression"):
            try:
                number = str(self.number)
            except ValueError:  # of more digits than Python converts
                number = self.source
            number = number if len(number) <= _SHOWN else self.source[:_SHOWN]
            return f"{self.kind} {number} {self.unit}".rstrip()
        return f"{self.kind} {'; '.join(items) or self.source}"


def read_gold(task: Task, text: str, answer_format: AnswerFormat = "auto", *, words: bool = False) -> Value:
    """Read a gold answer whole. Raises ValueError naming the task, the answer and the reason.

    `words`: a text that is not a mathematical expression is compared as words.
    """
    try:
        return read(text, answer_format, words)
    except Unread as error:
        raise ValueError(f"task {task.id}: answer {text!r} {error}; correct the answer column") from error


def read(text: str, answer_format: AnswerFormat = "auto", words: bool = False) -> Value:
    """Read a whole text as one value. Raises Unread with the reason.

    `answer_format`: `latex` reads words as products of letters; `plain` refuses LaTeX; `auto` reads both notations.
    `words`: read a text that has no other value as words.
    """
    if len(text) > LONGEST:
        raise Unread(f"has more than {LONGEST} characters")
    return _read(text, answer_format, words)


@lru_cache(maxsize=8192)
def _read(text: str, answer_format: AnswerFormat, words: bool) -> Value:
    if answer_format == "plain" and expressions.has_latex(text):
        raise Unread("has LaTeX characters; set answer_format to auto or latex")
    cleaned = notation.cleaned(unboxed(text))
    if not cleaned or not re.search(r"\w|\\", cleaned):
        raise Unread("has no letters or digits")
    if cleaned.strip(" .").casefold() in _NO_VALUE:
        raise Unread("stands for a missing value")
    if re.search(r"\\(?:boxed|fbox)(?![A-Za-z])", cleaned):
        raise Unread("has text around its box")
    try:
        return _Reader(answer_format == "latex").read(cleaned)
    except Unread:
        if not words:
            raise
        return Value("text", plain_source(text))


@dataclass(frozen=True, slots=True)
class _Reader:
    letters_multiply: bool

    def read(self, text: str, depth: int = 0) -> Value:
        """Read a cleaned text. The order of the rules decides between their readings."""
        text = text.strip()
        source = notation.source(text)
        if not text:
            raise Unread("has an empty part")
        if depth > _DEEPEST or expressions.takes_long(text):
            return Value("literal", source)
        if reversed_brackets := re.fullmatch(r"\](.*)\[", text, re.DOTALL):
            text = f"({reversed_brackets[1]})"
        if not notation.is_balanced(text):
            raise Unread("has brackets that do not match")
        if text in (r"\emptyset", r"\varnothing", r"\{\}", r"\{ \}", "{}"):
            return Value("set", source)
        if _NOT_ARITHMETIC.fullmatch(text):
            return Value("literal", source)
        number = _number(text, source)
        if number is not None:
            return number
        if text.casefold() in _SHORT_WORDS:
            return Value("text", source.casefold())
        for rule in (
            self._matrix,
            self._union,
            self._list,
            self._grouped,
            self._relation,
            self._two_signs,
            self._scalar,
        ):
            if (found := rule(text, source, depth + 1)) is not None:
                return found
        return self._words(text, source)

    def _items(self, texts: Sequence[str], depth: int) -> tuple[Value, ...]:
        return tuple(self.read(text, depth) for text in texts)

    def _matrix(self, text: str, source: str, depth: int) -> Value | None:
        if not (found := _MATRIX.fullmatch(text)) or r"\begin" in found[2]:
            return None
        rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", found[2]) if row.strip()]
        cells = [self._items(row.split("&"), depth) for row in rows]
        if not cells or len({len(row) for row in cells}) != 1:
            raise Unread("has rows of different lengths")
        return Value("matrix", source, tuple(Value("tuple", "", row, ("[", "]")) for row in cells))

    def _union(self, text: str, source: str, depth: int) -> Value | None:
        if not any(True for _ in _UNION.finditer(text)):
            return None
        start = re.match(r"\s*[A-Za-z]\s*(?:\\in(?![A-Za-z])|=)", text)
        parts = notation.split(text[start.end() :] if start else text, _UNION)
        return Value("union", source, self._items(parts, depth)) if len(parts) > 1 else None

    def _list(self, text: str, source: str, depth: int) -> Value | None:
        parts = notation.split(_ungrouped(text), _SEPARATOR)
        if len(parts) < 2 or (all(map(_is_words, parts)) and not re.search("[,;]", text)):
            return None
        return Value("list", source, self._items(parts, depth))

    def _grouped(self, text: str, source: str, depth: int) -> Value | None:
        """Read a text that is enclosed in one pair of brackets as a set, tuple, interval, vector or matrix."""
        found = notation.enclosed(text)
        if found is None:
            return None
        opening, inside, closing = found
        inside = _ungrouped(inside) if re.search(r",\s", inside) else inside  # (100,200) is a pair
        parts = notation.split(inside, _COMMA)
        if opening in (r"\{", "{"):
            if opening == "{" and len(parts) == 1:
                return self.read(inside, depth)
            if re.search(r"\\mid(?![A-Za-z])|[|:]", inside):
                return Value("literal", source)
            return Value("set", source, self._items(parts, depth))
        if len(parts) == 1 and (opening, closing) == ("(", ")"):
            return _label(text) or self.read(inside, depth)
        items = self._items(parts, depth)
        rows = [len(one.items) for one in items if one.kind == "tuple" and one.signs == ("[", "]")]
        if opening == "[" and len(rows) == len(items) and len(set(rows)) == 1:
            return Value("matrix", source, items)
        return Value("tuple", source, items, (opening, closing))

    def _relation(self, text: str, source: str, depth: int) -> Value | None:
        parts, signs = notation.split(text, _RELATION), notation.separators(text, _RELATION)
        if len(parts) == 1:
            return None
        if not all(part.strip() for part in parts):
            raise Unread(f"has nothing on one side of {signs[0]!r}")
        signs = [_SAME_RELATION.get(sign, sign) for sign in signs]
        return Value("relation", source, self._items(parts, depth), tuple(signs))

    def _two_signs(self, text: str, source: str, depth: int) -> Value | None:
        r"""Read `a \pm b` as the list of both values."""
        if not re.search(r"\\(?:pm|mp)(?![A-Za-z])", text):
            return None
        upper = re.sub(r"\\(pm|mp)(?![A-Za-z])", lambda sign: "+" if sign[1] == "pm" else "-", text)
        lower = re.sub(r"\\(pm|mp)(?![A-Za-z])", lambda sign: "-" if sign[1] == "pm" else "+", text)
        return Value("list", source, self._items([upper.strip().removeprefix("+"), lower], depth))

    def _scalar(self, text: str, source: str, depth: int) -> Value | None:
        """Read a number or expression with its unit; None if the text is neither."""
        if (currency := _CURRENCY.match(text)) is not None:
            value = self.read(currency[1] + currency[3] + text[currency.end() :], depth)
            if value.kind != "number" or value.unit not in ("", _CURRENCIES[currency[2]]):
                return None
            return _with_unit(value, source, _CURRENCIES[currency[2]])
        behind = _CURRENCY_BEHIND.fullmatch(text)
        if behind is not None and (value := self.read(behind[1], depth)).kind == "number":
            return None if value.unit else _with_unit(value, source, _CURRENCIES[behind[2]])
        if (percent := _PERCENT.fullmatch(text)) is not None:
            value = self.read(percent[1], depth)
            return _with_unit(value, source, "%") if value.kind in ("number", "expression") and not value.unit else None
        for tail in _tails(text):
            unit = unit_name(tail, alone=tail.startswith((" ", "\\text", "^")))
            if unit is None:
                continue
            bare = text[: len(text) - len(tail)].strip()
            value = _number(bare, source) or self._expression(bare, source)
            if value is not None and (value.kind == "number" or not value.number.free_symbols):
                return _with_unit(value, source, unit)
        return self._expression(text, source)

    def _expression(self, text: str, source: str) -> Value | None:
        latex = notation.latex(text)
        if not self.letters_multiply:
            words = None if expressions.has_latex(text) else _WORD.search(notation.latex(_TEXT.sub(r"\1", text)))
            if words or _TWO_WORDS.search(_COMMAND.sub("", latex)):
                return None
        if re.search(r"\d\s+\d", text) and not re.search(r"[a-z]\{|\\[a-z]", text):
            raise Unread("has two numbers without a sign between them")
        if re.search(r"\.\d+\.\d|\d\s*_|'|\\prime|\\circ|[?#@:~]|\.\.\.|\\[lc]?dots|(?<!\\)%", text) or (
            _TEXT.search(text) and any(len(found.strip()) > 1 for found in _TEXT.findall(text))
        ):
            return None
        try:
            parsed, is_rounded = expressions.parsed(latex)
        except expressions.Unparsed:
            return None
        if expressions.is_undefined(parsed):
            raise Unread("is undefined")
        if expressions.is_infinite(parsed) and not re.fullmatch(r"[+-]?\s*\\infty", latex.strip()):
            return None
        return Value("expression", source, number=parsed, is_rounded=is_rounded)

    def _words(self, text: str, source: str) -> Value:
        """Read a word, or a text that is compared as words because no notation here evaluates the text."""
        said = _TEXT.sub(r"\1", text).strip()
        plain = said.rstrip(".").strip()
        if (label := _label(plain)) is not None:
            return label
        if _ONE_WORD.fullmatch(plain) or (r"\text" in text and not re.search(r"[\d\\]", said)):
            return Value("text", notation.source(plain).casefold())
        if re.search(r"[?#@]", said) or re.search(r"[-+*/=<>^_,;&(\[]$|^[*/=<>^_,;)&]", said):
            raise Unread("begins or ends in the middle of an expression, or has signs that belong to no notation")
        if not re.search(r"\d|\\", said) or len(_WORD.findall(_COMMAND.sub("", text))) > 1:
            raise Unread("is not a mathematical expression, a number with its unit, or one word")
        return Value("literal", source)


def _label(text: str) -> Value | None:
    """Read a letter such as `(B)` or `B.`; None for any other text."""
    found = _LABEL.fullmatch(text)
    return Value("expression", found[1].casefold(), number=expressions.symbol(found[1])) if found else None


def _number(text: str, source: str) -> Value | None:
    """Read a number in digits: decimal, grouped, scientific, fraction, mixed, repeating. None for any other text."""
    text = text.replace(",", ".") if _DECIMAL_COMMA.fullmatch(text) else text
    found = _NUMBER.fullmatch(text.removesuffix("."))
    if found is None:
        return None
    part = found.groupdict()
    is_rounded = any("." in (part[name] or "") for name in ("above", "below", "upper", "under", "decimal"))
    if part["decimal"]:
        exponent = int((part["exponent"] or "0").replace(" ", ""))
        if abs(exponent) > _LARGEST_EXPONENT:
            return Value("literal", source)
        value = _fraction(part["decimal"]) * Fraction(10) ** exponent
        is_rounded = is_rounded or bool(part["exponent"])
    elif part["bar"] or part["cycle"]:
        cycle, head = part["bar"] or part["cycle"], part["head"]
        value = Fraction(
            int(part["whole"] + head + cycle) - int((part["whole"] + head) or 0),
            (10 ** len(cycle) - 1) * 10 ** len(head),
        )
    else:
        upper, lower = _fraction(part["above"] or part["upper"]), _fraction(part["below"] or part["under"])
        if not lower:
            raise Unread("divides by zero")
        value = Fraction(part["units"] or 0) + upper / lower
    return Value("number", source, number=-value if part["sign"] == "-" else value, is_rounded=is_rounded)


def _fraction(digits: str) -> Fraction:
    return Fraction(re.sub(r"[,{} ]", "", digits))


def _with_unit(value: Value, source: str, unit: str) -> Value:
    return Value(value.kind, source, number=value.number, is_rounded=value.is_rounded, unit=unit)


def _ungrouped(text: str) -> str:
    """Remove the commas between the groups of three digits of numbers outside brackets."""
    for found in reversed(list(notation.outside(text, _GROUPED))):
        text = text[: found.start()] + found[0].replace(",", "") + text[found.end() :]
    return text


def _tails(text: str) -> Iterator[str]:
    """Yield the texts that may be the unit of a number at the start of a text, the longest first."""
    for found in re.finditer(r"(?:(?<=[\d)}!.])|(?<=pi))\s*(?=\^\s*\{?\s*\\circ|\\text|[A-Za-z\u00b5\u03a9])", text):
        yield text[found.start() :]


def _is_words(text: str) -> bool:
    return not re.search(r"[\d\\=<>]", text) and bool(_WORD.search(text))


def plain_source(text: str) -> str:
    """Return the normal form of a text that is compared as words: Unicode's form NFKC, without case and layout."""
    return notation.source(_TEXT.sub(r"\1", unicodedata.normalize("NFKC", text)).rstrip(". ")).casefold()
