# SPDX-License-Identifier: Apache-2.0
"""Memory that a plan needs, beside what the host and each device have; a run that surely can't fit is refused.

Trainers and engines estimate their own processes; those that can't are named, and nothing is guessed in their place.
Bytes are those of tensors and of a process's libraries. Only this machine is known: a cluster of several is not checked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, cast

import psutil

from relax_core.api.algorithm import Source
from relax_core.api.engine import Engine
from relax_core.api.errors import ConfigError
from relax_core.api.plan import RESERVED, Estimate, Plan, WorkerGroup, Workload
from relax_core.api.trainer import Trainer
from relax_core.api.weights import Version
from relax_core.config.model_folder import WEIGHTS, model_context
from relax_core.config.run_config import RunConfig, RunContext
from relax_core.control.placement import TEACHER, has_gpus
from relax_core.control.tool_check import tools_before_start
from relax_core.data.dataset import open_training
from relax_core.engines.factories import AUXILIARY_GROUP, auxiliary_spec, engine_spec
from relax_core.registry.catalogue import Catalogue
from relax_core.roles.rank_group import trainer_spec
from relax_core.sampling.evaluation import open_tasks

SMALL = 0.5
"""Share of the free memory below which the bound of a run makes the exact figures needless."""
STATE = 32
"""Times a model's weights that a process may hold: with gradients, moments, and copies to write and to send."""
COMPUTED, CACHED = 4, 1
"""Times the weights over the model's width, at most, that a token costs while it is trained and while it is generated: a
layer has some 12 weights of width^2, and a token some 20 numbers of width in it."""
UNBOUNDED = 1 << 30
AT_ONCE = 8192
"""Tokens that a trainer trains at once where nothing is said."""
PROMPTS = 256
"""Prompts whose length is taken; the longest may be among others."""
LIBRARIES = 1 << 29
"""Bytes taken for a process with torch and transformers; a rank that trained a tiny model holds 0.35 GiB on a CPU."""
KEPT = {"weights": "parameters", "optimizer": "optimizer", "kv": "kv cache"}
"""Parts, as estimates name them, that stay in memory while others use the devices, unless they are offloaded."""
IN_SHARED_MEMORY = "published"
"""The part that lies in the host's memory, whatever device the process uses."""
FIXES = {
    "activations": ("batch.tokens_per_micro_batch", "set fewer, or shorten rows with rollout.max_new_tokens"),
    "logits": ("trainer.logits_mb", "set less: logits are computed in more slices"),
    "kv cache": (
        "rollout.prompts_per_step",
        "set fewer, shorten rows with rollout.max_new_tokens, or use more engines",
    ),
    "optimizer": (
        "model.path",
        "share the state over more ranks (trainer.sharding), train adapters, or use a smaller model",
    ),
}


@dataclass(frozen=True, slots=True)
class PlanContext:
    """As much of a role's context as specifications and opening tasks take, before there is a run."""

    config: RunConfig
    plan: Plan
    build: Callable[..., Any]
    run_dir: str = ""


@dataclass(frozen=True, slots=True)
class ProcessNeed:
    """Estimates of the processes of one worker group."""

    group: WorkerGroup
    first: Estimate | None
    """Estimate of its first process, which writes and publishes too."""
    others: Estimate | None
    """Estimate of each of the others."""
    unknown: str = ""
    """Why there is no estimate."""

    @property
    def processes(self) -> tuple[Estimate, ...]:
        """An estimate for each."""
        if self.first is None or self.others is None:
            return ()
        return (self.first, *[self.others] * (self.group.size - 1))


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """One memory and what is to lie in it."""

    name: str
    needed: int
    available: int
    """0: unknown."""
    largest: str = ""
    """The part that needs most of it."""

    @property
    def fits(self) -> bool:
        return not self.available or self.needed <= self.available

    def check(self) -> None:
        """Raise ConfigError where it can't fit."""
        if self.fits:
            return
        field, fix = FIXES.get(self.largest, FIXES["optimizer"])
        got = f"a plan that needs {gib(self.needed)} of {self.name}, which has {gib(self.available)} to give"
        go_on = "with --anyway (placement.check_memory=false) this is no error"
        raise ConfigError(field, got, f"most of it is {self.largest}: {fix}; {go_on}")


def check_fits(config: RunConfig, catalogue: Catalogue, plan: Plan) -> None:
    """Raise ConfigError where the plan can't fit and `placement.check_memory` is not off.

    Exact figures cost seconds and load torch here, so models that are small beside the free memory are passed by a
    generous bound.
    """
    elsewhere = config.run.runner == "ray" and bool(os.environ.get("RAY_ADDRESS"))
    if not config.placement.check_memory or elsewhere:
        return
    free = free_memory()
    try:
        if _bound(config, plan) <= SMALL * free and not any(_on_gpu(group) for group in plan.groups.values()):
            return
        needs = process_needs(config, catalogue, plan, longest_prompt(config, catalogue, plan))
    except (MemoryError, OverflowError) as error:  # not even the estimate of so many rows fits
        got = f"steps of {config.rollout.prompts_per_step} times {config.rollout.group_size} samples"
        raise ConfigError("rollout", got, "no machine holds so many: lower prompts_per_step or group_size") from error
    for budget in memory_budgets(needs, free, device_memory()):
        budget.check()


