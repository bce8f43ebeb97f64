# SPDX-License-Identifier: Apache-2.0
"""The verbs that start, watch, change and show runs.

All decisions are made in `control`. With `--address`, a verb asks the control API of a run on another machine.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_core.api.run_commands import Command, Continue, Evaluate, Pause, Profile, SaveCheckpoint, Stop
from relax_core.cli.detached import start_detached
from relax_core.cli.graph import dry_run as check_only
from relax_core.cli.terminal import (
    INTERRUPTED,
    Address,
    Arguments,
    AsJson,
    Interrupted,
    Run,
    TokenFile,
    asking,
    print_json,
    print_operation,
    print_table,
    remote,
    say,
    split,
)
from relax_core.control.resume_keys import MAY_CHANGE, NEW_RUN, may_change

if TYPE_CHECKING:
    from relax_core.control.prepare import Prepared
    from relax_core.views.run import RunView


REQUEST_POLL_S = 0.2
LAST_WORDS_S = 60.0
"""Seconds that `attach` and `stop` wait for an ended run to write its report and stop its processes."""
UNCHECKED = "placement.check_memory=false"
RunDir = Annotated[
    Path | None, typer.Option(help="Folder to write the run to; it must be new or empty, except with --resume.")
]
Continues = Annotated[
    bool,
    typer.Option(
        "--resume", help="Continue the run in --run-dir if the folder has one, also if it has no checkpoint yet."
    ),
]
SummaryJson = Annotated[bool, typer.Option("--json", help="Print the summary as one JSON document.")]
Runner = Annotated[str | None, typer.Option(help="Name of the runner: ray, local or inline; short for run.runner.")]
Anyway = Annotated[
    bool,
    typer.Option("--anyway", help="Start even if memory is too small; short for placement.check_memory=false."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything and print the graph, but start nothing.")]
Detach = Annotated[
    bool,
    typer.Option("--detach", help="Return once the run has started; see relax attach and relax stop."),
]
Supervised = Annotated[bool, typer.Option("--supervised", hidden=True, help="Run as the child of a supervisor.")]


def train(
    arguments: Arguments,
    run_dir: RunDir = None,
    runner: Runner = None,
    as_json: SummaryJson = False,
    dry_run: DryRun = False,
    anyway: Anyway = False,
    detach: Detach = False,
    continues: Continues = False,
    supervised: Supervised = False,
) -> None:
    """Start a training run.

    Examples: `relax train quickstart`, or `relax train my.toml cluster.toml algorithm.clip_high=0.28`. At a terminal,
    the command watches a run on Ray as `relax attach` does: Ctrl-C asks whether to detach from the run or to stop it.
    A scheduler that repeats one command needs `--resume`: a run that has begun keeps its configuration, except for
    overrides of the keys that `relax resume` may change, and a finished run is left as it is, with exit code 0.
    """
    from relax_core.api.errors import ConfigError
    from relax_core.control.prepare import prepare

    if continues and run_dir is None:
        raise ConfigError("--resume", "no --run-dir", "name the folder of the run: --run-dir RUN")

    if detach and not dry_run:
        start_detached("train", as_json)
        return
    sources, overrides = split(arguments)
    overrides += [f"run.runner={runner}"] if runner else []
    overrides += [UNCHECKED] if anyway else []
    if dry_run:
        check_only(sources, overrides)
    elif not (supervised or as_json) and _is_watched(sources, overrides):
        attach(str(start_detached("train", as_json)))
    elif continues and run_dir is not None and (run_dir / "config.toml").exists():
        _continue(run_dir, overrides, as_json, supervised)
    else:
        _run(prepare(sources, overrides, run_dir=run_dir), as_json, supervised)


def _continue(run_dir: Path, overrides: Sequence[str], as_json: bool, supervised: bool) -> None:
    """Continue the run in a directory with the overrides that a resume may change; leave a finished run as it is."""
    from relax_core.control.prepare import prepare_resume
    from relax_core.observe.files import read_document
    from relax_core.registry.catalogue import Catalogue

    summary = read_document(run_dir / "summary.json") or {}
    if summary.get("status") == "finished":
        say(f"relax: the run in {run_dir} is finished; for more steps: relax resume {run_dir} steps=N", err=True)
        _say_ending(summary, run_dir, as_json)
        return
    keys = {override: override.partition("=")[0].strip() for override in overrides}
    catalogue = Catalogue.load()
    changes = [override for override, key in keys.items() if may_change(key, catalogue)]
    if kept := [key for override, key in keys.items() if override not in changes]:
        say(f"relax: the run in {run_dir} has begun and keeps its own {', '.join(kept)}", err=True)
    _run(prepare_resume(run_dir, changes, unfinished=True), as_json, supervised)


def resume(
    run: Annotated[str, typer.Argument(help="A run directory, or its name under the runs folder.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Overrides of {', '.join(MAY_CHANGE)}, and of keys that plugins' tables allow; {NEW_RUN}."
        ),
    ] = None,
    as_json: SummaryJson = False,
    anyway: Anyway = False,
    step: Annotated[
        int | None,
        typer.Option(help="Continue from the checkpoint of this step; default: the newest complete checkpoint."),
    ] = None,
    detach: Detach = False,
    supervised: Supervised = False,
) -> None:
    """Continue a run from its newest complete or a chosen checkpoint."""
    from relax_core.control.prepare import prepare_resume
    from relax_core.control.supervisor import predecessor
    from relax_core.observe.run_directory import RunDirectory, find_run

    if detach:
        start_detached("resume", as_json)
        return
    path, changes = find_run(run), [*(overrides or []), *([UNCHECKED] if anyway else [])]
    if not (supervised or as_json) and _is_watched([path / "config.toml"], changes):
        attach(str(start_detached("resume", as_json)))
        return
    unfinished = supervised and predecessor(RunDirectory.open(path)) is not None
    _run(prepare_resume(path, changes, step, unfinished=unfinished), as_json, supervised)


def _is_watched(sources: Sequence[str | Path], overrides: list[str]) -> bool:
    """Return True for a run on Ray that is started at a terminal: the command then only watches the run."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    from relax_core.control.prepare import plan_run

    return plan_run(sources, overrides).composed.config.run.runner == "ray"


