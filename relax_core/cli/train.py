# SPDX-License-Identifier: Apache-2.0
"""`relax train` and `relax resume`: prepare a run, start it, write its report. All decisions are in `control`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_core.cli.plan import print_graph
from relax_core.cli.terminal import INTERRUPTED, split

if TYPE_CHECKING:
    from relax_core.control.prepare import Prepared

UNCHECKED = "placement.check_memory=false"
Arguments = Annotated[
    list[str], typer.Argument(help="TOML files or a recipe, then overrides such as optimizer.lr=1e-5.")
]
RunDir = Annotated[Path | None, typer.Option(help="Where to write the run; it must be new or empty.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as one JSON document.")]
Runner = Annotated[str | None, typer.Option(help="ray, local or inline; short for run.runner=...")]
Anyway = Annotated[
    bool,
    typer.Option("--anyway", help="Start also what can't fit into memory; short for placement.check_memory=false."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, print the graph, start nothing.")]


def train(
    arguments: Arguments,
    run_dir: RunDir = None,
    runner: Runner = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
    anyway: Anyway = False,
) -> None:
    """Train: `relax train quickstart`, or `relax train my.toml cluster.toml algorithm.clip_high=0.28`."""
    from relax_core.control.prepare import prepare

    sources, overrides = split(arguments)
    overrides += [f"run.runner={runner}"] if runner else []
    overrides += [UNCHECKED] if anyway else []
    if dry_run:
        print_graph(sources, overrides)
    else:
        _run(prepare(sources, overrides, run_dir=run_dir), as_json)


def resume(
    run: Annotated[str, typer.Argument(help="Run directory, or its name under the runs folder.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="steps, eval, sinks or placement may change.")] = None,
    as_json: AsJson = False,
    anyway: Anyway = False,
) -> None:
    """Continue a run from its newest checkpoint."""
    from relax_core.control.prepare import prepare_resume
    from relax_core.observe.run_directory import find_run

    _run(prepare_resume(find_run(run), [*(overrides or []), *([UNCHECKED] if anyway else [])]), as_json)


def _run(prepared: Prepared, as_json: bool) -> None:
    from relax_core.api.errors import RelaxError
    from relax_core.control.run import run
    from relax_core.views.display import LiveDisplay

    for notice in prepared.notices:
        print(notice, file=sys.stderr)
    display = None if as_json else LiveDisplay(
        prepared.config.run.name or prepared.launch.run_id, prepared.steps, first_step=prepared.first_step,
        mode="plain" if prepared.config.run.runner == "inline" else "auto",  # a debugger shares the terminal
    )  # fmt: skip
    path = prepared.directory.path
    try:
        summary = run(prepared, display)
    except RelaxError:
        _write_report(path)
        print(f"relax: the run failed; what it wrote is in {path}{_resumable(path)}", file=sys.stderr)
        raise
    _write_report(path)
    if as_json:
        print(json.dumps({**summary, "run_dir": str(path)}))
    if summary["status"] != "finished":
        print(_stopped(summary, path), file=sys.stderr)
        raise typer.Exit(INTERRUPTED)
    if not as_json:
        print(f"report: {path / 'report.html'}\nmodel:  {path / 'export'}")


def _write_report(path: Path) -> None:
    """Write the report; a report that can't be made, on a full disk say, is no failure of the run."""
    from relax_core.api.errors import RelaxError
    from relax_core.views.report import write_report

    try:
        write_report(path)
    except (OSError, RelaxError) as error:
        print(f"relax: no report: {error}; make it later with `relax report {path}`", file=sys.stderr)


def _resumable(path: Path) -> str:
    """Say how a failed run may go on, where it can."""
    from relax_core.control.stages import resumable_step

    step = resumable_step(path)
    return "" if step is None else f"; continue after step {step} with: relax resume {path}"


def _stopped(summary: dict[str, Any], path: Path) -> str:
    """Say where a stopped run stands, and how to go on."""
    from relax_core.control.stages import resumable_step

    step = resumable_step(path)
    if step is None:
        return f"relax: {summary['status']} before there was a checkpoint; start it anew"
    busy = f"; {' and '.join(summary['busy'])} did not finish in time" if summary.get("busy") else ""
    again = f" (done: {summary['steps']}; the later ones are repeated)" if summary.get("steps", step) > step else ""
    return (
        f"relax: {summary['status']} with a checkpoint of step {step}{again}{busy}; continue with: relax resume {path}"
    )
