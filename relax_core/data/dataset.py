# SPDX-License-Identifier: Apache-2.0
"""Supervised data: tokenized training examples from rows of a task source, and their conversion to rows of the bus.

The policy's turns are joined with the model family's `start` and `delta`, as in a rollout. A warm start therefore
trains on the token sequences that generation will see.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from relax_core.api.algorithm import Source
from relax_core.api.batch import AttemptId, Ragged, RowBatch, RowId
from relax_core.api.component import Chosen
from relax_core.api.environment import Tool
from relax_core.api.errors import ConfigError
from relax_core.api.family import ModelFamily, Rendered
from relax_core.api.model_folder import NO_BOUND, bounded_context
from relax_core.api.source import TaskSource
from relax_core.api.task import Message, Task
from relax_core.data.overlap import RowContent, row_content
from relax_core.data.repeated_prompt import Text, without_prompt
from relax_core.data.row_proof import SPEAKER, example_faults
from relax_core.data.task_files import source_access
from relax_core.data.task_row import MediaOrigin, RowError, text_or_messages
from relax_core.data.tasks import HOLD_OUT, RowSet, charged_to, check_placeholders
from relax_core.media.access import SourceAccess
from relax_core.media.store import key_bytes

TrainOn = Literal["completion", "all"]
Hold = Callable[[Rendered, Sequence[Message]], Rendered]
"""A function that expands each medium's single placeholder in a rendering to as many tokens as the medium takes."""


@dataclass(frozen=True, slots=True)
class Example:
    """A training example as the tokens that the policy would have sampled; `tokens` and `mask` are [tokens]."""

    tokens: tuple[int, ...]
    mask: tuple[int, ...]
    """1 for a trained token, else 0. The first token is never trained, because no token precedes it."""
    media: tuple[str, ...] = ()
    """Media of the example, in order: keys of the media store if the placeholders are expanded, else references."""

    @property
    def num_trained(self) -> int:
        return sum(self.mask)

    def cut(self, limit: int) -> Example:
        """Cut the example to its first `limit` tokens. An example with media stays whole: media can't be cut."""
        return self if self.media else Example(self.tokens[:limit], self.mask[:limit])


@dataclass(frozen=True, slots=True)
class DatasetSettings:
    """The rules for the rows of one file."""

    system_prompt: str = ""
    max_row_tokens: int | None = None
    too_long: str = "skip"
    """Rule for rows of more than `max_row_tokens`, as in `data.too_long`."""
    train_on: TrainOn = "completion"
    media: Sequence[str] = ()
    """Kinds of media that a processor reads."""
    access: SourceAccess = field(default_factory=SourceAccess)


class _Run(NamedTuple):
    """Consecutive tokens that are all trained or all untrained, with the messages from which they were rendered."""

    rendered: Rendered
    shows: Sequence[Message] = ()
    trained: bool = False


def example(
    family: ModelFamily,
    prompt: Text,
    completion: Text | None,
    train_on: TrainOn = "completion",
    hold: Hold | None = None,
    tools: Sequence[Tool] = (),
) -> Example:
    """Tokenize a prompt and its completion; without a completion, train the assistant turns of the prompt.

    If `hold` is None, each medium has one token. `tools`: the tools that the prompt shows.
    Raises ConfigError (field `data.train`) if no text is to be trained.
    """
    if isinstance(prompt, str):
        if not isinstance(completion, str):
            what = "no completion for" if completion is None else "messages after"
            fix = "give the completion as text, or write the prompt as messages"
            raise ConfigError("data.train", f"{what} a prompt of plain text", fix)
        said = Rendered(family.turn(prompt, Message(SPEAKER, completion)))
        runs = [_Run(family.start(prompt)), _Run(said, trained=True)]
    else:
        given = 0 if completion is None else len(prompt)
        runs = _conversation(family, said_in(prompt, completion), given, tools)
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
    """Return the messages of a prompt and its completion; none for a plain-text prompt, which has no media."""
    return () if isinstance(prompt, str) else (*prompt, *_messages(completion))


def _messages(completion: Text | None) -> tuple[Message, ...]:
    return (Message(SPEAKER, completion),) if isinstance(completion, str) else completion or ()


def _conversation(
    family: ModelFamily, messages: Sequence[Message], given: int, tools: Sequence[Tool] = ()
) -> list[_Run]:
    """Render a conversation up to its last assistant turn. Assistant turns at index `given` or later are trained."""
    turns = [index for index, message in enumerate(messages) if index >= given and message.role == SPEAKER]
    if not turns:
        raise ConfigError(
            "data.train", "a conversation without a turn of the assistant", "add such a turn, or a completion"
        )
    runs = [_Run(family.start(messages[: turns[0]], tools), messages[: turns[0]])]
    for index, following in zip(turns, [*turns[1:], None], strict=True):
        said = family.turn(messages[:index], messages[index])
        runs.append(_Run(Rendered(said), trained=True))
        if following is not None:
            heard = messages[index + 1 : following]
            runs.append(_Run(family.delta(messages[: index + 1], heard, said[-1]), heard))
    return runs


