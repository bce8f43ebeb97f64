# SPDX-License-Identifier: Apache-2.0
"""Rows that training and evaluation share: equal rows, and prompts that have a passage in common.

Rows are compared as words: in Unicode's form NFKC, without case, white space and the marks that end clauses. Other
marks stay, because `1 + 2` and `1 - 2` are different tasks. Passages follow Brown et al. (arXiv 2005.14165,
appendix C): 13 words, fewer in shorter prompts, at least 8.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from relax_core.api.errors import ConfigError
from relax_core.api.task import Message, Task
from relax_core.rpc.messages import encode

LONG, SHORT = 13, 8
"""Words of a passage, and fewest words of a searched prompt. A prompt with fewer than `LONG` words is one passage."""
MOST_PASSAGES = 256
"""Most passages of one evaluation prompt that are searched in training rows; those of a longer prompt are evenly spread."""
PHRASE_ROWS, PHRASE_SHARE = 10, 0.01
"""Limits for phrases of a template: a passage in more training rows than the number and than the share is ignored."""
MOST_SEARCHED = 50_000
"""Most training rows that a run searches for shared passages at its start. Of more rows, evenly spread rows are searched."""
SHOWN = 3
"""Examples in a log line."""
_QUOTES, _DOUBLE_QUOTES = "\u2018\u2019\u201a\u201b\u2032`", "\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb"
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
_ALIKE = {mark: plain for marks, plain in ((_QUOTES, "'"), (_DOUBLE_QUOTES, '"'), (_DASHES, "-")) for mark in marks}
_MARKS = str.maketrans({**_ALIKE, **dict.fromkeys("\u00ad\u200b\u200c\u200d\u2060\ufeff", "")})
_CLAUSE_END = re.compile(r"""[.,;:?](?=\s|$)(?<=[\w)\]"'].)""")
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"  # kana and ideographs: each character counts as a word
_TOKEN = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+|\S")


def words(text: str) -> list[str]:
    """Return the normalised words and marks of a text."""
    plain = unicodedata.normalize("NFKC", text).casefold().translate(_MARKS)
    return _TOKEN.findall(_CLAUSE_END.sub("", plain.rstrip().removesuffix("?")))


class RowContent(NamedTuple):
    """The part of a row that decides whether two rows are equal."""

    key: bytes
    """Hash of 16 bytes; equal rows have equal keys."""
    words: list[str]
    """Words and marks of the prompt, without messages of the system and the assistant."""


def row_content(
    task: Task, written: Sequence[str | tuple[Message, ...] | None] = (), whole: bool = False
) -> RowContent:
    """Return the content of a row.

    The key covers the text and media of the prompt and of the `written` completions; with `whole`, also all further
    columns, because an environment may start equal prompts differently.
    """
    asked: list[str] = []
    digest = hashlib.blake2b(digest_size=16)
    for number, text in enumerate((task.prompt, *written)):
        for message in (Message("user", text),) if isinstance(text, str) else text or ():
            written_words = words(message.text)
            if number == 0 and message.role not in ("system", "assistant"):
                asked += written_words
            parts = () if isinstance(message.content, str) else message.content
            media = [f"{part.media.kind} {part.media.reference}" for part in parts if part.media]
            said = "\0".join(["\n".join(written_words), *media, ""])
            digest.update(said.encode("utf-8", errors="surrogatepass"))
    if whole:
        digest.update(encode([task.environment, task.answer, sorted(task.metadata.items())]))
    return RowContent(digest.digest(), asked)


class Rows(Protocol):
    """Rows by index, each with its content and a location to display."""

    def __len__(self) -> int: ...

    def content(self, index: int, /) -> RowContent: ...

    def where(self, index: int, /) -> str: ...


class EvalRows(NamedTuple):
    """The rows of one evaluation set."""

    rows: Rows
    indices: Sequence[int]


class Shared(NamedTuple):
    """A row that is found again in the training rows."""

    where: str
    """Location of the row."""
    first: str
    """Location of the first training row that is equal or has the passage."""
    passage: str = ""
    """The first passage that both prompts have; empty for equal rows."""

    def __str__(self) -> str:
        return f"{self.where} and {self.first}" + (f" ({self.passage!r})" if self.passage else "")


