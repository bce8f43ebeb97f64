# SPDX-License-Identifier: Apache-2.0
"""The work of `relax plan --layouts`: which layouts of a trainer's ranks fit into memory, and how fast a step is in each.

The trainer names the layouts (`Trainer.layouts`) and estimates each of them (`Trainer.estimate`). No process of the run
is started. The machine may be a supposed one.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from relax_core.api.errors import ConfigError
from relax_core.api.plan import Estimate, Layout, Plan
from relax_core.api.trainer import Trainer
from relax_core.cli.terminal import print_json, print_table, say
from relax_core.config.layers import Source
from relax_core.control.data_check import PlanContext
from relax_core.control.placement import ROLLOUT, TABLES, TEACHER
from relax_core.engines.factories import AUXILIARY_GROUP
from relax_core.launch import Catalogue, RunConfig, RunContext, free_memory, plan, plan_run
from relax_core.registry.error_text import authored
from relax_core.registry.shapes import checked, returned_by
from relax_core.roles.rank_group import trainer_spec
from relax_plugin_workbench.estimate import measured_rate
from relax_plugin_workbench.memory import (
    MEDIA_NOTE,
    MemoryBudget,
    ProcessNeed,
    device_memory,
    gib,
    largest_step,
    longest_prompt,
    memory_budgets,
    process_needs,
)

GPU_FLOPS, GPU_MEMORY, GPU_LINK = 400e12, 2.5e12, 200e9
"""Assumed rates of a GPU, per second: operations in 16 bits, bytes of its memory, bytes sent to other GPUs. They are
chosen for an H100 with NVLink, and were not measured."""
CPU_MEMORY, CPU_LINK = 10e9, 1e9
SHOWN_LAYOUTS = 10
"""Number of fitting layouts that the table shows."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices of the ranks, one for each rank."""

    ranks: int
    """Number of ranks; 0: as configured."""
    on_gpus: bool
    host_bytes: int
    """Bytes of the host's memory that a run may use; 0: unknown."""
    device_bytes: int
    """Bytes of each GPU's memory."""
    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float

    @classmethod
    def of(cls, gpus: int, gpu_gib: float, tflops: float, link_gb: float) -> Machine:
        """Return a machine with this many GPUs; 0 stands for this machine's value. Raises ConfigError without memory."""
        own = device_memory()
        memory = int(gpu_gib * 2**30) or min(own.values(), default=0)
        if not (gpus or own or gpu_gib):
            return cls(0, False, free_memory(), 0, measured_rate(1), CPU_MEMORY, link_gb * 1e9 or CPU_LINK)
        if not memory:
            raise ConfigError("--gpu-memory", "nothing", "this machine has no GPU: give the GiB of one GPU's memory")
        if not (gpus or own):
            raise ConfigError("--gpus", "nothing", "this machine has no GPU: give the number of GPUs")
        supposed = bool(gpus or gpu_gib)
        rate = tflops * 1e12 or GPU_FLOPS if supposed or tflops else measured_rate(1, dtype="bfloat16")
        host = 0 if supposed else free_memory()
        return cls(gpus or len(own), True, host, memory, rate, GPU_MEMORY, link_gb * 1e9 or GPU_LINK)

    def seconds(self, estimate: Estimate, passes: int) -> float:
        """Return the estimated time of a process for one step, without overlap of computation and communication."""
        total = 0.0
        for phase, flops in estimate.flops.items():
            busy = flops / self.flops_per_s if self.flops_per_s else 0.0
            busy += estimate.moved.get(phase, 0.0) / self.memory_bytes_per_s
            waited = busy / (1.0 - estimate.idle.get(phase, 0.0))
            sent = estimate.sent.get(phase, 0.0) / self.link_bytes_per_s
            total += (waited + sent) * (passes if phase == "train" else 1)
        return total


