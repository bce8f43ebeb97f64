# SPDX-License-Identifier: Apache-2.0
"""A dataset: the rows of a task source as examples to train on as they stand, one a row or two a pair.

It decides what may be issued; in which order is the sampler's. Every row is looked at once when it is opened, and
tokenized when it is asked for.

Opens the datasets of a run from its configuration, and lays examples out as rows of the bus.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relax_core.api.algorithm import Source
from relax_core.api.batch import AttemptId, Ragged, RowBatch, RowId
from relax_core.api.errors import ConfigError
from relax_core.api.family import ModelFamily, Rendered
from relax_core.api.source import TaskSource
from relax_core.api.task import Message, Task
from relax_core.api.trainer import Chosen
from relax_core.data.example import Example, Hold, Text, TrainOn, example, said_in
from relax_core.data.factories import HOLD_OUT, context_of
from relax_core.data.row_media import MediaOrigin
from relax_core.data.task_files import RowError, text_or_messages
from relax_core.data.tasks import PROBE_SLACK, TaskSet, hold_out
from relax_core.media.store import key_bytes

COLUMNS = {Source.DATASET: ("completion",), Source.PAIRS: ("chosen", "rejected")}
"""What is trained, by what the algorithm learns from; a dataset's row may be a conversation instead."""

MARGIN = "margin"


