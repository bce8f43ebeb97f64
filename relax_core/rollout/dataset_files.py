# SPDX-License-Identifier: Apache-2.0
"""Opens the datasets of a run from its configuration, and lays examples out as rows of the bus."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax_core.api.algorithm import Source
from relax_core.api.batch import AttemptId, Ragged, RowBatch, RowId
from relax_core.api.errors import ConfigError
from relax_core.api.family import ModelFamily
from relax_core.api.media_store import key_bytes
from relax_core.api.trainer import Chosen
from relax_core.rollout.dataset import Dataset
from relax_core.rollout.example import Example, Hold
from relax_core.rollout.opening_data import HOLD_OUT, context_of

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