def _run(prepared: Prepared, as_json: bool, supervised: bool) -> None:
    from relax_core.api.errors import ConfigError, RelaxError
    from relax_core.control.run import run
    from relax_core.control.supervisor import enter_supervision
    from relax_core.views.display import LiveDisplay

    runner = prepared.config.run.runner
    if supervised:
        if runner == "inline":
            prepared.directory.discard()
            raise ConfigError("--detach", "run.runner = 'inline'", "use 'local': a debugger needs the terminal")
        prepared = replace(prepared, death=enter_supervision(prepared.directory))
    for notice in prepared.notices:
        say(notice, err=True)
    display = None if as_json and not supervised else LiveDisplay(
        prepared.config.run.name or prepared.launch.run_id, prepared.steps, first_step=prepared.first_step,
        mode="plain" if runner == "inline" else "auto",  # a debugger shares the terminal
    )  # fmt: skip
    path = prepared.directory.path
    try:
        summary = run(prepared, display)
    except RelaxError:
        say(_failed(path), err=True)
        raise
    finally:
        if display is not None:
            display.close()
    _say_ending(summary, path, as_json)


def _say_ending(summary: dict[str, Any], path: Path, as_json: bool) -> None:
    """Print the end of a run that did not fail; exit with 130 if it was stopped."""
    if as_json:
        say(json.dumps({**summary, "run_dir": str(path)}))
    if summary["status"] != "finished":
        say(_stopped(summary, path), err=True)
        raise typer.Exit(INTERRUPTED)
    if not as_json:
        if (page := path / "report.html").exists():
            say(f"report: {page}")
        say(f"model:  {path / 'export'}")


def _failed(path: Path) -> str:
    """Return the message of a failed run: where its files are, and how to continue it."""
    from relax_core.control.stages import resumable_step

    step = resumable_step(path)
    again = "" if step is None else f"; continue after step {step} with: relax resume {path}"
    return f"relax: the run failed; its files are in {path}{again}"


def _stopped(summary: dict[str, Any], path: Path) -> str:
    """Return the message of a stopped run: its checkpoint, and how to continue it."""
    from relax_core.control.stages import resumable_step

    step = resumable_step(path)
    if step is None:
        return f"relax: {summary['status']} before its first checkpoint; start the run again"
    busy = f"; {' and '.join(summary['busy'])} did not finish within checkpoint.grace_s" if summary.get("busy") else ""
    again = f" (steps done: {summary['steps']}; later ones are repeated)" if summary.get("steps", step) > step else ""
    return (
        f"relax: {summary['status']} with a checkpoint of step {step}{again}{busy}; continue with: relax resume {path}"
    )


def _answer(what: str, run: str | None, address: str, token_file: Path | None) -> dict[str, Any]:
    """Return a document about a run, from its files here or from the control API at `address`."""
    from relax_core.views.answers import ANSWERS
    from relax_core.views.run import open_run

    return remote(address, token_file, run).get(f"/{what}") if address else ANSWERS[what](open_run(run), time.time())


def _change(
    command: Command, run: str | None, wait_s: float, address: str, token_file: Path | None
) -> tuple[str, dict[str, object]]:
    """Ask a run here or at an address for a change; return its name or address, and the operation once it is done."""
    from relax_core.control_api.run_control import RunControl
    from relax_core.views.run import open_run

    if address:
        return address, remote(address, token_file, run).change(command, wait_s)
    view = open_run(run)
    return view.name, RunControl(view).change(command, wait_s)