def _bound(config: RunConfig, plan: Plan) -> float:
    """Bound the bytes that a run can take from above, by its largest model."""
    rollout, prompt = config.rollout, config.data.max_prompt_tokens or UNBOUNDED
    row = min(model_context(config.model.path) or UNBOUNDED, prompt + rollout.max_new_tokens)
    tokens = rollout.prompts_per_step * plan.group_size * row * (1 + (plan.max_staleness or 0))
    trained = min(tokens, max(row, config.batch.tokens_per_micro_batch or AT_ONCE))
    teachers = config.teachers if any(name.partition("-")[0] == TEACHER for name in plan.groups) else ()
    pools = {pool.path for pool in config.engines if AUXILIARY_GROUP + pool.name in plan.groups}
    largest = 0.0
    for folder in {config.model.path, *(teacher.path for teacher in teachers if teacher.path), *pools}:
        model = json.loads((folder / "config.json").read_text())
        text = model["text_config"] if isinstance(model.get("text_config"), dict) else model
        stored = sum(file.stat().st_size for kind in WEIGHTS for file in folder.glob(kind))
        weights = stored * (1 if (text.get("dtype") or text.get("torch_dtype")) == "float32" else 2)
        width = text.get("hidden_size")
        width = width if isinstance(width, int) and width > 0 else 1
        largest = max(largest, weights * (STATE + (COMPUTED * trained + CACHED * tokens) / width))
    return (LIBRARIES + largest) * sum(group.size for group in plan.groups.values())


def longest_prompt(config: RunConfig, catalogue: Catalogue, plan: Plan) -> int:
    """Count the tokens of the longest prompt among the first tasks, or rows of a dataset."""
    if plan.source is not Source.ROLLOUT:
        rows, _ = open_training(config, catalogue.build, plan.source)
        return max(len(one.tokens) for index in range(min(PROMPTS, len(rows))) for one in rows.examples(index))
    family: Any = catalogue.build(config.family.chosen)
    family.open(config.model.model_dump(mode="json"))
    tools = tools_before_start(config, catalogue)
    tasks, _, _ = open_tasks(cast(RunContext, PlanContext(config, plan, catalogue.build)), family, tools)
    return max((len(tasks.prompt(index).tokens) for index in range(min(PROMPTS, len(tasks)))), default=1)


def process_needs(config: RunConfig, catalogue: Catalogue, plan: Plan, prompt_tokens: int) -> tuple[ProcessNeed, ...]:
    """Ask the trainer or engine of each worker group for its estimate; `prompt_tokens` are those of the longest prompt."""
    context = PlanContext(config, plan, catalogue.build)
    rollout = config.rollout
    step = Workload(rollout.prompts_per_step, plan.group_size, prompt_tokens, rollout.max_new_tokens)
    return tuple(_process_need(group, context, step) for group in plan.groups.values())


def _process_need(group: WorkerGroup, context: PlanContext, step: Workload) -> ProcessNeed:
    config = context.config
    pool = config.pool(group.name.removeprefix(AUXILIARY_GROUP)) if group.name.startswith(AUXILIARY_GROUP) else None
    own = config.engine if group.name == "rollout" else config.trainer
    choice = own if pool is None else config.backend_of(pool)
    if choice.python:
        return ProcessNeed(group, None, None, f"{choice.name} runs under another interpreter, {choice.python}")
    backend = context.build(choice.chosen)
    backend.build = context.build
    try:
        if pool is not None:  # one request for each sample of a step, as long as a sample: more is not known before
            share = replace(step, prompts=ceil(step.prompts / group.size))
            first = last = cast(Engine, backend).estimate(auxiliary_spec(config, pool), share)
        elif group.name == "rollout":
            first = last = _engine_estimate(cast(Engine, backend), context, step, group.size)
        else:
            first, last = (_rank_estimate(cast(Trainer, backend), context, group, n, step) for n in (0, group.size - 1))
        return ProcessNeed(group, first, last)
    except NotImplementedError as error:
        return ProcessNeed(group, None, None, f"not estimated by {choice.name}{f': {error}' if str(error) else ''}")


