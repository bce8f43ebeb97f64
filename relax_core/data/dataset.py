# SPDX-License-Identifier: Apache-2.0
"""Supervised data: the rows of a task source as examples, laid out token by token, and as rows of the bus.

Turns of the policy are joined by the same `start` and `delta` of the model family as in a rollout, so a warm start trains
what generation will see.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from relax_core.api.algorithm import Source
from relax_core.api.batch import AttemptId, Ragged, RowBatch, RowId
from relax_core.api.errors import ConfigError
from relax_core.api.family import ModelFamily, Rendered
from relax_core.api.source import TaskSource
from relax_core.api.task import Message, Task
from relax_core.api.trainer import Chosen
from relax_core.data.media_pipeline import context_of
from relax_core.data.task_row import MediaOrigin, RowError, text_or_messages
from relax_core.data.tasks import HOLD_OUT, TaskSet, check_placeholders, hold_out, surely_fits
from relax_core.media.store import key_bytes

Text = str | tuple[Message, ...]
TrainOn = Literal["completion", "all"]
SPEAKER = "assistant"
Hold = Callable[[Rendered, Sequence[Message]], Rendered]
"""A function that puts as many tokens as the messages' media take where a rendering has one for each."""


@dataclass(frozen=True, slots=True)
class Example:
    """One row laid out token by token, as if the policy had sampled it; both columns are [tokens]."""

    tokens: tuple[int, ...]
    mask: tuple[int, ...]
    """1 where a token is trained; never the first one, which no token precedes."""
    media: tuple[str, ...] = ()
    """Names of the media that it shows, in order: keys where they are held, else references."""

    @property
    def num_trained(self) -> int:
        return sum(self.mask)

    def cut(self, limit: int) -> Example:
        """Keep the first tokens; no medium is cut off or in two."""
        return self if self.media else Example(self.tokens[:limit], self.mask[:limit])


class _Run(NamedTuple):
    """Tokens of one kind, and the messages that they render."""

    rendered: Rendered
    shows: Sequence[Message] = ()
    trained: bool = False


def example(
    family: ModelFamily,
    prompt: Text,
    completion: Text | None,
    train_on: TrainOn = "completion",
    hold: Hold | None = None,
) -> Example:
    """Lay out a prompt with its completion, or a conversation alone, whose assistant turns are trained.

    Without `hold`, each medium has one token. Raises ConfigError (field `data.train`) where there is nothing to learn from it.
    """
    if isinstance(prompt, str):
        runs = _plain(family, prompt, completion)
    else:
        given = 0 if completion is None else len(prompt)
        runs = _conversation(family, said_in(prompt, completion), given)
    tokens: list[int] = []
    mask: list[int] = []
    media: list[str] = []
    places = frozenset(family.placeholders.values())
    for run in runs:
        if hold is not None:
            rendered = hold(run.rendered, run.shows)
        else:
            rendered = run.rendered
            check_placeholders(family, rendered, run.shows)
        trained = run.trained or train_on == "all"
        tokens += rendered.tokens
        mask += [int(trained and token not in places) for token in rendered.tokens]
        media += rendered.media
    mask[:1] = [0]
    return Example(tuple(tokens), tuple(mask), tuple(media))


def said_in(prompt: Text, completion: Text | None) -> tuple[Message, ...]:
    """Join all messages of a row, in order; those of plain text show nothing."""
    return () if isinstance(prompt, str) else (*prompt, *_messages(completion))


def _plain(family: ModelFamily, prompt: str, completion: Text | None) -> list[_Run]:
    if not isinstance(completion, str):
        got = (
            "nothing to answer a prompt of plain text"
            if completion is None
            else "messages behind a prompt of plain text"
        )
        raise ConfigError("data.train", got, "give the completion as text, or write the prompt as messages")
    said = Rendered(family.turn(prompt, Message(SPEAKER, completion)))
    return [_Run(family.start(prompt)), _Run(said, trained=True)]


def _messages(completion: Text | None) -> tuple[Message, ...]:
    return (Message(SPEAKER, completion),) if isinstance(completion, str) else completion or ()


def _conversation(family: ModelFamily, messages: Sequence[Message], given: int) -> list[_Run]:
    """Render a conversation; messages after the policy's last turn are left out."""
    turns = [at for at, message in enumerate(messages) if at >= given and message.role == SPEAKER]
    if not turns:
        raise ConfigError(
            "data.train", "a conversation without a turn of the assistant", "add one, or give a completion"
        )
    runs = [_Run(family.start(messages[: turns[0]]), messages[: turns[0]])]
    for at, following in zip(turns, [*turns[1:], None], strict=True):
        said = family.turn(messages[:at], messages[at])
        runs.append(_Run(Rendered(said), trained=True))
        if following is not None:
            heard = messages[at + 1 : following]
            runs.append(_Run(family.delta(messages[: at + 1], heard, said[-1]), heard))
    return runs