@dataclass(frozen=True, slots=True)
class SetOverlap:
    """The rows of an evaluation set that training rows repeat."""

    size: int
    equal: tuple[Shared, ...] = ()
    similar: tuple[Shared, ...] = ()
    """Rows that are not equal to a training row, but share a passage with one."""

    @property
    def share(self) -> float:
        """Share of the rows that are equal to a training row."""
        return len(self.equal) / self.size if self.size else 0.0

    def refuse(self, key: str, most: float) -> None:
        """Raise ConfigError if more than the share `most` is equal. `key`: the configuration key of the set."""
        if self.share > most:
            fix = f"remove these rows from one of the two files, or raise eval.max_overlap = {most:g}"
            raise ConfigError(key, f"{self.said('equal')}", fix)

    def said(self, how: str) -> str:
        """Return a sentence about the rows that are `equal` or `similar`, with examples."""
        shared = self.equal if how == "equal" else self.similar
        what = "are also in data.train" if how == "equal" else f"share {SHORT} to {LONG} words in a row with data.train"
        return f"{len(shared)} of {self.size} tasks {what}{_examples(shared)}"


@dataclass(frozen=True, slots=True)
class Overlap:
    """The comparison of training rows with each other and with evaluation sets."""

    size: int
    """Number of training rows."""
    searched: int
    """Number of training rows that were searched for shared passages."""
    repeated: tuple[Shared, ...] = ()
    """Training rows that are equal to an earlier training row."""
    sets: Mapping[str, SetOverlap] = field(default_factory=dict)
    evaluated: frozenset[int] = frozenset()
    """Indices of the training rows that are equal to a row of an evaluation set."""

    def said(self) -> str:
        """Return a sentence about repeated training rows, with examples."""
        return f"{len(self.repeated)} of {self.size} rows repeat an earlier row{_examples(self.repeated)}"


def find_overlap(
    train: Rows, indices: Sequence[int], sets: Mapping[str, EvalRows], most_searched: int | None = None
) -> Overlap:
    """Compare the training rows at `indices` with each other and with evaluation sets; read each row once.

    `most_searched`: most training rows that are searched for shared passages; None: all.
    """
    tasks = [
        (name, index, eval_rows.rows.content(index)) for name, eval_rows in sets.items() for index in eval_rows.indices
    ]
    keys: dict[bytes, list[int]] = defaultdict(list)
    starts: dict[tuple[str, str], dict[tuple[int, str], list[int]]] = defaultdict(lambda: defaultdict(list))
    for task, (_, _, content) in enumerate(tasks):
        keys[content.key].append(task)
        for start, size, passage in _passages(content.words):
            starts[start][size, passage].append(task)
    sizes = {size for passages in starts.values() for size, _ in passages}
    equal: dict[int, int] = {}
    holders: dict[tuple[int, str], tuple[int, int]] = {}  # first training row with the passage, number of such rows
    first: dict[bytes, int] = {}
    repeated: list[Shared] = []
    evaluated: set[int] = set()
    searched = min(len(indices), most_searched or len(indices))
    for number, index in enumerate(indices):
        content = train.content(index)
        earlier = first.setdefault(content.key, index)
        if earlier != index:
            repeated.append(Shared(train.where(index), train.where(earlier)))
        for task in keys.get(content.key, ()):
            equal.setdefault(task, index)
            evaluated.add(index)
        is_searched = starts and number * searched // len(indices) != (number - 1) * searched // len(indices)
        for known in _known_passages(content.words, starts, sizes) if is_searched else ():
            earlier, count = holders.get(known, (index, 0))
            holders[known] = earlier, count + 1
    similar: dict[int, tuple[int, str]] = {}
    limit = max(min(PHRASE_ROWS, searched / 2), PHRASE_SHARE * searched)
    for found in starts.values():
        for known, owners in found.items():
            index, count = holders.get(known, (0, 0))
            for task in owners if 0 < count <= limit else ():
                similar.setdefault(task, (index, known[1]))
    overlaps = {}
    for name, one in sets.items():
        own = [(task, one.rows.where(index)) for task, (of, index, _) in enumerate(tasks) if of == name]
        overlaps[name] = SetOverlap(
            len(own),
            tuple(Shared(where, train.where(equal[task])) for task, where in own if task in equal),
            tuple(
                Shared(where, train.where(similar[task][0]), similar[task][1])
                for task, where in own
                if task in similar and task not in equal
            ),
        )
    return Overlap(len(indices), searched, tuple(repeated), overlaps, frozenset(evaluated))