def pause(
    run: Run = None,
    wait_s: Annotated[float, typer.Option(help="Most seconds to wait until the run is paused.", min=0.0)] = 3600.0,
    address: Address = "",
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Pause a live run before its next step, until `relax continue`.

    Rollout generates on as far as max_staleness allows. After guards.pause_timeout_s without
    `relax continue` the run fails and can be resumed.
    """
    print_operation(*_change(Pause(), run, wait_s, address, token_file), json)


def checkpoint(
    run: Run = None,
    wait_s: Annotated[float, typer.Option(help="Most seconds to wait for the checkpoint.", min=0.0)] = 3600.0,
    address: Address = "",
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Make a live run write a checkpoint after its current step.

    The command waits until the checkpoint is complete. Sending SIGUSR1 to the run's process also requests a checkpoint.
    Any user with write access to the run directory may do this.
    """
    print_operation(*_change(SaveCheckpoint(), run, wait_s, address, token_file), json)


def evaluate(
    run: Run = None,
    wait_s: Annotated[float, typer.Option(help="Most seconds to wait for the evaluation.", min=0.0)] = 3600.0,
    address: Address = "",
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Make a live run evaluate its newest weights once on every set of [eval].

    A run with a rollout evaluates with its engines, also while it is paused; a run on given rows does so after its
    current step. Scheduled evaluations follow as before. The command waits for the result.
    """
    print_operation(*_change(Evaluate(), run, wait_s, address, token_file), json)


def profile(
    run: Run = None,
    steps: Annotated[int, typer.Option(help="Number of steps to profile.", min=1)] = 1,
    wait_s: Annotated[float, typer.Option(help="Most seconds to wait for the profiles.", min=0.0)] = 3600.0,
    address: Address = "",
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Record torch profiles of a live run: of the actor's next steps, and of one engine between updates of its weights.

    The files are in the run's folder profile/, as those of profile.steps: a trace for Perfetto and a table of
    operations for each step, of each rank of profile.ranks and of the engine. The command waits until the actor's last
    step is profiled.
    """
    print_operation(*_change(Profile(steps), run, wait_s, address, token_file), json)


def continue_(
    run: Run = None,
    wait_s: Annotated[float, typer.Option(help="Most seconds to wait until the run continues.", min=0.0)] = 60.0,
    address: Address = "",
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Continue a run that a guard or `relax pause` has paused.

    This accepts the step that caused a guard's pause; `relax why` shows the cause. Any user with write access to the run
    directory may do this.
    """
    print_operation(*_change(Continue(), run, wait_s, address, token_file), json)


def stop(
    run: Run = None,
    wait_s: Annotated[float, typer.Option(help="Most seconds to wait for the run's end.", min=0.0)] = 3600.0,
    address: Address = "",
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Stop a live run with a checkpoint.

    This acts like Ctrl-C in the run's terminal. The command waits until the run has ended. Any user with write access
    to the run directory may do this.
    """
    from relax_core.views.run import health, open_run

    where, operation = _change(Stop(), run, wait_s, address, token_file)
    if address:
        print_operation(where, operation, json)
        return
    view = open_run(run)
    _wait_for_process(view)
    state = health(view, time.time())
    summary = {"status": state.state, **view.summary()}  # a full disk leaves no summary
    if json:
        print_operation(where, operation, json)
    elif state.state in ("finished", "failed", "diverged"):
        say(f"{where}: {state.state}" + (f": {state.detail}" if state.detail else ""))
    else:
        say(f"{where}: {_stopped(summary, view.path).removeprefix('relax: ')}")


def _wait_for_process(view: RunView) -> None:
    """Wait until the process of an ended run has written its report and stopped its processes, for a minute at most."""
    from relax_core.views.run import process_of

    deadline = time.monotonic() + LAST_WORDS_S
    while process_of(view) and time.monotonic() < deadline:
        time.sleep(REQUEST_POLL_S)


@asking()
def attach(run: Run = None, as_json: SummaryJson = False) -> None:
    """Watch a live run until it ends, and exit with its exit code.

    Ctrl-C asks whether to detach or to stop the run; without a terminal it detaches. The exit code is 130 after
    detaching.
    """
    from relax_core.api.errors import InfrastructureError
    from relax_core.views.display import LiveDisplay
    from relax_core.views.follower import RunFollower
    from relax_core.views.run import open_run

    view = open_run(run)
    state = None
    while state is None:
        follower = RunFollower(view)
        config, done = view.config, int(view.status().get("step", 0))
        display = LiveDisplay(
            config.get("run", {}).get("name") or view.name, view.status().get("steps") or config.get("steps"),
            mode="quiet" if as_json else "auto", clock=follower.clock, first_step=done,
        )  # fmt: skip
        try:
            while not (found := follower.look(display, time.time())).ended and found.state != "lost":
                time.sleep(REQUEST_POLL_S)
            state = found
        except Interrupted as interrupted:
            display.close()
            if not _wants_to_stop(view.name, interrupted):
                say(f"relax: detached; the run continues. Watch it again with: relax attach {view.name}", err=True)
                raise typer.Exit(INTERRUPTED) from None
            view.send(Stop())
        finally:
            display.close()
    if not state.ended:
        raise InfrastructureError(f"{view.name}: {state.detail}")
    _wait_for_process(view)
    summary = {"status": state.state, **view.summary()}  # a full disk leaves no summary
    if state.state not in ("failed", "diverged"):
        _say_ending(summary, view.path, as_json)
        return
    if as_json:
        say(json.dumps({**summary, "run_dir": str(view.path)}))
    say(f"{_failed(view.path)}\nrelax: {state.detail or summary.get('error', '')}", err=True)
    raise typer.Exit(int(summary.get("exit_code", 1)))


def _wants_to_stop(name: str, interrupted: Interrupted) -> bool:
    """Ask after Ctrl-C at a terminal whether to stop the run; return False for all remaining signals."""
    if interrupted.number != signal.SIGINT or not sys.stdin.isatty():
        return False
    say(f"\n{name} is still running. [d]etach from it, or [s]top it with a checkpoint? [d] ", err=True, nl=False)
    try:
        return sys.stdin.readline().strip().lower() in ("s", "stop")
    except Interrupted:
        return False


def runs(json: AsJson = False) -> None:
    """List runs: state, steps, reward."""
    from relax_core.observe.run_directory import runs_root
    from relax_core.views.run import list_runs

    root = runs_root()
    found = [asdict(run) for run in list_runs(time.time(), root)]
    if json:
        print_json({"schema": "relax.runs/1", "root": str(root), "runs": found})
    elif found:
        rows = [(run["name"], run["state"], _steps(run), _reward(run) or "-",
                 f"{run['eval_last']:.3f}" if run["eval_last"] is not None else "-") for run in found]  # fmt: skip
        print_table(("run", "state", "step", "reward", "held-out"), rows)
    else:
        say(f"no runs under {root}", err=True)


def status(run: Run = None, address: Address = "", token_file: TokenFile = None, json: AsJson = False) -> None:
    """Show a run's progress and its live roles."""
    body = _answer("status", run, address, token_file)
    if json:
        print_json(body)
        return
    detail = f"; {body['detail']}" if body["detail"] else ""
    say(f"{body['name']}: {body['state']}, step {_steps(body)}{detail}")
    if reward := _reward(body):
        say(f"reward {reward} (means of 10 steps)")
    if body["doing"]:
        print_table(("role", "state", "doing"), [(one["role"], one["state"], one["doing"]) for one in body["doing"]])
    for remark in body["remarks"]:
        say(remark)


def why(run: Run = None, address: Address = "", token_file: TokenFile = None, json: AsJson = False) -> None:
    """Show what a run waits for, and which role must act."""
    body = _answer("why", run, address, token_file)
    if json:
        print_json(body)
        return
    for line in body["lines"]:
        say(line)


def engines(run: Run = None, address: Address = "", token_file: TokenFile = None, json: AsJson = False) -> None:
    """List the engines of a live run: pool, version, state and load."""
    body = _answer("engines", run, address, token_file)
    if json:
        print_json(body)
        return
    if not body["engines"]:
        say(f"{body['run']}: {body['state']}, no engines", err=True)
        return
    rows = [
        (one["pool"], one["engine"], one.get("node", ""), _state_of(one),
         str(one["version"]), str(one["running"]), str(one["restarts"]))
        for one in body["engines"]
    ]  # fmt: skip
    print_table(("pool", "engine", "node", "state", "version", "requests", "restarts"), rows)


def _state_of(engine: Mapping[str, Any]) -> str:
    """Return an engine's step while it joins or leaves, else whether it serves."""
    if engine.get("state") not in ("", None, "serving", "out", "waiting"):
        return str(engine["state"]).replace("_", " ")
    return "serving" if engine["serving"] else "loading" if engine["loading"] else "not serving"


def _steps(run: Mapping[str, Any]) -> str:
    return f"{run['step']}/{run['steps']}" if run["steps"] else str(run["step"])


def _reward(run: Mapping[str, Any]) -> str:
    if run["reward_first"] is None or run["reward_last"] is None:
        return ""
    return f"{run['reward_first']:.3f} -> {run['reward_last']:.3f}"
