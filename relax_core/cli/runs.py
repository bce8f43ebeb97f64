# SPDX-License-Identifier: Apache-2.0
"""`relax train | resume | checkpoint | continue`, and `relax runs | status | why | report`: a run started, saved or
continued, and runs that are written down, those that still go included. All decisions are in `control`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_core.cli.plan import print_graph
from relax_core.cli.terminal import INTERRUPTED, AsJson, print_json, print_table, say, split

if TYPE_CHECKING:
    from relax_core.control.prepare import Prepared
    from relax_core.views.run import Listed


CHECKPOINT_POLL_S = 0.2
UNCHECKED = "placement.check_memory=false"
Arguments = Annotated[
    list[str], typer.Argument(help="TOML files or a recipe, then overrides such as optimizer.lr=1e-5.")
]
RunDir = Annotated[Path | None, typer.Option(help="Where to write the run; it must be new or empty.")]
SummaryJson = Annotated[bool, typer.Option("--json", help="Print the summary as one JSON document.")]
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
    as_json: SummaryJson = False,
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
    overrides: Annotated[
        list[str] | None, typer.Argument(help="steps, eval, sinks, placement, recovery, data.media may change.")
    ] = None,
    as_json: SummaryJson = False,
    anyway: Anyway = False,
    step: Annotated[
        int | None,
        typer.Option(help="Go on from the checkpoint of this step; else from the newest that is whole."),
    ] = None,
) -> None:
    """Continue a run from its newest checkpoint whose files are whole, or from that of --step."""
    from relax_core.control.prepare import prepare_resume
    from relax_core.observe.run_directory import find_run

    changes = [*(overrides or []), *([UNCHECKED] if anyway else [])]
    _run(prepare_resume(find_run(run), changes, step), as_json)


def _run(prepared: Prepared, as_json: bool) -> None:
    from relax_core.api.errors import RelaxError
    from relax_core.control.run import run
    from relax_core.control.stages import resumable_step
    from relax_core.views.display import LiveDisplay

    for notice in prepared.notices:
        say(notice, err=True)
    display = None if as_json else LiveDisplay(
        prepared.config.run.name or prepared.launch.run_id, prepared.steps, first_step=prepared.first_step,
        mode="plain" if prepared.config.run.runner == "inline" else "auto",  # a debugger shares the terminal
    )  # fmt: skip
    path = prepared.directory.path
    try:
        summary = run(prepared, display)
    except RelaxError:
        _write_report(path)
        step = resumable_step(path)
        again = "" if step is None else f"; continue after step {step} with: relax resume {path}"
        say(f"relax: the run failed; what it wrote is in {path}{again}", err=True)
        raise
    _write_report(path)
    if as_json:
        say(json.dumps({**summary, "run_dir": str(path)}))
    if summary["status"] != "finished":
        say(_stopped(summary, path), err=True)
        raise typer.Exit(INTERRUPTED)
    if not as_json:
        say(f"report: {path / 'report.html'}\nmodel:  {path / 'export'}")


def _write_report(path: Path) -> None:
    """Write the report; a report that can't be made, on a full disk say, is no failure of the run."""
    from relax_core.api.errors import RelaxError
    from relax_core.views.report import write_report

    try:
        write_report(path)
    except (OSError, RelaxError) as error:
        say(f"relax: no report: {error}; make it later with `relax report {path}`", err=True)


def _stopped(summary: dict[str, Any], path: Path) -> str:
    """Say where a stopped run stands, and how to go on."""
    from relax_core.control.stages import resumable_step

    step = resumable_step(path)
    if step is None:
        return f"relax: {summary['status']} before there was a checkpoint; start it anew"
    busy = f"; {' and '.join(summary['busy'])} did not finish in checkpoint.grace_s" if summary.get("busy") else ""
    again = f" (done: {summary['steps']}; the later ones are repeated)" if summary.get("steps", step) > step else ""
    return (
        f"relax: {summary['status']} with a checkpoint of step {step}{again}{busy}; continue with: relax resume {path}"
    )


Run = Annotated[
    str | None, typer.Argument(metavar="RUN", help="A run directory, or a name under ./runs; else the latest.")
]


