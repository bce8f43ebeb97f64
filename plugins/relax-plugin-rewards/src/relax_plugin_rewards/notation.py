# SPDX-License-Identifier: Apache-2.0
"""The notation of answers: Unicode signs, LaTeX layout and plain formulas in one form, and splits outside brackets.

Nothing here evaluates an answer or drops a character that has a meaning.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

_SIGNS = {
    "\u2212": "-", "\u2013": "-", "\u2010": "-", "\u2011": "-", "\u00f7": "/",
    "\u00d7": r"\times ", "\u22c5": r"\cdot ", "\u00b7": r"\cdot ",
    "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u222a": r"\cup ",
    "\u2229": r"\cap ", "\u2208": r"\in ", "\u00b0": r"^\circ ", "\u00b1": r"\pm ", "\u2213": r"\mp ", "\u211d": r"\mathbb{R}",
    "\u2205": r"\emptyset", "\u03b1": r"\alpha ", "\u03b2": r"\beta ", "\u03b3": r"\gamma ", "\u03b8": r"\theta ",
    "\u03bb": r"\lambda ", "\u03bc": r"\mu ", "\u03c3": r"\sigma ", "\u03c6": r"\phi ", "\u03c9": r"\omega ", "\u2044": "/",
    "\u2061": "", "\u200b": "", "\ufeff": "", "\u27e8": r"\langle ", "\u27e9": r"\rangle ", "\u2032": "'",
}  # fmt: skip
_SIGN = re.compile("|".join(map(re.escape, _SIGNS)))
_SUPERSCRIPT = re.compile("[\u207b\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
_VULGAR = re.compile("([0-9]?)([\u00bc-\u00be\u2150-\u215e])")
_ROOT = re.compile("\u221a\\s*(\\d+|[A-Za-z]|(?=[({]))")
_LAYOUT = re.compile(
    r"(?<!\\)\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|nolimits)(?![A-Za-z])\.?|(?<!\\)\\!|\\(?:phantom|hspace\*?)\{[^{}]*\}"
)
_SPACE = re.compile(r"(?<!\\)\\(?:[,;: ]|quad(?![A-Za-z])|qquad(?![A-Za-z]))|~|\u00a0|\u202f|\s+")
_WORDING = re.compile(
    r"\\(?:textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname\*?|boldsymbol|bm)(?=\s*\{)"
)
_MATHS = (("$$", "$$"), (r"\[", r"\]"), (r"\(", r"\)"), ("$", "$"), ("**", "**"), ("`", "`"), ("__", "__"), ('"', '"'))
_OPENING, _CLOSING = ("(", "[", "{", r"\{", r"\langle"), (")", "]", "}", r"\}", r"\rangle")
_BRACKET = re.compile(
    r"\\[{}]|\\[lr]angle(?![A-Za-z])|\\begin\{[^{}]*\}|\\end\{[^{}]*\}|\\[A-Za-z]+|\\.|[()\[\]{}]", re.DOTALL
)
FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|gcd|lcm|max|min|det"
GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|sigma|tau|phi|omega|pi|infty"
_NAMED = re.compile(rf"(?<![A-Za-z\\])(?:{FUNCTIONS}|{GREEK})(?![A-Za-z])")
_INFINITE = re.compile(r"(?<![A-Za-z\\])(?:infinity|inf|oo)(?![A-Za-z\d])", re.IGNORECASE)


def cleaned(text: str) -> str:
    """Return a text with Unicode signs as LaTeX and ASCII, without math delimiters around it and without layout."""
    text = _SUPERSCRIPT.sub(lambda found: f"^{{{_folded(found[0])}}}", text)
    text = _VULGAR.sub(lambda found: f"{found[1]}{_vulgar(found[2])}", text)
    text = _SIGN.sub(
        lambda found: _SIGNS[found[0]], _ROOT.sub(lambda found: rf"\sqrt{{{found[1]}}}" if found[1] else r"sqrt", text)
    )
    text = unicodedata.normalize("NFKC", text).strip()
    before = ""
    while before != text:
        before = text
        text = text.strip().removesuffix(".") if re.search(r"[^.\d]\.$|^-?\d+\.$", text.strip()) else text.strip()
        for opening, closing in _MATHS:
            inner = text[len(opening) : len(text) - len(closing)]
            if (
                text.startswith(opening)
                and text.endswith(closing)
                and len(text) > len(opening + closing)
                and closing not in inner
            ):
                text = inner
    if len(re.findall(r"(?<!\\)\$", text)) % 2 == 0 and not re.search(r"\$\d[\d.,]*\s*(?:-|to|and|or|,)\s*\$\d", text):
        text = re.sub(r"(?<!\\)\$", "", text)
    text = text.replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}")
    text = _WORDING.sub(r"\\text", _LAYOUT.sub("", re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)))
    if (whole := re.fullmatch(r"\\text\s*\{([^{}]*\d[^{}]*)\}", text.strip())) is not None:
        text = whole[1]
    text = _SPACE.sub(" ", text)
    text = re.sub(r"(?<=\d)\{,\}(?=\d)", ",", text)
    text = re.sub(r"\\text\s*\{\s*([A-Za-z])\s*\}(?=$|[^\w^{])", lambda one: _letter(one, text), text)
    return braced(text).strip()


def _letter(found: re.Match[str], text: str) -> str:
    r"""Return a single letter without `\text`, unless the letter may be the unit of a number before."""
    return found[0] if re.search(r"[\d})]\s*$", text[: found.start()]) else found[1]


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("\u2212", "-")


def _vulgar(sign: str) -> str:
    above, _, below = unicodedata.normalize("NFKC", sign).partition("\u2044")
    return rf"\frac{{{above}}}{{{below}}}" if below else sign


def braced(text: str) -> str:
    r"""Put the arguments of `\frac` and `\sqrt` in braces: `\frac12` is `\frac{1}{2}`."""
    text = re.sub(r"\\sqrt\s*(?!\s|\[|\{)(\d|\\[A-Za-z]+|[A-Za-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac\s*(\d|(?<=\s)[A-Za-z])\s*(?=[\d{A-Za-z\\])", r"\\frac{\1}", text)
    return re.sub(r"(\\frac\s*\{[^{}]*\})\s*(\d|[A-Za-z])", r"\1{\2}", text)


def source(text: str) -> str:
    """Return a cleaned text without spaces that have no meaning: a space between letters or digits stays."""
    text = re.sub(r"\s+", " ", text).strip().removesuffix(".")
    text = re.sub(r"(\\[A-Za-z]+) (?![A-Za-z])", r"\1", text)
    text = re.sub(r"([_^])\{(\w)\}", r"\1\2", text)
    return re.sub(r"(?<![\w.]) (?![A-Za-z])|(?<![\w.}]) | (?![\w.])", "", text)


def latex(text: str) -> str:
    r"""Return a cleaned formula as LaTeX that a parser reads to the end: `sqrt(2)` is `\sqrt{2}`, `2^10` is `2^{10}`."""
    text = re.sub(
        r"(?<![A-Za-z\d_^{])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\d.])", r"\1 \\cdot 10^{\2}", text.replace("**", "^")
    )
    text = re.sub(r"\^\s*([+-]?\d+(?:\.\d+)?)", r"^{\1}", text)
    text = _argument_braced(text, "^", "^")
    text = _argument_braced(text, "sqrt", r"\sqrt")
    text = re.sub(r"(?<![A-Za-z\\])abs\s*\(([^()]*)\)", r"|\1|", text)
    text = _INFINITE.sub(r"\\infty ", text)
    text = _NAMED.sub(lambda name: f"\\{name[0]} ", text)
    text = re.sub(r"\\text\s*\{\s*(sin|cos|tan|log|ln)\s*\}", r"\\\1 ", text)
    text = re.sub(
        r"(?<![A-Za-z\d_^.])(\d+(?:\.\d+)?)\s*(?=\(|\\(?:binom|lfloor|lceil|gcd|lcm)(?![A-Za-z]))", r"\1 \\cdot ", text
    )
    text = re.sub(r"\)\s*(?=[\d(])", r") \\cdot ", text)  # the grammar adds numbers that stand side by side
    return text.replace("*", r"\cdot ")


def _argument_braced(text: str, name: str, command: str) -> str:
    """Replace `name(...)` by `command{...}`, from the last to the first, so that nested calls are replaced too."""
    for found in reversed(
        list(re.finditer(rf"(?<![A-Za-z\\]){re.escape(name)}\s*\(" if name != "^" else r"\^\s*\(", text))
    ):
        end = next((at for at, depth in depths(text, found.end() - 1) if depth == 0), None)
        if end is not None:
            text = f"{text[: found.start()]}{command}{{{text[found.end() : end - 1]}}}{text[end:]}"
    return text


def depths(text: str, start: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the end of each bracket from `start` on, and the number of brackets that are open after it."""
    depth = 0
    for found in _BRACKET.finditer(text, start):
        if found[0] in _OPENING or found[0].startswith(r"\begin"):
            depth += 1
        elif found[0] in _CLOSING or found[0].startswith(r"\end"):
            depth -= 1
        else:
            continue
        yield found.end(), depth


