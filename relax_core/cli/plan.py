# SPDX-License-Identifier: Apache-2.0
"""`relax plan`: who runs where, what dies together, how much memory each process needs, and the least time of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from relax_core.control.memory_check import ProcessNeed
    from relax_core.diagnostics.estimate import RunEstimate

Arguments = Annotated[list[str], typer.Argument(help="TOML files or a recipe, then overrides.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Anyway = Annotated[bool, typer.Option("--anyway", help="Exit 0 also where it can't fit.")]


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("plan")(plan)


def plan(arguments: Arguments, as_json: AsJson = False, anyway: Anyway = False) -> None:
    """Foretell placement, memory and time of a run; exit 2 where it can't fit."""
    from relax_core.cli.runs import print_json
    from relax_core.cli.train import split
    from relax_core.diagnostics.estimate import forecasts

    stages = forecasts(*split(arguments))
    if as_json:
        documents = [{**document(found), **({"stage": name} if name else {})} for name, found in stages]
        print_json(documents[0] if len(documents) == 1 else {"schema": "relax.plan/1", "stages": documents})
    for name, found in () if as_json else stages:
        if name:
            typer.echo(f"stage {name}")
        _print(found)
    for _, found in () if anyway else stages:
        found.check()


def document(found: RunEstimate) -> dict[str, Any]:
    """As `--json` gives it."""
    return {
        "schema": "relax.plan/1",
        "fits": all(room.fits for room in found.rooms),
        "mode": found.plan.mode,
        "prompt_tokens": found.prompt_tokens,
        "groups": [_group(need) for need in found.needs],
        "memory": [
            {"name": room.name, "needed": room.needed, "available": room.available, "largest": room.largest}
            for room in found.rooms
        ],
        "flops_per_s": found.flops_per_s,
        "step": [
            {"group": one.group, "phase": one.phase, "flops": one.flops, "least_s": one.least_s}
            for one in found.durations
        ],
        "notes": list(found.plan.notes),
    }


def _group(need: ProcessNeed) -> dict[str, Any]:
    return {
        "name": need.group.name,
        "processes": need.group.size,
        "threads": need.group.threads,
        "devices": sorted(need.group.devices),
        "unknown": need.unknown,
        "estimates": [{"phases": one.phases, "notes": list(one.notes)} for one in need.processes],
    }


def _print(found: RunEstimate) -> None:
    from relax_core.cli.runs import print_table
    from relax_core.control.memory_check import gib

    typer.echo(f"placement {found.plan.mode}; each line is what dies together")
    print_table(("group", "processes", "on"), [_where(need) for need in found.needs])
    typer.echo(f"\nmemory of one process, with prompts of up to {found.prompt_tokens} tokens (beside its libraries)")
    print_table(("group", "phase", "peak", "of which"), [row for need in found.needs for row in _phases(need)])
    for note in dict.fromkeys(
        f"{need.group.name}: {note}" for need in found.needs for one in need.processes for note in one.notes
    ):
        typer.echo(f"note: {note}")
    typer.echo("\nmemory together")
    for room in found.rooms:
        beside = f"of {gib(room.available)}" if room.available else "(how much there is, is not known here)"
        typer.echo(f"{room.name}: {gib(room.needed)} {beside}{'' if room.fits else ', too much'}")
    if found.flops_per_s:
        rate = f"{found.flops_per_s / 1e9:.0f} GFLOP/s of float32 a process"
        typer.echo(
            f"\nleast time of a step: its multiplications at {rate}, measured just now; small models take several times it"
        )
        for one in found.durations:
            typer.echo(f"{one.group} {one.phase}: {one.flops / 1e9:.3g} GFLOP, {one.least_s:.2g} s at least")
    for note in found.plan.notes:
        typer.echo(f"note: {note}")


def _where(need: ProcessNeed) -> tuple[str, str, str]:
    return need.group.name, str(need.group.size), ", ".join(sorted(need.group.devices))


def _phases(need: ProcessNeed) -> Iterator[tuple[str, str, str, str]]:
    from relax_core.control.memory_check import gib

    if not need.processes:
        yield need.group.name, "-", "-", need.unknown
        return
    for phase, parts in need.processes[0].phases.items():
        ordered = sorted(parts.items(), key=lambda part: -part[1])
        yield (
            need.group.name,
            phase,
            gib(sum(parts.values())),
            ", ".join(f"{name} {gib(size)}" for name, size in ordered),
        )
