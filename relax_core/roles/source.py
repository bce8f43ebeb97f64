# SPDX-License-Identifier: Apache-2.0
"""Rows of a dataset: the source role puts training rows on the bus, and `HeldOutEval` evaluates on held-out rows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from relax_core.api.algorithm import Algorithm, Source
from relax_core.api.batch import AttemptId, Ragged, RowBatch
from relax_core.api.bus import Issue, Sealed
from relax_core.api.errors import ConfigError
from relax_core.api.events import EvalFinished, FirstStepSeen, Logged
from relax_core.api.plan import Operation
from relax_core.api.role import Role
from relax_core.api.trajectory import Outcome
from relax_core.config.run_config import RunContext
from relax_core.data.dataset import Dataset, Example, HeldOut, open_held_out, open_training, row_batch
from relax_core.data.media import opened_media_pipeline
from relax_core.data.overlap import EvalRows, kept_apart
from relax_core.media.placeholders import MediaRefused
from relax_core.observe.first_step import MOST_TASKS
from relax_core.roles.rank_group import RankGroup
from relax_core.sampling.evaluation import is_due
from relax_core.sampling.failures import SampleFailures, keep_sample
from relax_core.sampling.first_samples import stops
from relax_core.sampling.groups import Selection, make_sampler

POLL_S = 1.0
REFERENCE = "ref_log_probs"


class RowSource(Role):
    """The role that puts rows of a dataset on the bus, a step or two ahead of the actor. Stateless.

    The number of a group determines its dataset rows. The ledger keeps the numbers, so a resumed run continues there.
    """

    name = "source"

    @classmethod
    def operations(cls) -> tuple[Operation, ...]:
        produced = frozenset({"tokens", "loss_mask", "margins", "media"})
        return (Operation("source.rows", cls.name, frozenset(), produced),)

    async def run(self, context: RunContext) -> None:
        self._context, self._admitted = context, 0
        self._dataset, self._train, remarks = await asyncio.to_thread(_open_apart, context)
        sampler = make_sampler(context.config, context.build, context.plan.source)
        seed = context.config.seed
        self._selection = await asyncio.to_thread(Selection, sampler, {}, self._dataset, self._train, seed, 0)
        await self._selection.restore(context.bus)
        for level, remark in remarks:
            await context.run_status.emit(Logged(level, self.name, remark))
        # The pipeline starts no process in a run without media.
        async with opened_media_pipeline(context, self._dataset.family) as self._media:
            self._failures = SampleFailures(context.config, context.run_dir)
            context.doing("ready", rows=len(self._train), failures=self._failures.facts)
            await context.run_status.emit(FirstStepSeen(self.name, await asyncio.to_thread(self._first_facts)))
            while not context.stopping:
                await context.pause_point()
                # No weights sampled these rows, so they are never stale: ask as an engine at the last version would.
                newest = (await context.bus.version())._replace(step=context.config.steps)
                with context.waiting("leave to hand out rows", "actor (a step makes room)", POLL_S):
                    issues = await context.bus.admit(self.name, newest, context.config.rollout.groups_per_step, POLL_S)
                self._admitted += sum(len(issue.attempts) for issue in issues)
                if issues:
                    await self._put(issues)
                elif (await context.bus.version()).step >= context.config.steps:
                    return

    def _first_facts(self) -> dict[str, Any]:
        """Describe the first rows for the checks of step 1."""
        rows, first = self._dataset, self._train[:MOST_TASKS]
        proved = [{"task": rows.where(index), "prompt_faults": [*rows.faults(index)]} for index in first]
        return {"stops": stops(rows.family), "tasks": proved}

    async def _put(self, issues: Sequence[Issue]) -> None:
        context = self._context
        held = frozenset(attempt for issue in issues for attempt in issue.attempts)
        await context.bus.report_held(self.name, held, self._admitted)
        context.doing("handing out rows", groups=len(issues))
        places: dict[int, int] = {}
        examples: dict[AttemptId, Example] = {}
        for issue in issues:
            group = issue.group
            places[group] = self._selection.task(group)
            examples |= await self._examples(issue, places[group])
        await self._selection.keep(context.bus)  # before the actor can train on these groups
        version = await context.bus.version()
        sealed = [
            # No weights sampled these rows, so a rollback does not invalidate them.
            Sealed(attempt, 1, Outcome.FINISHED, 0.0, version.step, examples[attempt].num_trained, newest={0: 0})
            if attempt in examples else Sealed(attempt, 0, Outcome.MEDIA_ERROR)
            for issue in issues for attempt in issue.attempts
        ]  # fmt: skip
        asked = "margins" in context.plan.trained_columns
        given = [self._dataset.margin(places[attempt.group]) for attempt in examples] if asked else None
        batch = row_batch(examples, given, bool(context.config.media))
        room = context.waiting("room on the bus", "actor (a step frees it)", context.config.rollout.step_timeout_s)
        with room as wait:
            while not await context.bus.put(batch, sealed, POLL_S):
                context.check(wait)
                await context.pause_point()
        await context.bus.report_held(self.name, frozenset(), self._admitted)

    async def _examples(self, issue: Issue, index: int) -> dict[AttemptId, Example]:
        """Read the example of an issue, or its pair of two, by attempt. If media can't be read, warn and return {}.

        Raises ConfigError if the media of most rows can't be read, since failed rows are replaced by further rows.
        """
        try:
            hold = None
            if self._context.config.media:
                await self._media.prepare(self._dataset.messages(index))
                hold = self._media.fill_placeholders
            found = await asyncio.to_thread(self._dataset.examples, index, hold)
            self._failures.count(Outcome.FINISHED, "", "", issue.group)
            return dict(zip(issue.attempts, found, strict=True))
        except MediaRefused as refused:
            context, error = self._context, f"{self._dataset.where(index)}: {refused}"
            await context.run_status.emit(Logged("warning", self.name, error))
            if seen := self._failures.count(Outcome.MEDIA_ERROR, "media", error, issue.group):
                keep_sample(context.config, context.run_dir, {"outcome": Outcome.MEDIA_ERROR.value, "error": error})
                what = f"rows that failed {seen.replace('samples', 'rows')} with {Outcome.MEDIA_ERROR}: {error}"
                raise ConfigError(
                    "data", what, "correct or remove such media, or raise the limits of [[media]]"
                ) from None
            return {}


class HeldOutEval:
    """Evaluation of held-out sets between steps: the algorithm's loss, computed from the trainer's forward pass.

    The answers are given in the data; the rollout evaluates sampled answers. Training is not changed. Reference
    log-probs of held-out rows are those of the weights that the run starts with; they are stored in the run directory.
    """

    def __init__(self, context: RunContext, algorithm: Algorithm, sets: dict[str, RowBatch]) -> None:
        self._context, self._algorithm, self._sets = context, algorithm, sets
        self._reads_reference = any(column.name == REFERENCE for column in algorithm.columns())

    @classmethod
    async def open(cls, context: RunContext) -> Self:
        """Read the held-out sets. A run with a rollout has none: it evaluates sampled answers instead."""
        algorithm = context.build(context.config.algorithm.chosen, Algorithm)
        if context.plan.source is Source.ROLLOUT:
            return cls(context, algorithm, {})
        margins = "margins" in context.plan.trained_columns
        given = context.config, context.build, context.plan.source, context.run_dir
        found = await asyncio.to_thread(open_held_out, *given)
        return cls(context, algorithm, {held.name: await _rows_of(context, held, margins) for held in found})

    def due(self, step: int, requested: bool = False) -> bool:
        """Return True if an evaluation is due. It always is at step 0 if the loss needs reference log-probs."""
        due = requested or is_due(self._context.config, step) or (step == 0 and self._reads_reference)
        return bool(self._sets) and due

    async def run(self, trainer: RankGroup, step: int, requested: bool = False) -> None:
        """Evaluate every set. The caller holds the trainer's device lease. `requested`: also at a step without schedule."""
        for name in self._sets:
            self._context.doing(f"evaluating {name}", step=step)
            rows = self._sets[name]
            filled = await trainer.forward(rows, sorted(output.key for output in self._algorithm.outputs()))
            if self._reads_reference and REFERENCE not in rows.columns:
                reference = self._start(name, filled["log_probs"] if step == 0 else None)
                rows = self._sets[name] = rows.with_columns({REFERENCE: reference})
            rows = rows.with_columns(filled)
            if requested or is_due(self._context.config, step):
                metrics = await asyncio.to_thread(_measures, self._algorithm, rows)
                loss, count = metrics.pop("loss"), len({row.group for row in rows.ids})
                await self._context.run_status.emit(EvalFinished(step, name, loss, count, 0.0, metrics, measure="loss"))

    def _start(self, name: str, now: Ragged | None) -> Ragged:
        """Store and return `now`, a set's log-probs under the starting weights; None: return the stored log-probs.

        Raises ConfigError if the run did not begin with this set, so that no log-probs are stored.
        """
        path, tokens = Path(self._context.run_dir) / "held-out" / f"{name}.npy", self._sets[name].columns["tokens"]
        if now is not None:
            path.parent.mkdir(exist_ok=True)
            np.save(path, now.values)
            return now
        kept = np.load(path) if path.exists() else np.zeros(0, np.float32)
        if len(kept) != len(tokens.values):
            fix = "it has no log-probs of the run's starting weights; resume with the sets that the run began with"
            raise ConfigError("eval.sets", name, fix)
        return Ragged(kept, tokens.lengths)


