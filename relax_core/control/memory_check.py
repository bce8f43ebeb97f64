# SPDX-License-Identifier: Apache-2.0
"""Before a run starts: whether it can fit, as `relax plan` foretells it; refused where it surely can't.

Telling it exactly costs seconds of processor time and loads torch here. So it is not asked of models that are small beside
what is free, by a bound that is generous to any of them. It knows this machine alone: a cluster of several is not judged.

Whether a plan fits: what its processes need together, on the host and on each device, beside what is there.

Groups that take turns on devices are counted one awake at a time, beside what the others keep in memory meanwhile.
Bytes are those of tensors and of a process's libraries; what an allocator holds in reserve comes on top, so only what
surely can't fit is refused.

What each worker group of a plan says it will need, asked of its trainer or engine before anything starts.

Who can't tell is named; nothing is guessed in their place. What the figures mean together is `sizing`'s.

How many tokens the longest prompt has, by the first of them, without anything of a run being started.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, cast

from relax_core.api.algorithm import Source
from relax_core.api.engine import Engine
from relax_core.api.errors import ConfigError
from relax_core.api.estimate import RESERVED, Estimate, Workload
from relax_core.api.plan import Plan, WorkerGroup
from relax_core.api.trainer import Trainer
from relax_core.api.weights import Version
from relax_core.config.model_folder import WEIGHTS, model_context
from relax_core.config.run_config import RunConfig, RunContext
from relax_core.config.tables import EngineTable
from relax_core.control.machine import device_memory, free_memory
from relax_core.control.placement import ROLE as TEACHER
from relax_core.data.dataset import open_training
from relax_core.engines.factories import AUXILIARY_GROUP, auxiliary_spec, engine_spec
from relax_core.registry.catalogue import Catalogue
from relax_core.roles.rank_group import trainer_spec
from relax_core.sampling.evaluation import open_tasks

ENGINES = "rollout"


@dataclass(frozen=True, slots=True)
class ProcessNeed:
    """Of one worker group."""

    group: WorkerGroup
    first: Estimate | None
    """Of its first process, which writes and publishes too."""
    others: Estimate | None
    """Of each of the others."""
    unknown: str = ""
    """Why there is no estimate."""

    @property
    def processes(self) -> tuple[Estimate, ...]:
        """An estimate for each."""
        if self.first is None or self.others is None:
            return ()
        return (self.first, *[self.others] * (self.group.size - 1))


@dataclass(frozen=True, slots=True)
class _Planned:
    """As much of a role's context as a specification takes."""

    config: RunConfig
    plan: Plan
    build: Callable[..., Any]
    run_dir: str = ""


def needs(config: RunConfig, catalogue: Catalogue, plan: Plan, prompt_tokens: int) -> tuple[ProcessNeed, ...]:
    """`prompt_tokens`: of the longest prompt."""
    planned = _Planned(config, plan, catalogue.build)
    rollout = config.rollout
    step = Workload(rollout.prompts_per_step, plan.group_size, prompt_tokens, rollout.max_new_tokens)
    return tuple(_need(group, planned, step) for group in plan.groups.values())


def _need(group: WorkerGroup, planned: _Planned, step: Workload) -> ProcessNeed:
    pool = (
        planned.config.pool(group.name.removeprefix(AUXILIARY_GROUP))
        if group.name.startswith(AUXILIARY_GROUP)
        else None
    )
    own = planned.config.engine if group.name == ENGINES else planned.config.trainer
    choice = own if pool is None else planned.config.backend_of(pool)
    if choice.python:
        return ProcessNeed(group, None, None, f"{choice.name} runs under another interpreter, {choice.python}")
    backend = planned.build(choice.chosen)
    backend.build = planned.build
    try:
        if pool is not None:
            told = _of_pool(cast(Engine, backend), planned.config, pool, step, group.size)
            return ProcessNeed(group, told, told)
        if group.name == ENGINES:
            told = _of_engine(cast(Engine, backend), planned, step, group.size)
            return ProcessNeed(group, told, told)
        first, last = (_of_rank(cast(Trainer, backend), planned, group, rank, step) for rank in (0, group.size - 1))
        return ProcessNeed(group, first, last)
    except NotImplementedError as error:
        return ProcessNeed(group, None, None, f"not estimated by {choice.name}{f': {error}' if str(error) else ''}")


def _of_engine(engine: Engine, planned: _Planned, step: Workload, size: int) -> Estimate:
    """Its share of all groups that may be under way at once; the work is that of one step."""
    run = planned.config
    ahead = 1 + (planned.plan.max_staleness or 0)
    evaluated = ceil(run.eval.size * run.eval.samples / step.group_size) if run.eval.every else 0
    most = max(step.prompts * ahead, evaluated)
    spec = engine_spec(run, Version("actor", 0, 0))
    bytes_of = engine.estimate(spec, replace(step, prompts=ceil(most / size)))
    flops = engine.estimate(spec, replace(step, prompts=ceil(step.prompts / size))).flops
    return replace(bytes_of, flops=flops)


def _of_pool(engine: Engine, run: RunConfig, pool: EngineTable, step: Workload, size: int) -> Estimate:
    """Its share of one request for each sample of a step, as long as a sample: what is asked is not known before."""
    return engine.estimate(auxiliary_spec(run, pool), replace(step, prompts=ceil(step.prompts / size)))


def _of_rank(trainer: Trainer, planned: _Planned, group: WorkerGroup, rank: int, step: Workload) -> Estimate:
    role, _, number = group.name.partition("-") if group.name.startswith("teacher") else (group.name, "", "")
    model: Mapping[str, Any] | None = None
    if role == "teacher":
        teacher = planned.config.teachers[int(number or 0)]
        model = {"path": str(teacher.path), "dtype": teacher.dtype or planned.config.model.dtype}
    spec = trainer_spec(cast(RunContext, planned), role, rank, group.size, "", model)
    return trainer.estimate(spec, step)


