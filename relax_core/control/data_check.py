# SPDX-License-Identifier: Apache-2.0
"""The task files of a run, opened before the run by the code that opens them in the run, with all checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from relax_core.api.algorithm import Source
from relax_core.api.plan import Plan
from relax_core.config.run_config import RunConfig, RunContext
from relax_core.control.tool_check import tools_before_start
from relax_core.data.dataset import Dataset, open_held_out, open_training
from relax_core.data.overlap import EvalRows, kept_apart
from relax_core.data.tasks import TaskSet
from relax_core.registry.catalogue import Catalogue
from relax_core.sampling.evaluation import open_tasks
from relax_core.sampling.groups import Selection, make_sampler


@dataclass(frozen=True, slots=True)
class PlanContext:
    """The part of a role's context that exists before a run: enough to make specifications and to open tasks."""

    config: RunConfig
    plan: Plan
    build: Callable[..., Any]
    run_dir: str = ""


@dataclass(frozen=True, slots=True)
class OpenedData:
    """The task files of a run."""

    rows: TaskSet | Dataset
    """Usable rows of `data.train`."""
    train: Sequence[int]
    """Indices of the rows to train on; the others are held out."""
    evaluated: Mapping[str, int]
    """Number of rows to evaluate, by evaluation set."""
    compared: tuple[str, ...] = ()
    """Sentences about rows that repeat each other, within the training rows and in evaluation sets."""

    def __str__(self) -> str:
        """Return the numbers of rows for display."""
        noun = self.rows.skipped.split()[0]
        skipped = f", {self.rows.num_skipped} skipped as too long" if self.rows.num_skipped else ""
        return f"{len(self.train)} {noun}{skipped}" + "".join(
            f"; {name}: {count} to evaluate" for name, count in self.evaluated.items()
        )


def open_data(config: RunConfig, catalogue: Catalogue, plan: Plan) -> OpenedData:
    """Open the task files and the sampler. Raises ConfigError for everything that a run would refuse at its start."""
    rows, train, held = open_rows(config, catalogue, plan)
    train, compared = kept_apart(config, rows, train, held)
    Selection(make_sampler(config, catalogue.build, plan.source), {}, rows, train, config.seed, 0)
    evaluated = {name: len(one.indices) for name, one in held.items()}
    return OpenedData(
        rows, train, evaluated, tuple(f"{'warning: ' * (level == 'warning')}{text}" for level, text in compared)
    )


def open_rows(
    config: RunConfig, catalogue: Catalogue, plan: Plan
) -> tuple[TaskSet | Dataset, Sequence[int], dict[str, EvalRows]]:
    """Open the task files; return the usable rows, the indices of those to train on, and the evaluation sets by name."""
    rows: TaskSet | Dataset
    if plan.source is Source.ROLLOUT:
        family: Any = catalogue.build(config.family.chosen)
        family.open(config.model.model_dump(mode="json"))
        context = cast(RunContext, PlanContext(config, plan, catalogue.build))
        rows, train, sets = open_tasks(context, family, tools_before_start(config, catalogue))
        return rows, train, {each.name: EvalRows(each.tasks, each.indices) for each in sets}
    rows, train = open_training(config, catalogue.build, plan.source)
    held_out = open_held_out(config, catalogue.build, plan.source)
    return rows, train, {each.name: EvalRows(each.dataset, each.indices) for each in held_out}
