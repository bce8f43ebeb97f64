# SPDX-License-Identifier: Apache-2.0
"""How many tokens the longest prompt has, by the first of them, without anything of a run being started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from relax_core.api.algorithm import Source
from relax_core.options.run_config import RunConfig
from relax_core.plugins.catalogue import Catalogue
from relax_core.roles.plan import Plan
from relax_core.rollout.dataset_files import open_training
from relax_core.rollout.opening import open_tasks

LOOKED_AT = 256
"""Prompts whose length is taken; the longest may be among others."""


@dataclass(frozen=True, slots=True)
class _Reader:
    """As much of a role's context as opening tasks takes."""

    run: RunConfig
    plan: Plan
    build: Callable[..., Any]


def longest_prompt(config: RunConfig, catalogue: Catalogue, plan: Plan) -> int:
    """In tokens, of the first tasks, or rows of a dataset."""
    if plan.source is not Source.ROLLOUT:
        rows, _ = open_training(config, catalogue.build, plan.source)
        return max(len(one.tokens) for index in range(min(LOOKED_AT, len(rows))) for one in rows.examples(index))
    family: Any = catalogue.build(config.family.chosen)
    family.open(config.model.model_dump(mode="json"))
    tasks, _, _ = open_tasks(_Reader(config, plan, catalogue.build), family)  # type: ignore[arg-type]
    return max((len(tasks.prompt(index).tokens) for index in range(min(LOOKED_AT, len(tasks)))), default=1)
