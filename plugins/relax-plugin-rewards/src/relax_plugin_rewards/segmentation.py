# SPDX-License-Identifier: Apache-2.0
"""Splitting of a text into words, sentences and paragraphs by rules, the same for all languages but for lists of words."""

from __future__ import annotations

import re
import unicodedata


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NEVER_LAST = _names(
    """mr mrs ms dr prof st mt ft gen col sgt capt lt maj cpl rev hon sen rep gov supt messrs mme mlle sra srta dra
    e.g i.e vs v cf viz approx al fig figs w.r.t a.k.a p.s p.p.s n.b z.b d.h u.a bzw ca resp"""
)
"""Abbreviations that never end a sentence, without the last dot."""
_BEFORE_NUMBERS = _names(
    """no nos nr vol vols pp p ch eq eqs sec art jan feb mar apr jun jul aug sept sep oct nov dec"""
)
"""Abbreviations that do not end a sentence before a number: `No. 5` is one sentence, `No. I won't.` are two."""
_BEFORE_NAMES = _names("inc ltd co corp bros jr sr esq ave blvd rd dept univ assn d.phil b.sc m.sc")
"""Abbreviations after which a name may follow, as after `U.S.`: they end a sentence before one of `_STARTS`."""
_BEFORE_DATES = _names("a.m p.m etc")
"""Abbreviations that end a sentence before a word in upper case, but not before one of `_DATES`."""
_STARTS = _names(
    """a an the this that these those there here i you he she it we they my your his her its our their who what when where
    why how which if and but or so yet nor for as at by in on of to from with without after before since because
    while although though until once unless then now today yesterday tomorrow finally first second third next later
    meanwhile however therefore thus also instead moreover furthermore nevertheless some many most more all both
    each every no not nobody nothing everyone everything someone yes please let does did do is are was were can
    could will would should"""
)
_DATES = _names(
    """monday tuesday wednesday thursday friday saturday sunday january february march april may june july august september
    october november december januar februar m\u00e4rz mai juni juli oktober dezember est edt cst cdt mst mdt pst
    pdt et ct mt pt gmt utc bst cet cest eastern central mountain pacific"""
)
_BLOCK_END = re.compile(r"\n\s*\n|\n(?=[ \t]*(?:[-*+\u2022]|\d{1,3}[.)]|#{1,6})[ \t])")
_HEADING = re.compile(r"(?m)^([ \t]*#{1,6}[ \t][^\n]*)$")
_LIST_MARK = re.compile(r"\s*(?:(?:[-*+\u2022]|\d{1,3}[.)]|#{1,6})[ \t]+)?")
_STOP = re.compile(
    r"(?P<stop>(?<!\. )\.(?: \.)+(?! \.)|(?<![.!?\u2026\u061f])[.!?\u2026\u061f]++)"
    r"(?:\[\d+\])*(?!\[\d+\])(?P<closed>[\"'\u201d\u2019\u00bb)\]*_`]*+)(?=\s|\Z)"
    r"|[\u3002\uff01\uff1f\uff61\u0964\u0965\u06d4\u0589\u1362\u104b\u17d4]++(?P<quoted>[\"'\u201d\u2019\u300d\u300f\uff09\u300b)*_]*+)"
)
"""A mark that may end a sentence: before white space, or with a mark of its own script (`\u3002`, `\u0964`) anywhere."""
_LAST_WORD = re.compile(r"[^\W_]+(?:\.[^\W_]+)*$")
_NEXT_WORD = re.compile(r"[\W_]{0,32}+([^\W_]{2,32}|[^\W_]\.?)")
"""The word after a stop; the dot of an initial belongs to the word."""
_ACRONYM = re.compile(r"[A-Z]|[A-Za-z]{1,2}(?:\.[A-Za-z]{1,2})+")
_LONGEST = 32
"""Number of characters before a stop that are searched for an abbreviation."""
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003134f"
_APART = re.compile(r"\.{2,}|(?<!\d)[,:]|[,:](?!\d)")
"""Marks that separate words without white space: an ellipsis, and a comma or colon that is not part of a number."""
_RUN = re.compile(rf"[{_UNSPACED}]|[^\s/\u2013\u2014\u2026;!?|=<>\"\u201c\u201d(){{}}\[\]{_UNSPACED}]+")
_SIGNS = "".join(
    sign for sign in map(chr, (*range(0x3100), *range(0xFF00, 0xFFF0))) if unicodedata.category(sign)[0] in "PS"
)
_LETTER = re.compile(r"\w")
_BARE = re.compile(r"\w(?:.*\w)?", re.DOTALL)


