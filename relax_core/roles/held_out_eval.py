# SPDX-License-Identifier: Apache-2.0
"""Evaluation of held-out rows of a dataset by the algorithm's own loss, between steps, through the trainer's forward.

It is for given answers as a rollout's evaluation is for sampled ones, and never changes training. The reference's
log-probs of held-out rows are those of the model that the run starts with; they are kept beside the run's files.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Self

import numpy as np

from relax_core.api.algorithm import Algorithm, Source
from relax_core.api.batch import Ragged, RowBatch
from relax_core.api.errors import ConfigError
from relax_core.api.events import EvalFinished
from relax_core.config.run_config import RunContext
from relax_core.data.dataset import HeldOut, open_held_out
from relax_core.data.media_pipeline import opened_media_pipeline
from relax_core.data.placeholders import MediaRefused
from relax_core.roles.rank_group import RankGroup
from relax_core.sampling.evaluation import is_due

REFERENCE = "ref_log_probs"


class HeldOutEval:
    """The held-out sets of a run without rollout."""

    def __init__(self, context: RunContext, algorithm: Algorithm, sets: dict[str, RowBatch]) -> None:
        self._context, self._algorithm, self._sets = context, algorithm, sets
        self._reads_reference = any(column.name == REFERENCE for column in algorithm.columns())

    @classmethod
    async def open(cls, context: RunContext) -> Self:
        """Read the sets; there are none where samples are judged, or where nothing is."""
        algorithm: Algorithm = context.build(context.config.algorithm.chosen)
        if context.plan.source is Source.ROLLOUT:
            return cls(context, algorithm, {})
        margins = "margins" in context.plan.trained_columns
        found = await asyncio.to_thread(open_held_out, context.config, context.build, context.plan.source)
        if not context.config.media:
            return cls(context, algorithm, {held.name: held.rows(margins) for held in found})
        return cls(context, algorithm, {held.name: await _seen(context, held, margins) for held in found})

    def due(self, step: int) -> bool:
        """Tell whether to evaluate: also before the first step, where the starting model is the reference."""
        return bool(self._sets) and (is_due(self._context.config, step) or (step == 0 and self._reads_reference))

    async def run(self, trainer: RankGroup, step: int) -> None:
        """Evaluate every set, while the trainer holds its devices."""
        for name in self._sets:
            self._context.doing(f"judging {name}", step=step)
            rows = await self._judged(trainer, name, step)
            if is_due(self._context.config, step):
                metrics = await asyncio.to_thread(measures, self._algorithm, rows)
                loss, count = metrics.pop("loss"), len({row.group for row in rows.ids})
                await self._context.run_status.emit(EvalFinished(step, name, loss, count, 0.0, metrics, measure="loss"))

    async def _judged(self, trainer: RankGroup, name: str, step: int) -> RowBatch:
        """Fill the columns that the loss reads."""
        rows = self._sets[name]
        keys = sorted(output.key for output in self._algorithm.outputs())
        filled = await trainer.forward(rows, keys)
        if self._reads_reference and REFERENCE not in rows.columns:
            reference = self._start(name, filled["log_probs"] if step == 0 else None)
            rows = self._sets[name] = rows.with_columns({REFERENCE: reference})
        return rows.with_columns(filled)

    def _start(self, name: str, now: Ragged | None) -> Ragged:
        """Return the log-probs that the run started with, given now or kept since. Raises ConfigError for a new set."""
        path, tokens = Path(self._context.run_dir) / "held-out" / f"{name}.npy", self._sets[name].columns["tokens"]
        if now is not None:
            path.parent.mkdir(exist_ok=True)
            np.save(path, now.values)
            return now
        kept = np.load(path) if path.exists() else np.zeros(0, np.float32)
        if len(kept) != len(tokens.values):
            fix = "its reference is the model of the first step: resume with the sets that the run began with"
            raise ConfigError("eval.sets", name, fix)
        return Ragged(kept, tokens.lengths)


async def _seen(context: RunContext, held: HeldOut, margins: bool) -> RowBatch:
    """Put the media of rows into the run's store. Raises ConfigError for a set with one that can't be read."""
    dataset = held.dataset
    async with opened_media_pipeline(context, dataset.family) as pipeline:
        try:
            for index in held.indices:
                await pipeline.prepare(dataset.messages(index))
            return held.rows(margins, pipeline.fill_placeholders)
        except MediaRefused as refused:
            raise ConfigError("eval.sets", f"{held.name}: {refused}", "repair it, or leave such rows out") from refused


def measures(algorithm: Algorithm, rows: RowBatch) -> dict[str, float]:
    """Compute the loss of all rows as one batch, and its metrics by the last part of their names."""
    import torch

    from relax_core import learn

    batch = learn.PackedBatch(rows, dtype=torch.float64)
    outputs: dict[str, Any] = {name: batch.column(name) for out in algorithm.outputs() for name in out.gives}
    counts = learn.count(rows)
    with torch.no_grad():
        loss = algorithm.loss(batch, learn.Outputs(outputs))
        denominators = learn.Denominators(counts)
        total = sum(float(term) for term in learn.reduce(loss, batch, denominators).values())
    told = {name.rpartition("/")[2]: learn.mean((float(s), float(n))) for name, (s, n) in loss.metrics.items()}
    return {**told, "loss": total * denominators.rescale(counts)}