@dataclass(frozen=True, slots=True)
class ComparedLayout:
    """A layout with its estimates, or with the reason why it is refused."""

    layout: Layout
    seconds: float = 0.0
    """Estimated time of the trainers' work in one step."""
    needed: int = 0
    """Bytes needed in the fullest memory; 0: not estimated."""
    available: int = 0
    """Bytes of this memory that a run may use; 0: unknown."""
    field: str = ""
    """The field with the value that is refused, or `memory`; empty: the layout fits."""
    reason: str = ""
    """The reason of the refusal, the same for layouts that fail alike."""

    @property
    def settings(self) -> dict[str, object]:
        """Return configuration keys and their values."""
        options = {f"trainer.{name}": value for name, value in self.layout.options.items()}
        return {**options, "batch.tokens_per_micro_batch": self.layout.tokens_per_micro_batch}


@dataclass(frozen=True, slots=True)
class LayoutComparison:
    """The layouts of one stage of a run."""

    stage: str
    ranks: Mapping[str, int]
    """Configuration keys of the numbers of ranks, and their values in all layouts."""
    configured: Mapping[str, Any]
    """The configured values of the settings that layouts change."""
    layouts: tuple[ComparedLayout, ...]
    """Fitting layouts by estimated time and memory, then the refused layouts."""
    notes: tuple[str, ...] = ()

    @property
    def fitting(self) -> tuple[ComparedLayout, ...]:
        return tuple(each for each in self.layouts if not each.field)

    def best_of_options(self) -> list[ComparedLayout]:
        """Return the best fitting layout of each set of options: layouts with equal options differ in their micro-batches."""
        best: dict[tuple[tuple[str, Any], ...], ComparedLayout] = {}
        for each in self.fitting:
            best.setdefault(tuple(sorted(each.layout.options.items())), each)
        return list(best.values())

    def overrides(self, layout: ComparedLayout) -> str:
        """Return the settings of a layout that differ from the configured values, as on a command line."""
        settings = {**self.ranks, **layout.settings}
        changed = {key: value for key, value in settings.items() if self.configured.get(key) != value}
        return " ".join(f"{key}={json.dumps(value).strip(chr(34))}" for key, value in changed.items())

    def refusals(self) -> dict[tuple[str, str], list[ComparedLayout]]:
        """Return the refused layouts by field and reason, the layouts with the least memory first."""
        refused: dict[tuple[str, str], list[ComparedLayout]] = {}
        for each in sorted(self.layouts, key=lambda each: each.needed):
            if each.field:
                refused.setdefault((each.field, each.reason), []).append(each)
        return refused

    def check(self) -> None:
        """Raise ConfigError if no layout fits."""
        if self.fitting:
            return
        close = min((each for each in self.layouts if each.needed), key=lambda each: each.needed, default=None)
        need = f"; the closest needs {gib(close.needed)} of {gib(close.available)}" if close else ""
        fix = "use more GPUs or GPUs with more memory, a smaller model, or shorter rows"
        raise ConfigError("--layouts", f"{len(self.layouts)} layouts, of which none fits{need}", fix)


def print_layouts(
    sources: Sequence[str], overrides: Sequence[str], gpus: int, gpu_memory: float, gpu_tflops: float, link_gb: float,
    *, as_json: bool, anyway: bool,
) -> None:  # fmt: skip
    """Print the layouts of the trainer that fit, and the reasons of those refused; 0 stands for this machine's value."""
    machine = Machine.of(gpus, gpu_memory, gpu_tflops, link_gb)
    stages = compare_layouts(sources, overrides, machine)
    if as_json:
        documents = [_layouts_document(comparison) for comparison in stages]
        rates = {name: getattr(machine, name) for name in ("flops_per_s", "memory_bytes_per_s", "link_bytes_per_s")}
        print_json({"schema": "relax.layouts/1", "rates": rates, "stages": documents})
    for comparison in () if as_json else stages:
        if comparison.stage:
            say(f"stage {comparison.stage}")
        _print_comparison(comparison)
    if not as_json:
        flops, memory, link = machine.flops_per_s, machine.memory_bytes_per_s, machine.link_bytes_per_s
        rates_text = f"{flops / 1e12:.3g} TFLOP/s, {memory / 1e9:.4g} GB/s of memory and {link / 1e9:.3g} GB/s sent"
        say(f"note: times are for ranks with {rates_text}")
        say("note: the times order layouts and do not forecast: nothing overlaps, and all ranks send at the same rate")
    for comparison in () if anyway else stages:
        comparison.check()


