# SPDX-License-Identifier: Apache-2.0
"""An in-memory BM25 index of the documents in a JSON lines file.

A word is a run of letters, digits and underscores; case is ignored. The index does no stemming and has no stop words,
so it treats all languages and vocabularies the same. Weights are computed when the index is built; a query only sums
weights.
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIELD = "environment.corpus"
TERM_SATURATION, LENGTH_NORMALIZATION = 1.2, 0.75
"""The parameters k1 and b of BM25, at their usual values."""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Document:
    """One document; a search matches its text and its title."""

    text: str
    title: str = ""


class Index:
    """An inverted index: for each word, its documents and the weight that the word adds to each document's score."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = tuple(documents)
        counts = [Counter(words(f"{one.title} {one.text}")) for one in self.documents]
        lengths = [count.total() for count in counts]
        average = sum(lengths) / max(1, len(lengths)) or 1.0
        held_by = Counter(word for count in counts for word in count)
        self._postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            room = TERM_SATURATION * (1 - LENGTH_NORMALIZATION + LENGTH_NORMALIZATION * length / average)
            for word, times in count.items():
                rarity = math.log(1 + (len(counts) - held_by[word] + 0.5) / (held_by[word] + 0.5))
                self._postings[word].append((number, rarity * times * (TERM_SATURATION + 1) / (times + room)))

    def search(self, query: str, top_k: int) -> list[Document]:
        """Return the `top_k` best documents that contain a word of the query; ties stay in the order of the file."""
        scores: dict[int, float] = defaultdict(float)
        for word in sorted(set(words(query))):
            for number, weight in self._postings.get(word, ()):
                scores[number] += weight
        best = heapq.nsmallest(top_k, scores, key=lambda number: (-scores[number], number))
        return [self.documents[number] for number in best]


def words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def read_documents(path: Path) -> list[Document]:
    """Read documents from rows `{"text", "title"}`; extra keys are ignored. Raises ValueError with file and line."""
    documents = []
    try:
        with path.open("rb") as file:  # lines end at \n alone: JSON may hold other characters that end lines of text
            for number, line in enumerate(file, 1):
                if line.strip():
                    documents.append(_document(f"{path}:{number}", line))
    except OSError as error:
        raise ValueError(f"{FIELD}: {path} can't be read ({error}); name a JSON lines file in UTF-8") from error
    if not documents:
        raise ValueError(f'{FIELD}: {path} has no documents; write one {{"text": ...}} on each line')
    return documents


def _document(where: str, line: bytes) -> Document:
    try:
        row: Any = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # refuses half of a surrogate pair, which is not a character
    except UnicodeError as error:
        raise ValueError(f"{FIELD}: {where} can't be read ({error}); write whole characters in UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{FIELD}: {where} is not valid JSON ({error}); write one object on each line") from error
    text, title = (row.get("text"), row.get("title") or "") if isinstance(row, dict) else (None, "")
    if not isinstance(text, str) or not isinstance(title, str) or not words(f"{title} {text}"):
        raise ValueError(
            f'{FIELD}: {where} has no words in "text"; give each document a "text", and write the "title" as text'
        )
    return Document(text, title)