COLUMNS = {Source.DATASET: ("completion",), Source.PAIRS: ("chosen", "rejected")}
"""Columns with trained text, by the algorithm's source of data. A row of DATASET may be a conversation instead."""

MARGIN = "margin"
MOST_MARGIN = 1e30
"""Largest margin; margins are stored as float32, which ends at 3.4e38."""


class Dataset(RowSet):
    """Rows for supervised training. A row is one example, or the two examples of a pair, and is tokenized on request.

    Rows that are too long are skipped, cut at their end, or refused.
    """

    limit_key, skipped = "data.max_row_tokens", "rows are skipped: they are too long"
    emptied = "leaves no trained token in any row", "raise it, or shorten the rows"

    def __init__(
        self, source: TaskSource, family: ModelFamily, form: Source, settings: DatasetSettings = DatasetSettings(),
        check: bool = True,
    ) -> None:  # fmt: skip
        """Check every row if `check` is set; raise ConfigError at the first unusable row."""
        super().__init__(
            source, family, settings.system_prompt, settings.max_row_tokens, settings.too_long, settings.media,
            settings.access,
        )  # fmt: skip
        self._form, self._train_on = form, settings.train_on
        if check:
            self._check()

    def examples(self, index: int, hold: Hold | None = None) -> tuple[Example, ...]:
        """Return a row as one example, or as the chosen and the rejected example of a pair.

        Raises MediaRefused if `hold` refuses a medium.
        """
        return tuple(self._cut(item) for item in self._examples(self._kept[index], hold))

    def content(self, index: int) -> RowContent:
        row = self._kept[index]
        task = self._read(row)
        return row_content(task, self._texts(task, row))

    def messages(self, index: int) -> tuple[Message, ...]:
        """Return all messages of a row."""
        row = self._kept[index]
        return self._messages(self._task(row), row)

    def margin(self, index: int) -> float:
        """Return the margin by which a pair's chosen completion should score above the rejected one."""
        value = self[index].column(MARGIN)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST_MARGIN:
            got = f"{self.where(index)} without a number in {MARGIN!r}"
            raise ConfigError("data.train", got, "write it, or set margins = false")
        return float(value)

    def prompt(self, index: int) -> Rendered:
        """Return the tokens of a row's first example, for display."""
        return Rendered(self.examples(index)[0].tokens)

    def faults(self, index: int) -> Iterator[str]:
        row = self._kept[index]
        task = self._task(row)
        tools, texts = self._row_tools(task, row), self._texts(task, row)
        for text, made in zip(texts, self._examples(row), strict=True):
            yield from example_faults(self.family, task.prompt, text, tools, made.tokens, made.mask)

    def examine(self, row: int) -> Rendered | None:
        if not self._usable(row):
            return None
        longest = max((self._cut(each) for each in self._examples(row)), key=lambda each: len(each.tokens))
        return Rendered(longest.tokens)

    def _read(self, row: int) -> Task:
        """Read a row. A prompt that its completions repeat at their beginning stays in the prompt alone."""
        task = super()._read(row)
        for name in COLUMNS[self._form]:
            value = task.column(name)
            try:
                prompt, rest = without_prompt(task.prompt, value, name)
            except RowError as error:
                fix = f"write the same prompt in both, or leave it out of {name!r}"
                raise ConfigError("data.train", f"{self._source.where(row)}: {error}", fix) from error
            if rest is not value or prompt is not task.prompt:
                task = replace(task, prompt=prompt, metadata={**task.metadata, name: rest})
        return task

    def _texts(self, task: Task, row: int) -> tuple[Text | None, ...]:
        """Return a row's completion texts; None stands for a conversation that contains its assistant turns."""
        texts: list[Text | None] = []
        for name in COLUMNS[self._form]:
            value: Any = task.column(name)
            if value is None and (self._form is not Source.DATASET or isinstance(task.prompt, str)):
                others = ", ".join(sorted(task.metadata)) or "only the prompt"
                fix = f"write it, or name another column: columns = {{{name} = ...}} (the row has {others})"
                raise ConfigError("data.train", f"{self._source.where(row)} without {name!r}", fix)
            try:
                texts.append(None if value is None else text_or_messages(value, name, MediaOrigin(Path())))
            except RowError as error:
                raise ConfigError("data.train", f"{self._source.where(row)}: {error}", "correct the row") from error
        return tuple(texts)

    def _messages(self, task: Task, row: int) -> tuple[Message, ...]:
        return tuple(message for text in self._texts(task, row) for message in said_in(task.prompt, text))

    def _examples(self, row: int, hold: Hold | None = None) -> Iterator[Example]:
        task = self._task(row)
        tools = self._row_tools(task, row)
        for text in self._texts(task, row):
            with self._named(row):
                made = example(self.family, task.prompt, text, self._train_on, hold, tools)
            self._check_ids(made.tokens, row)
            yield made

    def _usable(self, row: int) -> bool:
        task = self._task(row)
        texts = self._texts(task, row)
        self._check_media(self._messages(task, row), row)
        tools = self._row_tools(task, row)
        if self._limit is None or all(self._text_fits(task.prompt, text, row, tools) for text in texts):
            return True
        examples = list(self._examples(row))
        longest = max(len(example.tokens) for example in examples)
        if longest > self._limit and self._too_long == "error":
            raise self._too_long_error(row, longest)
        if self._too_long == "truncate":
            return all(self._cut(example).num_trained for example in examples)
        return longest <= self._limit

    def _text_fits(self, prompt: Text, text: Text | None, row: int, tools: Sequence[Tool]) -> bool:
        """Return True if a row's number of characters proves that its tokens are within the limit."""
        if tools:
            return False
        parts = (prompt, text)
        messages = [m for part in parts for m in ((Message("", part),) if isinstance(part, str) else part or ())]
        form = tuple("text" if isinstance(part, str) else ",".join(m.role for m in part or ()) for part in parts)

        def probe() -> int:
            words, completion = (
                (part and "x") if part is None or isinstance(part, str) else tuple(Message(m.role, "x") for m in part)
                for part in parts
            )
            try:
                return len(example(self.family, words or "", completion).tokens)
            except ConfigError:  # render the real row, whose error names the row
                return sys.maxsize

        return self._surely_fits(messages, form, probe)

    def _cut(self, found: Example) -> Example:
        return found if self._limit is None else found.cut(self._limit)