def checkpoint(
    run: Run = None,
    wait_s: Annotated[float, typer.Option(help="How long to wait for it.", min=0.0)] = 3600.0,
    json: AsJson = False,
) -> None:
    """Ask a live run for a checkpoint once its step under way is done, and wait until it is whole.

    SIGUSR1 to the process of the run asks for the same. Who may write the run directory may ask.
    """
    from relax_core.api.errors import ConfigError, InfrastructureError
    from relax_core.control.stages import resumable_step
    from relax_core.observe.run_directory import RunDirectory
    from relax_core.views.run import health, open_run

    view = open_run(run)
    wanted, deadline = max(int(view.status().get("step", 0)), 1), time.monotonic() + wait_s
    found, asked = resumable_step(view.path) or 0, False
    while found < wanted:
        state = health(view, time.time())
        if state.ended or state.state == "lost":
            fix = f"it has {f'a checkpoint of step {found}' if found else 'no checkpoint'}, and none can be added"
            raise ConfigError("run", f"{view.name}, which is {state.state}", fix)
        if not asked:
            RunDirectory.open(view.path).request("checkpoint")
            asked = True
        if time.monotonic() > deadline:
            later = f"it is made once the step under way is done; `relax why {view.name}` says what that waits for"
            raise InfrastructureError(f"{view.name}: no checkpoint of step {wanted} within {wait_s:.0f} s; {later}")
        time.sleep(CHECKPOINT_POLL_S)
        found = resumable_step(view.path) or 0
    if json:
        print_json({"schema": "relax.checkpoint/1", "run": view.name, "step": found, "requested": asked})
    else:
        say(f"{view.name}: checkpoint of step {found}{'' if asked else ', which is the newest step'}")


def continue_(
    run: Run = None,
    wait_s: Annotated[float, typer.Option(help="How long to wait until it goes on.", min=0.0)] = 60.0,
    json: AsJson = False,
) -> None:
    """Go on with a run that a guard has paused, and accept the step that it was paused for.

    `relax why` says what it was paused for. Who may write the run directory may ask.
    """
    from relax_core.api.errors import ConfigError, InfrastructureError
    from relax_core.observe.run_directory import RunDirectory
    from relax_core.views.run import health, open_run
    from relax_core.views.why import pause_reason

    view, deadline = open_run(run), time.monotonic() + wait_s
    reason = paused = pause_reason(view.status())
    state = health(view, time.time())
    if not reason or state.ended or state.state == "lost":
        raise ConfigError("run", f"{view.name}, which is {state.state}", "only a run that is paused can go on")
    RunDirectory.open(view.path).request("continue")
    while paused == reason:
        if time.monotonic() > deadline:
            raise InfrastructureError(
                f"{view.name}: it does not go on within {wait_s:.0f} s; see `relax why {view.name}`"
            )
        time.sleep(CHECKPOINT_POLL_S)
        paused = pause_reason(view.status())
    if json:
        print_json({"schema": "relax.continue/1", "run": view.name, "paused_for": reason})
    else:
        say(f"{view.name}: goes on; it was paused for {reason}")


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
        say(f"no runs under {root}", err=True)


def status(run: Run = None, json: AsJson = False) -> None:
    """Show how far one run is, its reward, and what each role does."""
    from relax_core.views.run import health, listed, open_run, readable_documents

    view, wall = open_run(run), time.time()
    with readable_documents(view):
        line, state, written = listed(view, wall), health(view, wall), view.status()
        roles = written.get("roles", [])
        rows = [(str(role["role"]), str(role["state"]), _doing(role)) for role in roles]
        reward = _reward(line)
    if json:
        body = asdict(line) | {"said_s_ago": state.said_s_ago, "detail": state.detail, "roles": roles}
        print_json({"schema": "relax.run-status/1", **body})
        return
    say(f"{line.name}: {state.state}, step {_steps(line)}{f'; {state.detail}' if state.detail else ''}")
    if reward:
        say(f"reward {reward} (means of 10 steps)")
    if rows and not state.ended:
        print_table(("role", "state", "doing"), rows)


def why(run: Run = None, json: AsJson = False) -> None:
    """Explain one run's waits."""
    from relax_core.views.run import health, open_run, readable_documents
    from relax_core.views.why import mismatch_warning, why

    view, wall = open_run(run), time.time()
    with readable_documents(view):
        answer, warning = why(view.status(), health(view, wall), wall), mismatch_warning(view)
        body = {"culprit": answer.culprit, **asdict(answer), "warning": warning}
        lines = (*answer.lines(), *([warning] if warning else []))
    if json:
        print_json({"schema": "relax.why/1", "run": view.name, **body})
        return
    for line in lines:
        say(line)


def report(run: Run = None) -> None:
    """Write one run's report.html and reward.png."""
    from relax_core.observe.run_directory import find_run
    from relax_core.views.report import write_report

    say(str(write_report(find_run(run))))


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
