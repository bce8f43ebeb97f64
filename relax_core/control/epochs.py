# SPDX-License-Identifier: Apache-2.0
"""The length of a run in epochs, as a number of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from relax_core.api.errors import ConfigError
from relax_core.api.source import TaskSource
from relax_core.config.compose import Composed, naming_stage
from relax_core.config.run_config import RunConfig
from relax_core.data.tasks import charged_to, hold_out_size


def with_steps(composed: Composed) -> Composed:
    """Return the configuration with the `steps` that `epochs` give, for each stage that has `epochs`.

    Opens the training file for its number of rows. Raises ConfigError if that is not possible.
    """
    notices = list(composed.notices)

    def counted(config: RunConfig) -> RunConfig:
        if config.epochs is None:
            return config
        rows = count_rows(config, composed.catalogue.build, "data.train", config.data.train, config.data.columns)
        rows -= hold_out_size(config.eval.num_held_out, rows)
        per_step = config.rollout.groups_per_step
        steps = max(1, math.ceil(config.epochs * rows / per_step))
        notices.append(f"epochs = {config.epochs:g}: {steps} steps of {per_step} of {rows} tasks")
        return config.model_copy(update={"epochs": None, "steps": steps})

    stages = []
    for at, stage in enumerate(composed.stages):
        with naming_stage(at):
            stages.append(replace(stage, config=counted(stage.config)))
    config = stages[0].config if stages else counted(composed.config)
    return replace(composed, config=config, stages=tuple(stages), notices=tuple(notices))


def count_rows(config: RunConfig, build: Callable[..., Any], field: str, path: Path, columns: Mapping[str, str]) -> int:
    """Return the number of rows of a task file. Raises ConfigError naming `field` if the file can't be read."""
    source: TaskSource = build(config.source.chosen, TaskSource)
    try:
        with charged_to(source):
            source.open(str(path), columns)
            return len(source)
    except ConfigError as error:
        raise ConfigError(field, error.got, error.fix) from error