class Dataset:
    """Usable rows by number."""

    def __init__(
        self, source: TaskSource, family: ModelFamily, form: Source, *, system_prompt: str = "",
        max_row_tokens: int | None = None, too_long: str = "skip", train_on: TrainOn = "completion",
        media: Sequence[str] = (), check: bool = True,
    ) -> None:  # fmt: skip
        """`source` and `family` are open; `media`: kinds that the run has processors for.

        Raises ConfigError at the first row that can't be used, unless not `check`."""
        self._tasks = TaskSet(source, family, system_prompt=system_prompt, media=media, check=False)
        self._source, self._family, self._form = source, family, form
        self._limit, self._too_long, self._train_on = max_row_tokens, too_long, train_on
        self._overheads: dict[tuple[str, ...], int] = {}
        self._kept = array("q", range(len(source)))
        self.num_skipped = 0
        if check:
            self._check()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def family(self) -> ModelFamily:
        """What renders its rows."""
        return self._family

    def __getitem__(self, index: int) -> Task:
        return self._tasks[self._kept[index]]

    def where(self, index: int) -> str:
        """`file:line` of a row."""
        return self._source.where(self._kept[index])

    def examples(self, index: int, hold: Hold | None = None) -> tuple[Example, ...]:
        """One, or the chosen and the rejected one of a pair. Raises MediaRefused where `hold` does."""
        return tuple(self._fitted(found) for found in self._examples(self._kept[index], hold))

    def messages(self, index: int) -> tuple[Message, ...]:
        """All that a row shows."""
        row = self._kept[index]
        return self._messages(self._tasks[row], row)

    def margin(self, index: int) -> float:
        """By how much a pair's chosen completion should be ahead."""
        value = self[index].column(MARGIN)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(
                "data.train", f"{self.where(index)} without a number in {MARGIN!r}", "write it, or set margins = false"
            )
        return float(value)

    def prompt(self, index: int) -> Rendered:
        """The tokens of the first example, for people."""
        return Rendered(self.examples(index)[0].tokens)

    def hold_out(self, size: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(train, eval) indices in order of the file; the same for the same seed and rows."""
        return hold_out(len(self), size, seed)

    def examine(self, row: int) -> Rendered | None:
        """The tokens of a row of the source; None where it is skipped. Raises ConfigError for a bad one."""
        if not self._usable(row):
            return None
        longest = max((self._fitted(found) for found in self._examples(row)), key=lambda found: len(found.tokens))
        return Rendered(longest.tokens)

    # -- what a row says ----------------------------------------------------------------------------------------

    def _texts(self, task: Task, row: int) -> tuple[Text | None, ...]:
        """The completions of a row; one of None is a conversation that holds its own."""
        names = COLUMNS[self._form]
        found = tuple(self._text(task, name, row) for name in names)
        conversation = self._form is Source.DATASET and not isinstance(task.prompt, str)
        if None in found and not conversation:
            name, others = names[found.index(None)], ", ".join(sorted(task.metadata)) or "none beside the prompt"
            fix = f"write it, or point to another column: columns = {{{name} = ...}} (there are {others})"
            raise ConfigError("data.train", f"{self._source.where(row)} without {name!r}", fix)
        return found

    def _text(self, task: Task, name: str, row: int) -> Text | None:
        value: Any = task.column(name)
        if value is None:
            return None
        try:
            return text_or_messages(value, name, MediaOrigin(Path()))
        except RowError as error:
            raise ConfigError("data.train", f"{self._source.where(row)}: {error}", "correct the row") from error

    def _messages(self, task: Task, row: int) -> tuple[Message, ...]:
        return tuple(message for text in self._texts(task, row) for message in said_in(task.prompt, text))

    def _examples(self, row: int, hold: Hold | None = None) -> Iterator[Example]:
        task = self._tasks[row]
        for text in self._texts(task, row):
            try:
                yield example(self._family, task.prompt, text, self._train_on, hold)
            except ConfigError as error:
                raise ConfigError(error.field, f"{error.got} at {self._source.where(row)}", error.fix) from error

    # -- lengths ------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Read every row once: what is trained, and lengths."""
        kept = array("q", (row for row in range(len(self._source)) if self._usable(row)))
        self.num_skipped = len(self._kept) - len(kept)
        self._kept = kept
        if not kept:
            got = f"{self._limit}, which leaves nothing to train of any row"
            raise ConfigError("data.max_row_tokens", got, "raise it, or shorten the rows")

    def _usable(self, row: int) -> bool:
        """False where it is skipped; raises where it must not be."""
        task = self._tasks[row]
        texts = self._texts(task, row)
        self._tasks.look(self._messages(task, row), row)
        if self._limit is None or all(self._surely_fits(task, text, row) for text in texts):
            return True
        found = list(self._examples(row))
        longest = max(len(one.tokens) for one in found)
        if longest > self._limit and self._too_long == "error":
            got = f"{self._limit}, but {self._source.where(row)} has {longest} tokens"
            raise ConfigError("data.max_row_tokens", got, 'raise it, or set data.too_long = "skip" or "truncate"')
        if self._too_long == "truncate":
            return all(self._fitted(one).num_trained for one in found)
        return longest <= self._limit

    def _fitted(self, found: Example) -> Example:
        return found if self._limit is None else found.cut(self._limit)

    def _surely_fits(self, task: Task, text: Text | None, row: int) -> bool:
        """Whether its characters alone say so, which spares most tokenizing: a token of ASCII has one or more."""
        parts = [part for part in (task.prompt, text) if part is not None]
        messages = [m for part in parts for m in ((Message("", part),) if isinstance(part, str) else part)]
        if any(m.tool_calls or not isinstance(m.content, str) or not m.content.isascii() for m in messages):
            return False
        length = sum(len(m.text) for m in messages)
        return length + self._overhead(task, text, row) + PROBE_SLACK <= (self._limit or 0)

    def _overhead(self, task: Task, text: Text | None, row: int) -> int:
        """Tokens of the template around words under these roles, as the first row with them shows."""
        shape = tuple(
            "text" if isinstance(part, str) else ",".join(m.role for m in part or ()) for part in (task.prompt, text)
        )
        if shape not in self._overheads:
            blank = (_blank(part) for part in (task.prompt, text))
            try:
                self._overheads[shape] = len(example(self._family, *blank).tokens)  # type: ignore[arg-type]
            except ConfigError as error:
                raise ConfigError(error.field, f"{error.got} at {self._source.where(row)}", error.fix) from error
        return self._overheads[shape]


def _blank(part: Text | None) -> Text | None:
    """The same roles with one letter each."""
    if part is None or isinstance(part, str):
        return part and "x"
    return tuple(Message(message.role, "x") for message in part)


Build = Callable[[Chosen], Any]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Rows to be judged on."""

    name: str
    dataset: Dataset
    indices: Sequence[int]

    def rows(self, margins: bool = False, hold: Hold | None = None) -> RowBatch:
        """All of them, a group each."""
        examples = {AttemptId(group, member, 0): found for group, index in enumerate(self.indices)
                    for member, found in enumerate(self.dataset.examples(index, hold))}  # fmt: skip
        given = [self.dataset.margin(self.indices[attempt.group]) for attempt in examples] if margins else None
        return row_batch(examples, given, hold is not None)


def open_training(run: Any, build: Build, form: Source) -> tuple[Dataset, Sequence[int]]:
    """The rows to train on, and which of them may be issued."""
    dataset = _open(run, build, form, "data.train", str(run.data.train), run.data.columns)
    if not run.eval.every or run.eval.sets:
        return dataset, range(len(dataset))
    return dataset, dataset.hold_out(run.eval.size, run.seed)[0]


def open_held_out(run: Any, build: Build, form: Source) -> list[HeldOut]:
    """The evaluation sets: those that are named, else a seeded part of the training file."""
    if not run.eval.every:
        return []
    if not run.eval.sets:
        dataset = _open(run, build, form, "data.train", str(run.data.train), run.data.columns)
        return [HeldOut(HOLD_OUT, dataset, dataset.hold_out(run.eval.size, run.seed)[1])]
    found = []
    for at, table in enumerate(run.eval.sets):
        dataset = _open(run, build, form, f"eval.sets.{at}.path", str(table.path), table.columns or run.data.columns)
        found.append(HeldOut(table.name, dataset, range(min(table.size or len(dataset), len(dataset)))))
    return found


def remarks(dataset: Dataset, train: Sequence[int]) -> list[str]:
    """What a person should know of how the rows were used."""
    said = [f"{dataset.num_skipped} rows are skipped: they are too long"] if dataset.num_skipped else []
    if held := len(dataset) - len(train):
        said.append(f"{held} of {len(dataset)} rows are held out for evaluation; name [[eval.sets]] to use others")
    return said


def row_batch(
    examples: Mapping[AttemptId, Example], margins: Sequence[float] | None = None, media: bool = False
) -> RowBatch:
    """One row a sample. They have no versions: nobody sampled them."""
    rows = list(examples.values())
    lengths = np.array([len(row.tokens) for row in rows], np.int64)

    def ragged(values: list[tuple[int, ...]], dtype: Any) -> Ragged:
        flat = [value for row in values for value in row]
        return Ragged(np.array(flat, dtype), lengths)

    columns = {
        "tokens": ragged([row.tokens for row in rows], np.int32),
        "loss_mask": ragged([row.mask for row in rows], np.uint8),
    }
    if margins is not None:
        columns["margins"] = Ragged(np.array(margins, np.float32), np.ones(len(rows), np.int64))
    if media:
        columns["media"] = Ragged.of([key_bytes(row.media) for row in rows], like=key_bytes(()))
    return RowBatch(tuple(RowId(*attempt, 0) for attempt in examples), columns)


def _open(run: Any, build: Build, form: Source, key: str, path: str, columns: Mapping[str, str]) -> Dataset:
    family: ModelFamily = build(run.family.chosen)
    family.open(run.model.model_dump(mode="json"))
    source = build(run.source.chosen)
    try:
        source.open(path, columns)
        return Dataset(
            source, family, form, system_prompt=run.data.system_prompt, too_long=run.data.too_long,
            max_row_tokens=run.data.max_row_tokens or context_of(run), train_on=run.data.train_on,
            media=[type(build(each.chosen)).medium for each in run.media],
        )  # fmt: skip
    except ConfigError as error:
        field = key if error.field in ("data", "data.train") else error.field
        raise ConfigError(field, error.got, error.fix) from error  # a source does not know which key names its file