def _layouts_document(comparison: LayoutComparison) -> dict[str, Any]:
    return {
        "stage": comparison.stage,
        "ranks": comparison.ranks,
        "notes": comparison.notes,
        "layouts": [
            {
                "settings": each.settings, "data_parallel": each.layout.data_parallel,
                "optimizer_ranks": each.layout.optimizer_ranks, "step_s": each.seconds, "needed": each.needed,
                "available": each.available, "refused": f"{each.field}: {each.reason}" if each.field else "",
            }
            for each in comparison.layouts
        ],
    }  # fmt: skip


def _print_comparison(comparison: LayoutComparison) -> None:
    shown, fitting = comparison.best_of_options(), comparison.fitting
    say(f"{len(fitting)} of {len(comparison.layouts)} layouts fit in memory; estimated time of one training step")
    every = [each.layout.options for each in comparison.layouts]
    names = dict.fromkeys(name for options in every for name in options)
    differing = [name for name in names if len({options.get(name) for options in every}) > 1]
    columns = ("step", "memory", "data_parallel", "optimizer_ranks", "tokens_per_micro_batch", *differing)
    rows = [
        (
            f"{each.seconds:.3g} s", gib(each.needed), str(each.layout.data_parallel), str(each.layout.optimizer_ranks),
            str(each.layout.tokens_per_micro_batch), *(str(each.layout.options.get(name, "")) for name in differing),
        )
        for each in shown[:SHOWN_LAYOUTS]
    ]  # fmt: skip
    if rows:
        print_table(columns, rows)
        if len(shown) > len(rows):
            say(f"and {len(shown) - len(rows)} slower layouts, which --json lists")
        say(f"\nfirst of them: {comparison.overrides(shown[0])}")
    refusals = comparison.refusals()
    say("\nrefused" * bool(refusals))
    for (field, reason), layouts in refusals.items():
        count = f"{len(layouts)} layout{'s' * (len(layouts) > 1)}"
        closest = layouts[0]
        if closest.needed:
            count += f"; at least {gib(closest.needed)}, with {comparison.overrides(closest)}"
        say(f"{field}: {reason} ({count})")
    for note in comparison.notes:
        say(f"note: {note}")


def compare_layouts(sources: Sequence[Source], overrides: Sequence[str], machine: Machine) -> list[LayoutComparison]:
    """Compare the layouts of each stage. Raises ConfigError if the configuration can't run or has no layouts."""
    comparisons = []
    with tempfile.TemporaryDirectory(prefix="relax-plan-") as directory:
        first = plan_run(sources, overrides)
        groups = {name for stage in first.stages for name in trainer_groups(stage.plan)}
        roles = {TEACHER if name.startswith(f"{TEACHER}-") else name for name in groups}
        keys = {f"placement.{TABLES.get(role, f'roles.{role}')}.ranks" for role in roles}
        ranks = dict.fromkeys(sorted(keys), machine.ranks or first.stages[0].config.placement.actor.ranks)
        placed = [*overrides, *(f"{key}={value}" for key, value in ranks.items())]
        planned = plan_run(sources, placed).build_recipe(Path(directory) / "recipe", sources, placed, untrained=True)
        for stage in planned.stages:
            on_machine = plan(stage.config, planned.catalogue, on_gpus=machine.on_gpus)
            longest = longest_prompt(stage.config, planned.catalogue, on_machine)
            comparisons.append(
                compare(stage.config, planned.catalogue, on_machine, longest, machine, ranks, stage.name)
            )
    return comparisons


def trainer_groups(placed: Plan) -> list[str]:
    """Return the names of the worker groups that are ranks of a trainer."""
    return [name for name in placed.groups if name != ROLLOUT and not name.startswith(AUXILIARY_GROUP)]


