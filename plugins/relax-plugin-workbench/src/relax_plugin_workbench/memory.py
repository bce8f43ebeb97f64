# SPDX-License-Identifier: Apache-2.0
"""A check before a run that the memory that its plan needs fits into the host's and each device's memory.

Trainers and engines estimate their own processes. The memory of a backend without an estimate is reported as unknown.
The estimates cover tensors and a process's libraries. Only this machine is checked, not a cluster of several machines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil
from pathlib import Path
from typing import Any, Literal, cast

from relax_core.api.checks import CheckFinding, PreflightFacts
from relax_core.api.engine import Engine
from relax_core.api.errors import ConfigError
from relax_core.api.model_folder import WEIGHTS, model_context
from relax_core.api.plan import RESERVED, Estimate, Plan, WorkerGroup, Workload
from relax_core.api.trainer import Trainer
from relax_core.api.weights import Version
from relax_core.control.data_check import PlanContext, open_rows
from relax_core.control.epochs import count_rows
from relax_core.control.placement import TEACHER, has_gpus
from relax_core.data.tasks import MOST_HELD_OUT, TaskSet
from relax_core.engines.factories import AUXILIARY_GROUP, auxiliary_spec, engine_spec
from relax_core.launch import Catalogue, RunConfig, RunContext, compose, free_memory
from relax_core.registry.error_text import authored
from relax_core.registry.shapes import checked, returned_by
from relax_core.roles.rank_group import trainer_spec
from relax_plugin_workbench.single_role import announce_functions

FITS = "the run fits into free memory"
Count = Callable[[str, str, Mapping[str, str]], int]
"""Returns the number of rows of a task file, by the configuration's key, the path and the columns."""
SMALL = 0.5
"""Share of the free memory; a run with an upper bound (`_bound`) below this share passes without exact figures."""
STATE = 32
"""Most memory of a process for weights, gradients, moments and copies, as a multiple of its model's weights."""
COMPUTED, CACHED = 4, 1
"""Most memory of a token, in training and in generation, as a multiple of weights / width of the model. A layer has
about 12 * width^2 weights, and a token has about 20 * width numbers in each layer."""
UNBOUNDED = 1 << 30
AT_ONCE = 8192
"""Tokens that a trainer trains at once if `batch.tokens_per_micro_batch` is not set."""
MEDIA_NOTE = "each image, video or sound counts as one token of its prompt; the real rows are longer and need more"
"""Note of an estimate for a run with media."""
PROMPTS = 256
"""Number of prompts that are measured to find the longest; a later prompt may be longer."""
LIBRARIES = 1 << 29
"""Bytes assumed for the libraries of a process with torch and transformers; a rank with a tiny model holds 0.35 GiB."""
KEPT = {"weights": "parameters", "optimizer": "optimizer", "kv": "kv cache"}
"""offload part -> name of the part in estimates; a part that is not offloaded stays in memory."""
IN_SHARED_MEMORY = "published"
"""Name in estimates of the part that is always in the host's memory, even if the process uses a GPU."""
FIXES = {
    "activations": ("batch.tokens_per_micro_batch", "set fewer, or shorten rows with rollout.max_new_tokens"),
    "logits": ("trainer.logits_mb", "set less: logits are computed in more slices"),
    "kv cache": (
        "rollout.groups_per_step",
        "set fewer, shorten rows with rollout.max_new_tokens, or use more engines",
    ),
    "optimizer": (
        "model.path",
        "share the state over more ranks (trainer.sharding), train adapters, or use a smaller model",
    ),
}