def _engine_estimate(engine: Engine, context: PlanContext, step: Workload, size: int) -> Estimate:
    """Estimate an engine with its share of all groups that may be in flight at once; the work is that of one step."""
    config = context.config
    ahead = 1 + (context.plan.max_staleness or 0)
    evaluated = ceil(config.eval.size * config.eval.samples / step.group_size) if config.eval.every else 0
    most = max(step.prompts * ahead, evaluated)
    spec = engine_spec(config, Version("actor", 0, 0))
    memory = engine.estimate(spec, replace(step, prompts=ceil(most / size)))
    return replace(memory, flops=engine.estimate(spec, replace(step, prompts=ceil(step.prompts / size))).flops)


def _rank_estimate(trainer: Trainer, context: PlanContext, group: WorkerGroup, rank: int, step: Workload) -> Estimate:
    role, number = group.name, "0"
    model: Mapping[str, Any] | None = None
    if role.startswith(TEACHER):
        role, _, number = role.partition("-")
        teacher = context.config.teachers[int(number or 0)]
        model = {"path": str(teacher.path), "dtype": teacher.dtype or context.config.model.dtype}
    return trainer.estimate(trainer_spec(cast(RunContext, context), role, rank, group.size, "", model), step)


def memory_budgets(
    needs: Iterable[ProcessNeed], host_bytes: int, device_bytes: Mapping[str, int]
) -> tuple[MemoryBudget, ...]:
    """Add up what processes need together: of the host's memory, then of each device's.

    Groups that share devices are counted one at work at a time, beside what the others keep in memory meanwhile.
    """
    known = [need for need in needs if need.processes]
    on_host = [need for need in known if not _on_gpu(need.group)]
    shared = sum(p.get(IN_SHARED_MEMORY, 0) for need in known for p in need.processes[0].phases.values())
    libraries = LIBRARIES * sum(need.group.size for need in known)
    needed = shared + libraries + sum(_most_at_once(sharing, sum) for sharing in _sharing_devices(on_host))
    found = [MemoryBudget("host memory", needed, host_bytes, _largest_part(on_host))]
    for device in sorted({name for need in known if _on_gpu(need.group) for name in need.group.devices}):
        here = [need for need in known if device in need.group.devices]
        found.append(MemoryBudget(device, _most_at_once(here, max), device_bytes.get(device, 0), _largest_part(here)))
    return tuple(found)


def _most_at_once(sharing: list[ProcessNeed], gather: Callable[[Iterable[int]], int]) -> int:
    """Find the most bytes alive at once; `gather` is sum over all processes of a group, or max where each has a device."""
    awake, resting = {}, {}
    for need in sharing:
        kept = [name for part, name in KEPT.items() if part not in need.group.offloads]
        name, processes = need.group.name, [list(one.phases.values()) for one in need.processes]
        awake[name] = gather(
            [max((sum(p.values()) - p.get(IN_SHARED_MEMORY, 0) for p in phases), default=0) for phases in processes]
        )
        resting[name] = gather(
            [max((sum(p.get(part, 0) for part in kept) for p in phases), default=0) for phases in processes]
        )
    return max(awake[name] + sum(size for other, size in resting.items() if other != name) for name in awake)


def _sharing_devices(needs: list[ProcessNeed]) -> Iterator[list[ProcessNeed]]:
    """Split groups into those that share devices, directly or through others."""
    left = list(needs)
    while left:
        sharing = [left.pop(0)]
        for need in sharing:  # grows while it is walked
            neighbours = [other for other in left if other.group.devices & need.group.devices]
            sharing += neighbours
            left = [other for other in left if other not in neighbours]
        yield sharing


def _largest_part(needs: list[ProcessNeed]) -> str:
    """Name the part with the most bytes in the fullest phases; the allocator's reserve follows the others."""
    parts: dict[str, int] = {}
    for need in needs:
        for estimate in need.processes:
            phase, _ = estimate.peak()
            for name, size in estimate.phases.get(phase, {}).items():
                if name != RESERVED:
                    parts[name] = parts.get(name, 0) + size
    return max(parts, key=lambda name: parts[name], default="")


def _on_gpu(group: WorkerGroup) -> bool:
    return any(name.startswith("gpu:") for name in group.devices)


def free_memory(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Count the bytes that further processes of this machine, or container, may have; those that cache files count too."""
    available: int = psutil.virtual_memory().available
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, or one without a limit
        return available
    cached = sum(int(stat.get(name, 0)) for name in ("active_file", "inactive_file"))
    return max(0, min(available, limit - used + cached))


def device_memory() -> dict[str, int]:
    """Give the bytes of each GPU that torch sees, by its name in a plan; empty where there is no torch or no GPU."""
    try:
        import torch
    except ImportError:
        return {}
    if not has_gpus():
        return {}
    return {
        f"gpu:{number}": int(torch.cuda.get_device_properties(number).total_memory)
        for number in range(torch.cuda.device_count())
    }


def gib(size: float) -> str:
    """Write a size for people."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:.0f} MiB"
