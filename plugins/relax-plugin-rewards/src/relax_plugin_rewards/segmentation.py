# SPDX-License-Identifier: Apache-2.0
"""Splitting of a text into words, sentences and paragraphs by rules, without data about a language."""

from __future__ import annotations

import re

_ABBREVIATION = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|Inc|Ltd|Co|e\.g|i\.e|U\.S)|\b[A-Z])\.$")
_SENTENCE_END = re.compile(
    r"(?<![.!?…])[.!?…]++(?:(?=\s)|[\"'\u201d\u2019)\]]++(?=\s+[^a-z\s]|\s*$))|[\u3002\uff01\uff1f]++[\u300d\u300f]*"
)
_WORD = re.compile(r"\w+")
_BARE = re.compile(r"\w(?:.*\w)?", re.DOTALL)


def words(text: str) -> list[str]:
    return _WORD.findall(text)


def sentences(text: str) -> list[str]:
    """Split a text into sentences, also at empty lines. An abbreviation or initial does not end a sentence."""
    found: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        start = 0
        for end in _SENTENCE_END.finditer(block):
            if not _ABBREVIATION.search(block[max(start, end.end() - 12) : end.end()]):
                found.append(block[start : end.end()])
                start = end.end()
        found.append(block[start:])
    return [sentence.strip() for sentence in found if _WORD.search(sentence)]


def occurrences(keyword: str, text: str) -> int:
    """Count a keyword in a text, ignoring case. Longer words count too: `flower` occurs in `Flowers`."""
    return text.casefold().count(keyword.casefold())


def split_by(text: str, separator: str) -> list[str] | None:
    """Split at a separator, except at the very beginning or end; return None if a part is empty."""
    parts = [part.strip() for part in text.strip().split(separator)]
    inner = parts[parts[0] == "" : len(parts) - (parts[-1] == "")]
    return inner if inner and all(inner) else None


def bare(word: str) -> str:
    """Return a word in lower case without the punctuation around it."""
    inside = _BARE.search(word)
    return inside[0].casefold() if inside else ""