@dataclass(frozen=True, slots=True)
class ProcessNeed:
    """The estimates for the processes of one worker group."""

    group: WorkerGroup
    first: Estimate | None
    """Estimate of the first process, which also writes checkpoints and publishes weights."""
    others: Estimate | None
    """Estimate of each process after the first process."""
    unknown: str = ""
    """Reason why the backend gave no estimate; empty with estimates."""

    @property
    def processes(self) -> tuple[Estimate, ...]:
        """One estimate per process of the group; empty without estimates."""
        if self.first is None or self.others is None:
            return ()
        return (self.first, *[self.others] * (self.group.size - 1))


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The bytes needed and available in one memory: the host's or a GPU's."""

    name: str
    needed: int
    available: int
    """Bytes that a run may use; 0: unknown."""
    largest: str = ""
    """Name of the part that needs the most bytes."""

    @property
    def fits(self) -> bool:
        return not self.available or self.needed <= self.available

    @property
    def refusal(self) -> ConfigError:
        """The error for a budget that does not fit."""
        field, fix = FIXES.get(self.largest, FIXES["optimizer"])
        got = f"a plan that needs {gib(self.needed)} of {self.name}, which has {gib(self.available)} available"
        go_on = "placement.check_memory=false (on the command line also --anyway) skips this check"
        return ConfigError(field, got, f"the largest part is {self.largest}: {fix}; {go_on}")


def memory(facts: PreflightFacts) -> Iterator[CheckFinding]:
    """Find whether the plan fits into the free memory, unless `placement.check_memory` is false.

    Exact figures take seconds and import torch, so small models pass by a generous upper bound instead. If several
    memories are too small, the finding names the first.
    """
    config, plan = facts.config, facts.plan
    elsewhere = config["run"]["runner"] == "ray" and bool(os.environ.get("RAY_ADDRESS"))
    if not config["placement"]["check_memory"] or elsewhere:
        return
    typed = cache(partial(_typed, config))

    def count(field: str, path: str, columns: Mapping[str, str]) -> int:
        run, catalogue = typed()
        return count_rows(run, catalogue.build, field, Path(path), columns)

    refused: Literal["failed", "warning"] = "failed" if facts.starts else "warning"
    try:
        on_host = not any(map(_on_gpu, plan.groups.values()))
        if on_host and _bound(config, plan, count) <= SMALL * facts.free_memory_bytes:
            yield CheckFinding(FITS, "ok", f"an upper bound is less than half of {gib(facts.free_memory_bytes)}")
            return
        run, catalogue = typed()
        needs = process_needs(run, catalogue, plan, longest_prompt(run, catalogue, plan))
    except (MemoryError, OverflowError):  # even the estimate of that many rows does not fit
        size = f"steps of {config['rollout']['groups_per_step']} times {config['rollout']['group_size']} samples"
        fix = "too many for any memory: lower groups_per_step or group_size"
        yield CheckFinding(FITS, refused, size, advice=fix, field="rollout")
        return
    # Measure again: the estimates take seconds, in which former processes may have ended.
    budgets = memory_budgets(needs, free_memory(), device_memory())
    unfit = next((budget for budget in budgets if not budget.fits), None)
    if unfit is None:
        found = "; ".join(f"{gib(each.needed)} of {gib(each.available)} of {each.name}" for each in budgets)
        yield CheckFinding(FITS, "ok", found)
    else:
        error = unfit.refusal
        yield CheckFinding(FITS, refused, str(error.got), advice=error.fix, field=error.field)


def _typed(config: Mapping[str, Any]) -> tuple[RunConfig, Catalogue]:
    catalogue = Catalogue.load(config["plugins"])
    announce_functions(config["rewards"], catalogue)
    return compose([config], (), catalogue, on_disk=False).config, catalogue


def _bound(config: Mapping[str, Any], plan: Plan, count: Count) -> float:
    """Return an upper bound of the bytes that a run can take, derived from its largest model."""
    rollout, prompt = config["rollout"], config["data"].get("max_prompt_tokens") or UNBOUNDED
    context = model_context(Path(config["model"]["path"])) or UNBOUNDED
    row = min(context, prompt + rollout["max_new_tokens"])
    tokens = rollout["groups_per_step"] * plan.group_size * row * (1 + (plan.max_staleness or 0))
    trained = min(tokens, max(row, config["batch"].get("tokens_per_micro_batch") or AT_ONCE))
    evaluations = _evaluations(config, count, prompt) if "rollout" in plan.groups else ()
    generated = max([tokens, *(work.rows * min(context, work.row_tokens) for work in evaluations)])
    teachers = config["teachers"] if any(name.partition("-")[0] == TEACHER for name in plan.groups) else ()
    pools = (pool for pool in config["engines"] if AUXILIARY_GROUP + pool["name"] in plan.groups)
    tables = (config["model"], config["critic"], config["reference"], *teachers, *pools)
    largest = 0.0
    for folder in {Path(table["path"]) for table in tables if table.get("path")}:
        model = json.loads((folder / "config.json").read_text())
        text = model["text_config"] if isinstance(model.get("text_config"), dict) else model
        stored = sum(file.stat().st_size for kind in WEIGHTS for file in folder.glob(kind))
        weights = stored * (1 if (text.get("dtype") or text.get("torch_dtype")) == "float32" else 2)
        width = text.get("hidden_size")
        width = width if isinstance(width, int) and width > 0 else 1
        largest = max(largest, weights * (STATE + (COMPUTED * trained + CACHED * generated) / width))
    return (LIBRARIES + largest) * sum(group.size for group in plan.groups.values())


def longest_prompt(config: RunConfig, catalogue: Catalogue, plan: Plan) -> int:
    """Return the length in tokens of the longest of the first prompts, or of a dataset's longest of the first rows."""
    rows, _, _ = open_rows(config, catalogue, plan)
    first = range(min(PROMPTS, len(rows)))
    if isinstance(rows, TaskSet):
        return max((len(rows.prompt(index).tokens) for index in first), default=1)
    return max((len(example.tokens) for index in first for example in rows.examples(index)), default=1)