LIBRARIES = 1 << 29
"""Taken for a process with torch and transformers; a rank that has trained a tiny model holds 0.35 GiB on a CPU."""
KEPT = {"weights": "parameters", "optimizer": "optimizer", "kv": "kv cache"}
"""Parts that stay between turns unless they sleep, as estimates name them."""
IN_SHARED_MEMORY = "published"
"""A part that lies in the host's memory, whatever device the process uses."""
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
class MemoryBudget:
    """A memory and what is to lie in it."""

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


def rooms(needs: Iterable[ProcessNeed], host_bytes: int, device_bytes: Mapping[str, int]) -> tuple[MemoryBudget, ...]:
    """The host's memory, then each device's that is known."""
    known = [need for need in needs if need.processes]
    on_host = [need for need in known if not _on_gpu(need.group)]
    shared = sum(parts.get(IN_SHARED_MEMORY, 0) for need in known for parts in _phases(need.processes[0]))
    libraries = LIBRARIES * sum(need.group.size for need in known)
    needed = shared + libraries + sum(_together(cluster, True) for cluster in _clusters(on_host))
    found = [MemoryBudget("host memory", needed, host_bytes, _largest(on_host))]
    for device in sorted({name for need in known if _on_gpu(need.group) for name in need.group.devices}):
        here = [need for need in known if device in need.group.devices]
        found.append(MemoryBudget(device, _together(here, False), device_bytes.get(device, 0), _largest(here)))
    return tuple(found)


def gib(size: float) -> str:
    """For people."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:.0f} MiB"


def _together(cluster: list[ProcessNeed], every: bool) -> int:
    """The most that is alive at once of groups that take turns; of each all processes, or one on this device."""
    gather = sum if every else max
    awake = {need.group.name: gather([_peak(one) for one in need.processes]) for need in cluster}
    asleep = {need.group.name: gather([_rest(one, need.group) for one in need.processes]) for need in cluster}
    return max(awake[name] + sum(size for other, size in asleep.items() if other != name) for name in awake)


def _peak(estimate: Estimate) -> int:
    return max((sum(parts.values()) - parts.get(IN_SHARED_MEMORY, 0) for parts in _phases(estimate)), default=0)


def _rest(estimate: Estimate, group: WorkerGroup) -> int:
    """What stays of a process between its turns."""
    kept = [name for part, name in KEPT.items() if part not in group.sleeps]
    return max((sum(parts.get(name, 0) for name in kept) for parts in _phases(estimate)), default=0)


def _clusters(needs: list[ProcessNeed]) -> Iterator[list[ProcessNeed]]:
    """Groups by who shares devices with whom."""
    left = list(needs)
    while left:
        cluster, devices = [left.pop(0)], frozenset[str]()
        while True:
            devices = frozenset[str]().union(*(need.group.devices for need in cluster))
            more = [need for need in left if need.group.devices & devices]
            if not more:
                break
            cluster += more
            left = [need for need in left if need not in more]
        yield cluster


def _largest(needs: list[ProcessNeed]) -> str:
    """The part with the most bytes in anybody's fullest phase."""
    parts: dict[str, int] = {}
    for need in needs:
        for estimate in need.processes:
            phase, _ = estimate.peak()
            for name, size in estimate.phases.get(phase, {}).items():
                if name == RESERVED:
                    continue  # it follows the others
                parts[name] = parts.get(name, 0) + size
    return max(parts, key=lambda name: parts[name], default="")


def _phases(estimate: Estimate) -> Iterable[Mapping[str, int]]:
    return estimate.phases.values()


def _on_gpu(group: WorkerGroup) -> bool:
    return any(name.startswith("gpu:") for name in group.devices)


LOOKED_AT = 256
"""Prompts whose length is taken; the longest may be among others."""


@dataclass(frozen=True, slots=True)
class _PromptContext:
    """As much of a role's context as opening tasks takes."""

    config: RunConfig
    plan: Plan
    build: Callable[..., Any]


def longest_prompt(config: RunConfig, catalogue: Catalogue, plan: Plan) -> int:
    """In tokens, of the first tasks, or rows of a dataset."""
    if plan.source is not Source.ROLLOUT:
        rows, _ = open_training(config, catalogue.build, plan.source)
        return max(len(one.tokens) for index in range(min(LOOKED_AT, len(rows))) for one in rows.examples(index))
    family: Any = catalogue.build(config.family.chosen)
    family.open(config.model.model_dump(mode="json"))
    tasks, _, _ = open_tasks(_PromptContext(config, plan, catalogue.build), family)  # type: ignore[arg-type]
    return max((len(tasks.prompt(index).tokens) for index in range(min(LOOKED_AT, len(tasks)))), default=1)


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
    pools = {pool.path for pool in config.engines if AUXILIARY_GROUP + pool.name in plan.groups}
    folders = {config.model.path, *(teacher.path for teacher in teachers if teacher.path), *pools}
    each = max(_of_model(folder, COMPUTED * trained + CACHED * tokens) for folder in folders)
    return (LIBRARIES + each) * sum(group.size for group in plan.groups.values())


def _of_model(folder: Path, tokens: float) -> float:
    told = json.loads((folder / "config.json").read_text())
    text = told.get("text_config", told)
    in_files = sum(file.stat().st_size for kind in WEIGHTS for file in folder.glob(kind))
    weights = in_files * (1 if (text.get("dtype") or text.get("torch_dtype")) == "float32" else 2)
    return float(weights * (STATE + tokens / int(text.get("hidden_size") or 1)))
