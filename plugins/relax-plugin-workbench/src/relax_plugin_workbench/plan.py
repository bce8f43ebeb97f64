# SPDX-License-Identifier: Apache-2.0
"""The verb `relax plan`, which prints the placement, the memory and the time of a run that is not started."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from relax_core.api.errors import ConfigError
from relax_core.cli.terminal import AsJson, Sources, print_json, print_table, say, split

if TYPE_CHECKING:
    from relax_plugin_workbench.estimate import RunEstimate
    from relax_plugin_workbench.memory import ProcessNeed


def plan(
    arguments: Sources,
    as_json: AsJson = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Exit with 0 even if the run does not fit in memory.")
    ] = False,
    layouts: Annotated[
        bool, typer.Option("--layouts", help="Compare the layouts of the trainer's ranks, the fastest that fits first.")
    ] = False,
    gpus: Annotated[
        int, typer.Option(min=0, help="With --layouts: GPUs of the trainer, one a rank; 0: this machine's.")
    ] = 0,
    gpu_memory: Annotated[
        float, typer.Option(min=0, help="With --layouts: GiB of memory of one GPU; 0: as this machine's.")
    ] = 0.0,
    gpu_tflops: Annotated[
        float, typer.Option(min=0, help="With --layouts: TFLOP/s of one GPU; 0: measured, or 400 for other GPUs.")
    ] = 0.0,
    link: Annotated[
        float, typer.Option(min=0, help="With --layouts: GB/s that a rank sends; 0: 200 for GPUs, 1 for CPUs.")
    ] = 0.0,
) -> None:
    """Estimate placement, memory and time of a run, or compare layouts.

    The exit code is 2 if the run, or every layout, does not fit in memory.
    """
    given = {"--gpus": gpus, "--gpu-memory": gpu_memory, "--gpu-tflops": gpu_tflops, "--link": link}
    for name, value in given.items():
        if value and not layouts:
            raise ConfigError(name, f"{value:g} without --layouts", "add --layouts: only layouts are compared for it")
    from relax_plugin_workbench.estimate import estimate_run

    if layouts:
        from relax_plugin_workbench.layouts import print_layouts

        print_layouts(*split(arguments), gpus, gpu_memory, gpu_tflops, link, as_json=as_json, anyway=anyway)
        return

    stages = estimate_run(*split(arguments))
    if as_json:
        documents = [
            {**_plan_document(estimate), **({"stage": estimate.stage} if estimate.stage else {})} for estimate in stages
        ]
        print_json(documents[0] if len(documents) == 1 else {"schema": "relax.plan/1", "stages": documents})
    for estimate in () if as_json else stages:
        if estimate.stage:
            say(f"stage {estimate.stage}")
        _print_plan(estimate)
    for estimate in () if anyway else stages:
        estimate.check()


def _plan_document(estimate: RunEstimate) -> dict[str, object]:
    return {
        "schema": "relax.plan/1",
        "fits": all(budget.fits for budget in estimate.budgets),
        "mode": estimate.plan.mode,
        "prompt_tokens": estimate.prompt_tokens,
        "groups": [
            {
                "name": need.group.name,
                "processes": need.group.size,
                "threads": need.group.threads,
                "devices": sorted(need.group.devices),
                "unknown": need.unknown,
                "estimates": [{"phases": each.phases, "notes": list(each.notes)} for each in need.processes],
            }
            for need in estimate.needs
        ],
        "memory": [
            {"name": each.name, "needed": each.needed, "available": each.available, "largest": each.largest}
            for each in estimate.budgets
        ],
        "flops_per_s": estimate.flops_per_s,
        "step": [
            {"group": each.group, "phase": each.phase, "flops": each.flops, "least_s": each.least_s}
            for each in estimate.durations
        ],
        "notes": [*estimate.notices, *estimate.plan.notes],
    }


def _print_plan(estimate: RunEstimate) -> None:
    from relax_plugin_workbench.memory import gib

    say(f"placement {estimate.plan.mode}; each line is a group of processes that fail together")
    groups = [need.group for need in estimate.needs]
    rows = [(group.name, str(group.size), ", ".join(sorted(group.devices))) for group in groups]
    print_table(("group", "processes", "on"), rows)
    say(f"\nmemory of one process, with prompts of up to {estimate.prompt_tokens} tokens (without its libraries)")
    print_table(("group", "phase", "peak", "of which"), [row for need in estimate.needs for row in _phases(need)])
    notes = (f"{need.group.name}: {note}" for need in estimate.needs for each in need.processes for note in each.notes)
    for note in dict.fromkeys(notes):
        say(f"note: {note}")
    say("\nmemory in total")
    for budget in estimate.budgets:
        available = f"of {gib(budget.available)}" if budget.available else "(available memory is unknown)"
        say(f"{budget.name}: {gib(budget.needed)} {available}{'' if budget.fits else ', does not fit'}")
    if estimate.flops_per_s:
        rate = f"{estimate.flops_per_s / 1e9:.0f} GFLOP/s of float32 a process"
        say(f"\nminimum time of a step: its matrix products at {rate}, measured now; small models take much longer")
        for each in estimate.durations:
            say(f"{each.group} {each.phase}: {each.flops / 1e9:.3g} GFLOP, at least {each.least_s:.2g} s")
    for note in (*estimate.notices, *estimate.plan.notes):
        say(f"note: {note}")


def _phases(need: ProcessNeed) -> Iterator[tuple[str, str, str, str]]:
    from relax_plugin_workbench.memory import gib

    if not need.processes:
        yield need.group.name, "-", "-", need.unknown
        return
    for phase, parts in need.processes[0].phases.items():
        ordered = sorted(parts.items(), key=lambda part: -part[1])
        of_which = ", ".join(f"{name} {gib(size)}" for name, size in ordered)
        yield need.group.name, phase, gib(sum(parts.values())), of_which