def is_balanced(text: str) -> bool:
    """Return True if each opening bracket has a closing one. Round and square brackets may close each other."""
    opened: list[str] = []
    for found in _BRACKET.finditer(text):
        sign = found[0]
        if sign in _OPENING or sign.startswith(r"\begin"):
            opened.append(sign)
        elif (sign in _CLOSING or sign.startswith(r"\end")) and (not opened or not _closes(opened.pop(), sign)):
            return False
    return not opened


def _closes(opening: str, closing: str) -> bool:
    if opening.startswith(r"\begin"):
        return closing == opening.replace(r"\begin", r"\end")
    if opening in "([":
        return closing in (")", "]")
    return _CLOSING[_OPENING.index(opening)] == closing


def split(text: str, pattern: re.Pattern[str]) -> list[str]:
    """Split a text at the matches of a pattern outside all brackets."""
    parts, start = [], 0
    for found in outside(text, pattern):
        parts.append(text[start : found.start()])
        start = found.end()
    return [*parts, text[start:]]


def separators(text: str, pattern: re.Pattern[str]) -> list[str]:
    """Return the matches of a pattern outside all brackets."""
    return [found[0] for found in outside(text, pattern)]


def outside(text: str, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
    """Yield the matches of a pattern outside all brackets."""
    brackets, depth = list(depths(text)), 0
    for found in pattern.finditer(text):
        while brackets and brackets[0][0] <= found.start():
            depth = brackets.pop(0)[1]
        if depth == 0:
            yield found


def enclosed(text: str) -> tuple[str, str, str] | None:
    """Return (opening bracket, inside, closing bracket) if one pair of brackets encloses the whole text, else None."""
    opening = next((sign for sign in (r"\langle", r"\{", "(", "[", "{") if text.startswith(sign)), None)
    if opening is None:
        return None
    end = next((at for at, depth in depths(text) if depth == 0), 0)
    closing = next((sign for sign in (r"\rangle", r"\}", ")", "]", "}") if text.endswith(sign)), None)
    if end != len(text) or closing is None:
        return None
    return opening, text[len(opening) : len(text) - len(closing)], closing