def _open_apart(context: RunContext) -> tuple[Dataset, Sequence[int], list[tuple[str, str]]]:
    """Open the training rows; return them, the indices to train on, and log lines (level, text)."""
    given = context.config, context.build, context.plan.source, context.run_dir
    dataset, train = open_training(*given)
    said = [("info", remark) for remark in dataset.remarks(train)]
    held = {one.name: EvalRows(one.dataset, one.indices) for one in open_held_out(*given)}
    train, compared = kept_apart(context.config, dataset, train, held)
    return dataset, train, said + compared


async def _rows_of(context: RunContext, held: HeldOut, margins: bool) -> RowBatch:
    """Make the rows of a set and put their media into the run's store. Raises ConfigError if media can't be read."""
    if not context.config.media:
        return held.rows(margins)
    dataset = held.dataset
    async with opened_media_pipeline(context, dataset.family) as pipeline:
        for index in held.indices:
            try:
                await pipeline.prepare(dataset.messages(index))
            except MediaRefused as refused:
                got = f"{held.name}: {dataset.where(index)}: {refused}"
                raise ConfigError("eval.sets", got, "repair the row or remove it") from refused
        try:
            return held.rows(margins, pipeline.fill_placeholders)
        except MediaRefused as refused:
            raise ConfigError("eval.sets", f"{held.name}: {refused}", "repair the row or remove it") from refused


def _measures(algorithm: Algorithm, rows: RowBatch) -> dict[str, float]:
    """Compute the loss of all rows as one batch, and the loss's metrics, keyed by the last part of their names."""
    import torch

    from relax_core import learn

    batch = learn.PackedBatch(rows, dtype=torch.float64)
    outputs: dict[str, Any] = {name: batch.column(name) for out in algorithm.outputs() for name in out.gives}
    counts = learn.count(rows)
    with torch.no_grad():
        loss = algorithm.loss(batch, learn.Outputs(outputs))
        denominators = learn.Denominators(counts)
        total = sum(float(term) for term in learn.reduce(loss, batch, denominators).values())
    metrics = {
        name.rpartition("/")[2]: learn.mean((float(s), float(n))) for name, (s, n) in loss.metrics.items() if float(n)
    }
    return {**metrics, "loss": total * denominators.rescale(counts)}