def process_needs(
    config: RunConfig, catalogue: Catalogue, plan: Plan, prompt_tokens: int, groups: Iterable[WorkerGroup] | None = None
) -> tuple[ProcessNeed, ...]:
    """Return the estimates of each worker group's trainer or engine; the longest prompt has `prompt_tokens` tokens.

    `groups`: the groups of the plan to estimate; None: all of them.
    """
    context, step = PlanContext(config, plan, catalogue.build), largest_step(config, plan, prompt_tokens)
    return tuple(_process_need(group, context, step) for group in (plan.groups.values() if groups is None else groups))


def largest_step(config: RunConfig, plan: Plan, prompt_tokens: int) -> Workload:
    """Return the work of one step whose rows have the maximal length, for prompts of `prompt_tokens` tokens."""
    rollout = config.rollout
    return Workload(rollout.groups_per_step, plan.group_size, prompt_tokens, rollout.max_new_tokens)


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
        if pool is not None:  # assumed: one request for each sample of a step, as long as a sample
            share = replace(step, prompts=ceil(step.prompts / group.size))
            first = last = estimated(cast(Engine, backend), auxiliary_spec(config, pool), share)
        elif group.name == "rollout":
            first = last = _engine_estimate(cast(Engine, backend), context, step, group.size)
        else:
            first = last = _rank_estimate(cast(Trainer, backend), context, group, 0, step)
            if group.size > 1:
                last = _rank_estimate(cast(Trainer, backend), context, group, group.size - 1, step)
        return ProcessNeed(group, first, last)
    except NotImplementedError as error:
        return ProcessNeed(group, None, None, f"not estimated by {choice.name}{f': {error}' if str(error) else ''}")


def _engine_estimate(engine: Engine, context: PlanContext, step: Workload, size: int) -> Estimate:
    """Estimate an engine: memory for its share of all samples that may be in flight at once, work for one step.

    In flight are the groups of training, up to the staleness bound, or the tasks of one evaluation set.
    """
    config = context.config
    spec = engine_spec(config, Version("actor", 0, 0))

    def share(work: Workload) -> Estimate:
        return estimated(engine, spec, replace(work, prompts=ceil(work.prompts / size)))

    def count(field: str, path: str, columns: Mapping[str, str]) -> int:
        return count_rows(config, context.build, field, Path(path), columns)

    ahead = replace(step, prompts=step.prompts * (1 + (context.plan.max_staleness or 0)))
    evaluations = _evaluations(config.dump(), count, step.prompt_tokens)
    estimates = map(share, (ahead, *evaluations))
    largest = max(estimates, key=lambda each: max((sum(parts.values()) for parts in each.phases.values()), default=0))
    return replace(largest, flops=share(step).flops)


