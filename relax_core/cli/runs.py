# SPDX-License-Identifier: Apache-2.0
"""`relax runs`: the runs under `$RELAX_RUNS` (or ./runs), newest first."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from relax_core.views.run import Listed

RUN = Annotated[
    str | None, typer.Argument(metavar="RUN", help="A run directory, or a name under ./runs; else the latest.")
]
JSON = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("runs", help="List runs: state, steps, reward.")(runs)


def runs(json: JSON = False) -> None:
    """List runs."""
    from relax_core.observe.run_directory import runs_root
    from relax_core.views.run import list_runs

    root = runs_root()
    found = list_runs(time.time(), root)
    if json:
        print_json({"schema": "relax.runs/1", "root": str(root), "runs": [asdict(run) for run in found]})
    elif found:
        print_table(("run", "state", "step", "reward", "held-out"), [_row(run) for run in found])
    else:
        typer.echo(f"no runs under {root}", err=True)


def print_json(document: object) -> None:
    """The only thing on stdout."""
    from relax_core.observe.documents import encode

    typer.echo(encode(document))


def print_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Columns as wide as their widest cell."""
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    for row in (head, *rows):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(run: Listed) -> tuple[str, ...]:
    steps = f"{run.step}/{run.steps}" if run.steps else str(run.step)
    reward = (
        f"{run.reward_first:.3f} -> {run.reward_last:.3f}" if None not in (run.reward_first, run.reward_last) else "-"
    )
    return run.name, run.state, steps, reward, f"{run.eval_last:.3f}" if run.eval_last is not None else "-"