def words(text: str) -> list[str]:
    """Return the words of a text: `don't`, `well-known`, `3.14`, `1,000`, `U.S.` and `a@b.org` are one word each.

    Words are separated by white space, and by brackets, quotes, slashes, long dashes, ellipses and the like within a run;
    a word has a letter or a digit. Chinese and Japanese characters are one word each.
    """
    runs = _RUN.findall(_APART.sub(" ", text))
    return [word for run in runs if (word := run.strip(_SIGNS)) and _LETTER.search(word)]


def sentences(text: str) -> list[str]:
    """Return the sentences of a text, without list marks.

    Sentences end at these places:

    - at an empty line, around a heading (`#`), and before a line that begins with a list mark (`-`, `*`, `1.`);
    - after `.`, `!`, `?` or an ellipsis before white space, with the quotes and brackets that close there. A word in
      lower case continues the sentence after an ellipsis, and after a closed quote or bracket: `"Why?" he asked.`;
    - after `\u3002`, `\uff01`, `\uff1f`, `\u0964` and the like, unless a closed quote and then a letter follow.

    A dot of an abbreviation (`Dr.`, `e.g.`), an initial or `No. 5` ends no sentence. `p.m.` and `etc.` end one before a
    word in upper case that is not a day, month or time zone; `U.S.`, `Inc.` and initials before a word that often starts
    a sentence (`It`, `The`). Text without any stop is one sentence.
    """
    found: list[str] = []
    for block in _BLOCK_END.split(_HEADING.sub(r"\1\n", text)):
        mark = _LIST_MARK.match(block)
        start = mark.end() if mark else 0
        for stop in _STOP.finditer(block, start):
            if _ends(block, stop):
                found.append(block[start : stop.end()])
                start = stop.end()
        found.append(block[start:])
    return [sentence.strip() for sentence in found if _LETTER.search(sentence)]


def _ends(block: str, stop: re.Match[str]) -> bool:
    following = block[stop.end() : stop.end() + 1]
    if stop["stop"] is None:
        return not (stop["quoted"] and following.isalpha())
    found = _NEXT_WORD.match(block, stop.end())
    if found is None:
        return True
    after, is_lower = found[1], found[1][0].islower()
    if is_lower and (stop["closed"] or stop["stop"] not in (".", "!", "?")):
        return stop["stop"][-1] in "!?" and not stop["closed"]
    if stop["stop"] != ".":
        return True
    before = _LAST_WORD.search(block, max(stop.start() - _LONGEST, 0), stop.start())
    return before is None or not _is_open(before[0], after, is_lower)


def _is_open(before: str, after: str, is_lower: bool) -> bool:
    """Return True if a sentence continues after the word `before` and a dot with the word `after`."""
    name, follower = before.casefold(), after.casefold()
    if name in _NEVER_LAST:
        return True
    if name in _BEFORE_NUMBERS and after[0].isdigit():
        return True
    if name in _BEFORE_DATES:
        return is_lower or follower in _DATES
    if name.isdigit():
        return len(name) <= 2 and follower in _DATES
    if name in _BEFORE_NAMES or _ACRONYM.fullmatch(before):
        return is_lower or follower not in _STARTS
    return False


def occurrences(keyword: str, text: str) -> int:
    """Count a keyword in a text, ignoring case. Longer words count too: `flower` occurs in `Flowers`."""
    return text.casefold().count(keyword.casefold())


def split_by(text: str, separator: str) -> list[str] | None:
    """Split at a regular expression, except at the very beginning or end; return None if a part is empty."""
    parts = [part.strip() for part in re.split(separator, text.strip())]
    inner = parts[parts[0] == "" : len(parts) - (parts[-1] == "")]
    return inner if inner and all(inner) else None


def bare(word: str) -> str:
    """Return a word in lower case without the punctuation around it."""
    inside = _BARE.search(word)
    return inside[0].casefold() if inside else ""