COLUMNS = {Source.DATASET: ("completion",), Source.PAIRS: ("chosen", "rejected")}
"""What is trained, by what the algorithm learns from; a dataset's row may be a conversation instead."""

MARGIN = "margin"


class Dataset:
    """The usable rows of a task source by number, each an example to train on as it stands, or two of a pair.

    It decides what may be issued; in which order is the sampler's. Every row is read once when it is opened, and tokenized
    when it is asked for.
    """

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
        """The model family that renders the rows."""
        return self._family

    def __getitem__(self, index: int) -> Task:
        return self._tasks[self._kept[index]]

    def where(self, index: int) -> str:
        """`file:line` of a row."""
        return self._source.where(self._kept[index])

    def examples(self, index: int, hold: Hold | None = None) -> tuple[Example, ...]:
        """Lay out a row: one example, or the chosen and the rejected one of a pair. Raises MediaRefused where `hold` does."""
        return tuple(self._fitted(found) for found in self._examples(self._kept[index], hold))

    def messages(self, index: int) -> tuple[Message, ...]:
        """All messages of a row."""
        return self._messages(self._tasks[self._kept[index]], self._kept[index])

    def margin(self, index: int) -> float:
        """The number by which a pair's chosen completion should be ahead."""
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

    def _check(self) -> None:
        """Read every row once: its completions, and its length."""
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
        """Whether the characters of a row alone say that it fits."""
        parts = [part for part in (task.prompt, text) if part is not None]
        messages = [m for part in parts for m in ((Message("", part),) if isinstance(part, str) else part)]
        return surely_fits(messages, lambda: self._overhead(task, text, row), self._limit or 0)

    def _overhead(self, task: Task, text: Text | None, row: int) -> int:
        """Count the tokens of the template around words under these roles, as the first row with them shows."""
        shape = tuple(
            "text" if isinstance(part, str) else ",".join(m.role for m in part or ()) for part in (task.prompt, text)
        )
        if shape not in self._overheads:
            prompt, completion = (
                (part and "x") if part is None or isinstance(part, str) else tuple(Message(m.role, "x") for m in part)
                for part in (task.prompt, text)
            )
            try:
                self._overheads[shape] = len(example(self._family, prompt or "", completion).tokens)
            except ConfigError as error:
                raise ConfigError(error.field, f"{error.got} at {self._source.where(row)}", error.fix) from error
        return self._overheads[shape]


Build = Callable[[Chosen], Any]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Rows of one evaluation set."""

    name: str
    dataset: Dataset
    indices: Sequence[int]

    def rows(self, margins: bool = False, hold: Hold | None = None) -> RowBatch:
        """Lay all of them out, a group each."""
        examples = {AttemptId(group, member, 0): found for group, index in enumerate(self.indices)
                    for member, found in enumerate(self.dataset.examples(index, hold))}  # fmt: skip
        given = [self.dataset.margin(self.indices[attempt.group]) for attempt in examples] if margins else None
        return row_batch(examples, given, hold is not None)


def open_training(run: Any, build: Build, form: Source) -> tuple[Dataset, Sequence[int]]:
    """Open the rows to train on; also give the numbers of those that may be issued."""
    dataset = _open(run, build, form, "data.train", str(run.data.train), run.data.columns)
    if not run.eval.every or run.eval.sets:
        return dataset, range(len(dataset))
    return dataset, dataset.hold_out(run.eval.size, run.seed)[0]


def open_held_out(run: Any, build: Build, form: Source) -> list[HeldOut]:
    """Open the evaluation sets: those that are named, else a seeded part of the training file."""
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
    """Say how the rows were used, for people."""
    said = [f"{dataset.num_skipped} rows are skipped: they are too long"] if dataset.num_skipped else []
    if held := len(dataset) - len(train):
        said.append(f"{held} of {len(dataset)} rows are held out for evaluation; name [[eval.sets]] to use others")
    return said


def row_batch(
    examples: Mapping[AttemptId, Example], margins: Sequence[float] | None = None, media: bool = False
) -> RowBatch:
    """Make rows of the bus, one a sample. They have no versions: nobody sampled them."""
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