Build = Callable[[Chosen], Any]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The rows of one evaluation set."""

    name: str
    dataset: Dataset
    indices: Sequence[int]

    def rows(self, margins: bool = False, hold: Hold | None = None) -> RowBatch:
        """Return all rows as a batch for the bus, each row as a group of its own."""
        examples = {AttemptId(group, member, 0): example for group, index in enumerate(self.indices)
                    for member, example in enumerate(self.dataset.examples(index, hold))}  # fmt: skip
        given = [self.dataset.margin(self.indices[attempt.group]) for attempt in examples] if margins else None
        return row_batch(examples, given, hold is not None)


def open_training(run: Any, build: Build, form: Source, run_dir: str = "") -> tuple[Dataset, Sequence[int]]:
    """Open the training rows; return them with the indices of the rows that are not held out for evaluation.

    `run_dir`: the run that stores its held-out rows; empty for a check before a run.
    """
    dataset = _open(run, build, form, "data.train", str(run.data.train), run.data.columns)
    return dataset, dataset.hold_out(run.eval.num_held_out, run.seed, run_dir)[0]


def open_held_out(run: Any, build: Build, form: Source, run_dir: str = "") -> list[HeldOut]:
    """Open the sets of `[[eval.sets]]`, or else a seeded part of the training file; none if `eval.every` is 0."""
    if not run.eval.every:
        return []
    if not run.eval.sets:
        dataset = _open(run, build, form, "data.train", str(run.data.train), run.data.columns)
        _, held = dataset.hold_out(run.eval.num_held_out, run.seed, run_dir, stores=False)  # `open_training` does
        return [HeldOut(HOLD_OUT, dataset, held)]
    held_out = []
    for number, table in enumerate(run.eval.sets):
        dataset = _open(
            run, build, form, f"eval.sets.{number}.path", str(table.path), table.columns or run.data.columns
        )
        held_out.append(HeldOut(table.name, dataset, range(min(table.size or len(dataset), len(dataset)))))
    return held_out


def row_batch(
    examples: Mapping[AttemptId, Example], margins: Sequence[float] | None = None, media: bool = False
) -> RowBatch:
    """Return examples as rows of the bus. The rows have no versions, because no policy sampled them."""
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
        with charged_to(source):
            source.open(path, columns)
        return Dataset(source, family, form, dataset_settings(run, build, path))
    except ConfigError as error:
        field = key if error.field in ("data", "data.train") else error.field
        raise ConfigError(field, error.got, error.fix) from error  # a source does not know which key names its file


def dataset_settings(run: Any, build: Build, path: str) -> DatasetSettings:
    """Return the settings of the `Dataset` of a run's file, for the run itself and for checks before the run."""
    return DatasetSettings(
        run.data.system_prompt,
        min(run.data.max_row_tokens or NO_BOUND, bounded_context(run.model.path)),
        run.data.too_long,
        run.data.train_on,
        [type(build(each.chosen)).medium for each in run.media],
        source_access(run.data, [Path(path)]),
    )