def _evaluations(config: Mapping[str, Any], count: Count, prompt_tokens: int) -> Iterator[Workload]:
    """Yield the work of each evaluation set, whose tasks are all in flight at once; count the rows without a `size`."""
    table, new_tokens = config["eval"], config["rollout"]["max_new_tokens"]
    if not table["every"]:
        return
    if not table["sets"]:
        yield Workload(table.get("size") or MOST_HELD_OUT, table["samples"], prompt_tokens, new_tokens)
    for index, each in enumerate(table["sets"]):
        columns = each.get("columns") or config["data"]["columns"]
        size = each.get("size") or count(f"eval.sets.{index}.path", each["path"], columns)
        samples = each.get("samples") or table["samples"]
        yield Workload(size, samples, prompt_tokens, each.get("max_new_tokens") or new_tokens)


def _rank_estimate(trainer: Trainer, context: PlanContext, group: WorkerGroup, rank: int, step: Workload) -> Estimate:
    role, number = group.name, "0"
    model: Mapping[str, Any] | None = None
    if role.startswith(TEACHER):
        role, _, number = role.partition("-")
        teacher = context.config.teachers[int(number or 0)]
        own = context.config.model
        model = {"path": str(teacher.path), "dtype": teacher.dtype or own.dtype, "head_dtype": own.head_dtype}
    return estimated(trainer, trainer_spec(cast(RunContext, context), role, rank, group.size, "", model), step)


def estimated(component: Engine | Trainer, spec: Any, work: Workload) -> Estimate:
    """Return the estimate of an engine or trainer. Raises PluginError naming the component, or NotImplementedError."""
    with authored(f"{component.kind} {type(component).__qualname__}"):
        try:
            return cast(Estimate, checked(component.estimate(spec, work), Estimate, returned_by(component.estimate)))
        except NotImplementedError as error:
            missing = error
    raise missing


def memory_budgets(
    needs: Iterable[ProcessNeed], host_bytes: int, device_bytes: Mapping[str, int]
) -> tuple[MemoryBudget, ...]:
    """Add up the bytes that processes need of the host's memory and of each device's memory.

    Groups that share devices work in turn. Each group is counted at its peak, plus the parts that its neighbours keep.
    """
    known = [need for need in needs if need.processes]
    on_host = [need for need in known if not _on_gpu(need.group)]
    shared = sum(p.get(IN_SHARED_MEMORY, 0) for need in known for p in need.processes[0].phases.values())
    libraries = LIBRARIES * sum(need.group.size for need in known)
    needed = shared + libraries + sum(_most_at_once(sharing, sum) for sharing in _sharing_devices(on_host))
    found = [MemoryBudget("host memory", needed, host_bytes, _largest_part(on_host))]
    alike: dict[tuple[str, ...], tuple[int, str]] = {}  # devices with the same groups need the same
    for device in sorted({name for need in known if _on_gpu(need.group) for name in need.group.devices}):
        here = [need for need in known if device in need.group.devices]
        names = tuple(need.group.name for need in here)
        if names not in alike:
            alike[names] = _most_at_once(here, max), _largest_part(here)
        on_device, largest = alike[names]
        found.append(MemoryBudget(device, on_device, device_bytes.get(device, 0), largest))
    return tuple(found)


def _most_at_once(sharing: list[ProcessNeed], gather: Callable[[Iterable[int]], int]) -> int:
    """Return the most bytes in use at once.

    `gather` is `sum` for a memory that all processes of a group share, or `max` if each process has its own device.
    """
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
    """Split groups into sets that share devices, directly or through a third group."""
    left = list(needs)
    while left:
        sharing = [left.pop(0)]
        for need in sharing:  # the list grows during the loop
            neighbours = [other for other in left if other.group.devices & need.group.devices]
            sharing += neighbours
            left = [other for other in left if other not in neighbours]
        yield sharing


def _largest_part(needs: list[ProcessNeed]) -> str:
    """Return the name of the part with the most bytes in the peak phases, without the allocator's reserve."""
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


def device_memory() -> dict[str, int]:
    """Return device name in a plan -> memory in bytes, for each GPU that torch sees; empty without torch or GPU."""
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
    """Format a size in bytes as GiB or MiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:.0f} MiB"
