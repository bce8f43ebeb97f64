# SPDX-License-Identifier: Apache-2.0
"""The index ranks as BM25 does, and refuses a corpus that can't be read with file and line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from relax_plugin_search.index import Document, Index, read_documents, words

WORDS = st.lists(st.sampled_from(["oak", "elm", "fir", "ash"]), min_size=1, max_size=6).map(" ".join)


def plain_bm25(documents: list[str], query: str, number: int) -> float:
    """The score of one document as the formula has it, k1 = 1.2 and b = 0.75."""
    texts = [words(text) for text in documents]
    average = sum(map(len, texts)) / len(texts)
    score = 0.0
    for word in set(words(query)):
        holding = sum(word in text for text in texts)
        rarity = math.log(1 + (len(texts) - holding + 0.5) / (holding + 0.5))
        times = texts[number].count(word)
        score += rarity * times * 2.2 / (times + 1.2 * (0.25 + 0.75 * len(texts[number]) / average))
    return score


@given(st.lists(WORDS, min_size=1, max_size=8), WORDS, st.integers(1, 9))
def test_documents_come_in_the_order_of_bm25_and_of_the_file(texts: list[str], query: str, top_k: int) -> None:
    found = Index([Document(text, str(number)) for number, text in enumerate(texts)]).search(query, top_k)
    titled = [f"{number} {text}" for number, text in enumerate(texts)]
    scores = [plain_bm25(titled, query, number) for number in range(len(texts))]
    wanted = sorted((n for n, score in enumerate(scores) if score), key=lambda n: (-round(scores[n], 9), n))[:top_k]
    assert [round(scores[int(one.title)], 9) for one in found] == [round(scores[n], 9) for n in wanted]


def test_equal_documents_come_in_the_order_of_the_file() -> None:
    index = Index([Document("ash", "a"), Document("oak", "b"), Document("oak", "c"), Document("oak", "d")])
    assert [one.title for one in index.search("oak", 2)] == ["b", "c"]


def test_titles_are_searched_and_case_and_marks_make_no_difference() -> None:
    index = Index([Document("by the sea", "Århus"), Document("in the hills", "Rome")])
    assert [one.title for one in index.search("where is ÅRHUS?", 5)] == ["Århus"]


def test_words_that_no_document_has_find_nothing() -> None:
    assert Index([Document("oak")]).search("elm ...", 3) == []


def test_rows_may_have_other_keys_and_empty_lines_are_skipped() -> None:
    found = read_documents(Path(__file__).with_name("documents.jsonl"))
    assert [one.title for one in found] == ["Oslo", "Bergen", ""]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"text": "a"}\n{"text": \n', ":2 is not valid JSON"),
        ('{"text": "a"}\n{"text": "..."}\n', ":2 has no words"),
        ('{"title": "a"}\n', ":1 has no words"),
        ("\n\n", "has no documents"),
        ("[" * 100_000 + "\n", ":1 is not valid JSON"),
    ],
)
def test_a_row_that_is_not_a_document_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "corpus.jsonl").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_documents(tmp_path / "corpus.jsonl")


def test_a_missing_corpus_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.jsonl can't be read"):
        read_documents(tmp_path / "none.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="can't be read"):
        read_documents(tmp_path / "binary.jsonl")
