# SPDX-License-Identifier: Apache-2.0
"""`relax runs | status | why | report`: runs that are written down, those that still go included. Nothing is changed
but the report.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_core.cli.terminal import AsJson, print_json, print_table

if TYPE_CHECKING:
    from relax_core.views.run import Listed

Run = Annotated[
    str | None, typer.Argument(metavar="RUN", help="A run directory, or a name under ./runs; else the latest.")
]


def runs(json: AsJson = False) -> None:
    """List the runs under `$RELAX_RUNS` or ./runs, newest first."""
    from relax_core.observe.run_directory import runs_root
    from relax_core.views.run import list_runs

    root = runs_root()
    found = list_runs(time.time(), root)
    if json:
        print_json({"schema": "relax.runs/1", "root": str(root), "runs": [asdict(run) for run in found]})
    elif found:
        rows = [(run.name, run.state, _steps(run), _reward(run) or "-",
                 f"{run.eval_last:.3f}" if run.eval_last is not None else "-") for run in found]  # fmt: skip
        print_table(("run", "state", "step", "reward", "held-out"), rows)
    else:
        typer.echo(f"no runs under {root}", err=True)


def status(run: Run = None, json: AsJson = False) -> None:
    """Show how far one run is, its reward, and what each role does."""
    from relax_core.views.run import health, listed, open_run

    view, wall = open_run(run), time.time()
    line, state, written = listed(view, wall), health(view, wall), view.status()
    roles = written.get("roles", [])
    if json:
        body = asdict(line) | {"said_s_ago": state.said_s_ago, "detail": state.detail, "roles": roles}
        print_json({"schema": "relax.run-status/1", **body})
        return
    typer.echo(f"{line.name}: {state.state}, step {_steps(line)}{f'; {state.detail}' if state.detail else ''}")
    if reward := _reward(line):
        typer.echo(f"reward {reward} (means of 10 steps)")
    if roles and not state.ended:
        print_table(("role", "state", "doing"), [(role["role"], role["state"], _doing(role)) for role in roles])


def why(run: Run = None, json: AsJson = False) -> None:
    """Explain one run's waits."""
    from relax_core.views.run import health, open_run
    from relax_core.views.why import mismatch_warning, why

    view, wall = open_run(run), time.time()
    answer, warning = why(view.status(), health(view, wall), wall), mismatch_warning(view)
    if json:
        body = {"culprit": answer.culprit, **asdict(answer), "warning": warning}
        print_json({"schema": "relax.why/1", "run": view.name, **body})
        return
    for line in (*answer.lines(), *([warning] if warning else [])):
        typer.echo(line)


def report(run: Run = None) -> None:
    """Write one run's report.html and reward.png."""
    from relax_core.observe.run_directory import find_run
    from relax_core.views.report import write_report

    typer.echo(str(write_report(find_run(run))))


def _steps(run: Listed) -> str:
    return f"{run.step}/{run.steps}" if run.steps else str(run.step)


def _reward(run: Listed) -> str:
    if run.reward_first is None or run.reward_last is None:
        return ""
    return f"{run.reward_first:.3f} -> {run.reward_last:.3f}"


def _doing(role: Mapping[str, Any]) -> str:
    waits = ", ".join(f"for {wait['reason']} from {wait['owed_by']}" for wait in role.get("waits", ()))
    if waits and role["state"] != "waiting":  # one of its loops waits, others work
        waits = f"waits {waits}"
    return waits or role.get("doing", "")