def compare(
    config: RunConfig, catalogue: Catalogue, placed: Plan, prompt_tokens: int, machine: Machine,
    ranks: Mapping[str, int], stage: str = "",
) -> LayoutComparison:  # fmt: skip
    """Estimate the layouts that the trainer names for this plan; return the best first and the refused layouts last.

    Raises ConfigError for a trainer that names no layouts or that can't estimate this run.
    """
    choice = config.trainer
    if choice.python:
        fix = "layouts are estimated under the interpreter of this command: add trainer.python= to the command"
        raise ConfigError("trainer.python", choice.python, fix)
    trainer = cast(Trainer, catalogue.build(choice.chosen))
    trainer.build = catalogue.build
    groups = [placed.groups[name] for name in trainer_groups(placed)]
    others = [group for group in placed.groups.values() if group not in groups]
    engines = process_needs(config, catalogue, placed, prompt_tokens, others)
    context = cast(RunContext, PlanContext(config, placed, catalogue.build))
    spec = trainer_spec(context, "actor", 0, placed.groups["actor"].size, "", None)
    with authored(f"trainer {type(trainer).__qualname__}"):
        layouts = tuple(trainer.layouts(spec, largest_step(config, placed, prompt_tokens)))
        checked(layouts, tuple[Layout, ...], returned_by(trainer.layouts))
    if not layouts:
        trainers = {name: cast(type[Trainer], catalogue.target("trainer", name)) for name in catalogue.names("trainer")}
        able = [name for name, kind in trainers.items() if kind.layouts is not Trainer.layouts]
        fix = f"this trainer names no layouts; choose {' or '.join(able) or 'another trainer'}"
        raise ConfigError("trainer.name", choice.name, fix)

    def estimated(layout: Layout) -> ComparedLayout:
        options = {**choice.chosen.options, **layout.options}
        changed = choice.model_copy(update={"chosen": replace(choice.chosen, options=options)})
        batch = config.batch.model_copy(update={"tokens_per_micro_batch": layout.tokens_per_micro_batch})
        try:
            run = config.model_copy(update={"trainer": changed, "batch": batch})
            needs = process_needs(run, catalogue, placed, prompt_tokens, groups)
        except ConfigError as error:
            name = error.field.removeprefix("trainer.")
            value = f" {layout.options[name]}" if name in layout.options else ""
            return ComparedLayout(layout, field=f"{error.field}{value}", reason=str(error.fix))
        unknown = next((need.unknown for need in needs if not need.processes), "")
        if unknown:
            raise ConfigError("trainer.name", choice.name, f"choose another trainer: {unknown}")
        return _weighed(layout, needs, engines, machine, config.batch.passes)

    ordered = sorted(map(estimated, layouts), key=lambda each: (bool(each.field), each.seconds, each.needed))
    options = {f"trainer.{name}": value for name, value in trainer.options.model_dump(mode="json").items()}
    configured = {**options, "batch.tokens_per_micro_batch": config.batch.tokens_per_micro_batch}
    notes = [f"the memory of {need.group.name} is left out: {need.unknown}" for need in engines if need.unknown]
    notes += [MEDIA_NOTE] if config.media else []
    return LayoutComparison(stage, ranks, configured, tuple(ordered), tuple(notes))


def _weighed(
    layout: Layout, needs: Sequence[ProcessNeed], engines: Iterable[ProcessNeed], machine: Machine, passes: int
) -> ComparedLayout:
    seconds = sum(
        max(machine.seconds(each, passes) for each in (need.first, need.others) if each is not None) for need in needs
    )
    gpus = {name for need in needs for name in need.group.devices if name.startswith("gpu:")}
    devices = dict.fromkeys(gpus, machine.device_bytes)
    budgets = memory_budgets([*engines, *needs], machine.host_bytes, devices)
    fullest: MemoryBudget = max(budgets, key=lambda each: each.needed / each.available if each.available else 0.0)
    refused = {} if fullest.fits else {"field": "memory", "reason": f"the largest part is {fullest.largest}"}
    return ComparedLayout(layout, seconds, fullest.needed, fullest.available, **refused)