def kept_apart(
    run: Any, rows: Rows, train: Sequence[int], sets: Mapping[str, EvalRows]
) -> tuple[Sequence[int], list[tuple[str, str]]]:
    """Return the indices of the training rows without those that equal a held-out row, and log lines (level, text).

    `train`: all rows, or all but the held-out rows. `sets`: the evaluation sets of the run by name, or the held-out
    rows as a set; a resumed run may evaluate other rows than those it holds out. Raises ConfigError for a set that shares
    more than `eval.max_overlap` with the training rows, or if no training row is left.
    """
    if (run.eval.sets or not sets) and len(train) < len(rows):
        held = EvalRows(rows, sorted(set(range(len(rows))).difference(train)))
        equal = find_overlap(rows, train, {"": held}, 1).evaluated
        train = tuple(index for index in train if index not in equal)
    if not sets:
        return train, []
    overlap = find_overlap(rows, train, sets, MOST_SEARCHED)
    said = [("info", f"data.train: {overlap.said()}")] if overlap.repeated else []
    if not run.eval.sets and overlap.evaluated:
        kept = tuple(index for index in train if index not in overlap.evaluated)
        said.append(("info", f"{len(train) - len(kept)} rows equal a held-out row and are not trained on"))
        if not kept:
            fix = "each row of data.train repeats a held-out row: name [[eval.sets]], or set eval.every = 0"
            raise ConfigError("eval.size", run.eval.size, fix)
        train = kept
    if not run.eval.sets:
        num_held, left, step = sum(len(held.indices) for held in sets.values()), len(train), run.rollout.groups_per_step
        if left < max((overlap.size + num_held) / 2, step):
            text = (
                f"{overlap.size + num_held} tasks: {num_held} are held out, {overlap.size - left} equal a held-out task"
            )
            fix = "lower eval.size, name [[eval.sets]], or lower rollout.groups_per_step"
            said.append(("warning", f"{text}, {left} remain to train on, and a step takes {step}; {fix}"))
    if overlap.searched < overlap.size:
        part = f"{overlap.searched} of {overlap.size} rows of data.train, evenly spread"
        said.append(("info", f"shared words are searched in {part}; `relax data check` searches all rows"))
    files = {table.name: (f"eval.sets.{number}.path", table.path) for number, table in enumerate(run.eval.sets)}
    for name, shared in overlap.sets.items():
        if name in files:
            shared.refuse(files[name][0], run.eval.max_overlap)
            meant = files[name][1] == run.data.train
            said.append(
                ("warning" if shared.equal and not meant else "info", f"eval set {name}: {shared.said('equal')}")
            )
        if shared.similar:
            said.append(("warning", f"eval set {name}: {shared.said('similar')}"))
    return train, said


def _word_places(tokens: Sequence[str]) -> list[int]:
    """Return the places of the words, without the marks between them."""
    return [place for place, token in enumerate(tokens) if token[0].isalnum() or token[0] == "_"]


def _passage(tokens: Sequence[str], places: Sequence[int], at: int, size: int) -> str:
    """Return the passage of `size` words from the word number `at`, with the marks between the words."""
    return " ".join(tokens[places[at] : places[at + size - 1] + 1])


def _passages(tokens: Sequence[str]) -> Iterator[tuple[tuple[str, str], int, str]]:
    """Yield (start, number of words, passage) of each passage of an evaluation prompt that is searched.

    The start is the first word and the word `SHORT` - 1 words later, by which passages are found fast.
    """
    places = _word_places(tokens)
    size = min(LONG, len(places))
    count = min(len(places) - size + 1, MOST_PASSAGES) if size >= SHORT else 0
    for number in range(count):
        first = number * (len(places) - size) // max(count - 1, 1)
        start = tokens[places[first]], tokens[places[first + SHORT - 1]]
        yield start, size, _passage(tokens, places, first, size)


def _known_passages(
    tokens: Sequence[str], starts: Mapping[tuple[str, str], Collection[tuple[int, str]]], sizes: Collection[int]
) -> set[tuple[int, str]]:
    """Return the searched passages that a training prompt has. `starts`: passages by their starts; `sizes`: their sizes."""
    places = _word_places(tokens)
    matches = set()
    for word, (first, last) in enumerate(zip(places, places[SHORT - 1 :], strict=False)):
        searched = starts.get((tokens[first], tokens[last]), frozenset())
        for size in sizes if searched else ():
            if word + size <= len(places) and (passage := (size, _passage(tokens, places, word, size))) in searched:
                matches.add(passage)
    return matches


def _examples(shared: Sequence[Shared]) -> str:
    more = "; ..." if len(shared) > SHOWN else ""
    return f": {'; '.join(map(str, shared[:SHOWN]))}{more}" if shared else ""
