# SPDX-License-Identifier: Apache-2.0
"""Before a run starts: whether it can fit, as `relax plan` foretells it; refused where it surely can't.

Telling it exactly costs seconds of processor time and loads torch here. So it is not asked of models that are small beside
what is free, by a bound that is generous to any of them. It knows this machine alone: a cluster of several is not judged.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from relax_core.control.longest_prompt import longest_prompt
from relax_core.control.machine import device_memory, free_memory
from relax_core.control.needs import needs
from relax_core.control.sizing import LIBRARIES, rooms
from relax_core.control.teachers import ROLE as TEACHER
from relax_core.options.model_folder import WEIGHTS, model_context
from relax_core.options.run_config import RunConfig
from relax_core.plugins.catalogue import Catalogue
from relax_core.roles.plan import Plan
from relax_core.rollout.side_pools import GROUP

SMALL = 0.5
"""Of what is free."""
STATE = 32
"""Times a model's weights that a process may hold: with gradients, moments, and copies to write and to send."""
COMPUTED, CACHED = 4, 1
"""Times the weights over the model's width, at most, that a token costs while it is trained and while it is generated: of
width^2 a layer has some 12 weights, of width a token some 20 numbers in it."""
UNBOUNDED = 1 << 30
AT_ONCE = 8192
"""Tokens that a trainer trains at once where nothing is said."""


def check_fits(config: RunConfig, catalogue: Catalogue, plan: Plan) -> None:
    """Raise ConfigError where it can't fit and `placement.check_memory` is not off."""
    if not config.placement.check_memory or _elsewhere(config):
        return
    free = free_memory()
    if _bound(config, plan) <= SMALL * free and not _on_gpus(plan):
        return
    known = needs(config, catalogue, plan, longest_prompt(config, catalogue, plan))
    for room in rooms(known, free, device_memory()):
        room.check()


def _on_gpus(plan: Plan) -> bool:
    """Whether a worker of the plan has a GPU."""
    return any(name.startswith("gpu:") for group in plan.groups.values() for name in group.devices)


def _elsewhere(config: RunConfig) -> bool:
    """Whether workers may be on other machines than this one."""
    return config.run.runner == "ray" and bool(os.environ.get("RAY_ADDRESS"))


def _bound(config: RunConfig, plan: Plan) -> float:
    """More bytes than a run can take, by its largest model."""
    rollout, prompt = config.rollout, config.data.max_prompt_tokens or UNBOUNDED
    row = min(model_context(config.model.path) or UNBOUNDED, prompt + rollout.max_new_tokens)
    tokens = rollout.prompts_per_step * plan.group_size * row * (1 + (plan.max_staleness or 0))
    trained = min(tokens, max(row, config.batch.tokens_per_micro_batch or AT_ONCE))
    teachers = config.teachers if any(name.partition("-")[0] == TEACHER for name in plan.groups) else ()
    pools = {pool.path for pool in config.engines if GROUP + pool.name in plan.groups}
    folders = {config.model.path, *(teacher.path for teacher in teachers if teacher.path), *pools}
    each = max(_of_model(folder, COMPUTED * trained + CACHED * tokens) for folder in folders)
    return (LIBRARIES + each) * sum(group.size for group in plan.groups.values())


def _of_model(folder: Path, tokens: float) -> float:
    told = json.loads((folder / "config.json").read_text())
    text = told.get("text_config", told)
    in_files = sum(file.stat().st_size for kind in WEIGHTS for file in folder.glob(kind))
    weights = in_files * (1 if (text.get("dtype") or text.get("torch_dtype")) == "float32" else 2)
    return float(weights * (STATE + tokens / int(text.get("hidden_size") or 1)))
