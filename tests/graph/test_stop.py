# SPDX-License-Identifier: Apache-2.0
"""A signal, or a guard, ends a run soon and keeps what was done; `relax why` names what a run waits for meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from relax_plugin_control.server import ControlServer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from relax_core.control.run import obey_signals, receiver
from relax_core.observe.records import read_frames
from relax_core.views.run import open_run
from tests.graph.conftest import SMALL, Relax, environment
from tests.graph.ray_run import Running, Start, until
from tests.processes import stop

pytestmark = pytest.mark.process
LONG = (*SMALL, "steps=5000", "run.runner=local", "checkpoint.every=0")
STUCK = """
import pathlib, time

from relax_core.api import Reward

GATE = pathlib.Path(__file__).with_name("closed")


class StuckReward(Reward):
    def score(self, task, trajectory):
        time.sleep(0.1)  # else the run computes hundreds of steps that no test reads
        while GATE.exists():
            time.sleep(0.02)
        return float(len(trajectory.response) % 2)
"""


@pytest.fixture(autouse=True)
def hangups_are_not_ignored() -> Iterator[None]:
    """Below `nohup` a run ignores SIGHUP, as it should."""
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, former)


def train(start: Start, recipe: Path | str, *overrides: str) -> Running:
    run = start.directory / "run"
    return start(run, "train", recipe, *overrides, "--run-dir", run, "--json")


def ended(run: Running) -> tuple[int, dict[str, Any], str]:
    """(exit code, the document on stdout, stderr)."""
    return run.end(), json.loads(run.out), run.err


def test_a_run_saves_on_request_and_at_a_preemption_notice_and_names_hanging_workers(
    start: Start, relax_here: Relax, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    run = train(start, tiny / "recipe.toml", *LONG, "checkpoint.keep=9", f"plugins=['{tmp_path / 'stuck.py'}']",
                'rewards=[{name="stuck", timeout_s=3000}]', "placement.rollout.silence_s=3000",
                "eval.every=4999", "eval.at_start=false", "eval.size=4")  # fmt: skip
    run.until_steps(1)
    _saves_when_asked(run, relax_here)
    _is_operated_by_http(run, relax_here, monkeypatch)
    _is_explained(run, relax_here, tmp_path / "closed")
    _is_preempted(run, relax_here)


def _saves_when_asked(run: Running, relax_here: Relax) -> None:
    run.process.send_signal(signal.SIGUSR1)
    until(lambda: any((run.path / "checkpoints").glob("step-*/state.json")), "the checkpoint of SIGUSR1")
    asked = relax_here("checkpoint", run.path, "--json")
    assert asked.code == 0, asked.err
    saved = int(asked.json["detail"].removeprefix("checkpoint of step "))
    assert (run.path / f"checkpoints/step-{saved:06d}/files.json").exists()


def _is_operated_by_http(run: Running, relax_here: Relax, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watched, paused, continued and saved through the control API, by the verbs that a user would call."""
    monkeypatch.setenv("RELAX_TOKEN", "0123456789abcdef")
    server = ControlServer(open_run(run.path), "unix", "0123456789abcdef")
    serving = threading.Thread(target=server.run)
    serving.start()
    at = ("--address", server.address)
    try:
        paused = relax_here("pause", *at, "--json")
        assert paused.code == 0 and "a user, who paused the run" in paused.json["detail"], paused.err
        assert "blocked by a person" in relax_here("why", *at).out
        assert relax_here("status", *at, "--json").json["state"] == "paused"
        assert [one["pool"] for one in relax_here("engines", *at, "--json").json["engines"]] == ["rollout"]
        evaluated = relax_here("evaluate", *at, "--json")  # the rollout evaluates, also while the actor is paused
        assert evaluated.code == 0 and evaluated.json["state"] == "done", evaluated.err
        assert relax_here("continue", *at).code == 0
        saved = relax_here("checkpoint", *at, "--json")
        assert saved.code == 0 and saved.json["state"] == "done", saved.err
        monkeypatch.setenv("RELAX_TOKEN", "another-token-of-16")
        refused = relax_here("stop", *at)
        assert refused.code == 2 and "Authorization: Bearer TOKEN" in refused.err
    finally:
        server.stop()
        serving.join(30)
    run.until_more_steps()


def _is_explained(run: Running, relax_here: Relax, gate: Path) -> None:
    """The engine hangs, and then the reward."""

    def why() -> dict[str, Any]:
        return relax_here("why", run.path, "--json").json

    engine = run.fact("rollout", "engines")["engine-0"]["pid"]
    stop(engine)
    try:
        found = until(lambda: said if (said := why())["culprit"] == "engine-0" and said["waits"] else None, str(why()))
    finally:
        os.kill(engine, signal.SIGCONT)
    assert [link["who"] for link in found["chain"]] == ["actor", "rollout", "engine-0"]
    assert any(line.startswith("engine-0 (version actor@0.") for line in found["details"])
    gate.touch()
    until(lambda: why()["culprit"] == "reward stuck", "the reward is named")
    gate.unlink()
    run.until_more_steps()


def _is_preempted(run: Running, relax_here: Relax) -> None:
    """A scheduler sends SIGTERM, and maybe SIGHUP, to all processes of a job: the run must be able to save.

    A terminal sends Ctrl-C to all of them, too. The run's own process gets what it gets when its terminal is closed.
    """
    for process in psutil.Process(run.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                process.send_signal(number)
    run.process.send_signal(signal.SIGHUP)
    code, document, err = ended(run)
    assert code == 130, err
    assert document["status"] == "preempted" and document["steps"] >= 3 and document["balanced"]
    assert (run.path / f"checkpoints/step-{document['steps']:06d}").is_dir()
    late = relax_here("checkpoint", run.path, "--wait-s", "0")
    assert f"checkpoint is done; checkpoint of step {document['steps']}" in late.out
    assert f"preempted with a checkpoint of step {document['steps']}; continue with: relax resume {run.path}" in err
    assert "Traceback" not in err
    assert "preempted" in relax_here("status", run.path).out


class Signalled:
    """A controller that notes what signals ask of it."""

    def __init__(self) -> None:
        self.stopping, self.told = False, list[Any]()

    def checkpoint(self) -> None:
        self.told.append("checkpoint")

    def stop(self, name: str, preempted: bool) -> None:
        self.stopping = True
        self.told.append((name, preempted))


async def test_the_first_ctrl_c_stops_and_the_second_ends_at_once_while_preemptions_may_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    controller, obeying, printed = Signalled(), asyncio.Event(), list[int]()
    monkeypatch.setattr("relax_core.control.run.say_stopping", printed.append)

    async def run() -> None:
        with obey_signals(receiver(controller)):  # type: ignore[arg-type]
            obeying.set()
            await asyncio.Event().wait()

    running = asyncio.create_task(run())
    await obeying.wait()
    asked = {signal.SIGUSR1: "checkpoint", signal.SIGINT: ("SIGINT", False), signal.SIGTERM: ("SIGTERM", True),
             signal.SIGHUP: ("SIGHUP", True)}  # fmt: skip
    for number, told in asked.items():
        signal.raise_signal(number)
        await asyncio.sleep(0)
        assert controller.told[-1:] == [told]
    assert printed == [signal.SIGINT], "one line says that the run stops"
    signal.raise_signal(signal.SIGINT)
    await asyncio.wait({running})
    assert running.cancelled() and controller.told == list(asked.values())


async def test_ctrl_c_is_answered_while_the_event_loop_is_blocked_and_the_second_kills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    controller, printed, killed = Signalled(), list[int](), list[tuple[int, int]]()
    monkeypatch.setattr("relax_core.control.run.say_stopping", printed.append)
    monkeypatch.setattr("relax_core.control.run.os.kill", lambda *call: killed.append(call))
    with obey_signals(receiver(controller)):  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGINT)  # no await follows, as in an import
        assert printed == [signal.SIGINT] and not controller.stopping and not killed
        signal.raise_signal(signal.SIGINT)
        assert killed == [(os.getpid(), signal.SIGINT)] and signal.getsignal(signal.SIGINT) is signal.SIG_DFL


@pytest.fixture
def inbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Titles of messages that came to the address in the variable INBOX."""
    titles: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            titles.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["title"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    monkeypatch.setenv("INBOX", f"json://127.0.0.1:{server.server_port}/")
    yield titles
    server.shutdown()
    thread.join(10)
    server.server_close()


def test_a_rate_that_is_far_too_high_is_held_undone_and_stopped_by_guards(
    start: Start, relax_here: Relax, tiny: Path, inbox: list[str]
) -> None:
    """One run: the first gradient pauses it, the rewards of what a person let pass roll it back, and then they end it.

    Messages about waits are left out: there are some on a machine that is slow enough.
    """
    run = train(
        start, tiny / "recipe.toml", *LONG, "run.runner=inline", "checkpoint.every=1", "checkpoint.keep=1",
        "optimizer.lr=1000.0", "optimizer.grad_clip=0", "guards.rollbacks=1",
        'guards.grad_norm={action="pause",limit=0.0,steps=1}', 'guards.reward={action="roll-back",limit=0.05,steps=2}',
        'notify.urls=["env:INBOX"]', 'notify.events=["start", "divergence", "recovery", "end"]', "run.name=mine",
        'sinks=["tensorboard"]',
    )  # fmt: skip
    until((run.path / "guards").is_dir, lambda: f"a guard fires\n{run.err}")
    until(lambda: "paused, step 0 of 5000" in relax_here("why", run.path).out, "the pause is shown")
    told = relax_here("why", run.path).out
    assert "guard grad_norm: train/grad_norm was" in told and f"`relax continue {run.path.name}`" in told
    assert "blocked by a person" in told and run.steps() == []
    went_on = relax_here("continue", run.path, "--json")
    assert went_on.code == 0 and went_on.json["state"] == "done", went_on.err
    code, document, err = ended(run)
    assert code == document["exit_code"] == 5, err
    assert "guard reward" in document["error"] and "guards.rollbacks allows 1" in document["error"]
    summary = run.summary()
    assert (summary["status"], summary["restarts"]) == ("diverged", {"actor": 1}) and summary["balanced"]
    assert [path.name for path in (run.path / "checkpoints").glob("step-*")] == ["step-000001"]
    saved = {path.name: path for path in (run.path / "guards").iterdir()}
    assert sorted(saved) == ["step-000001-grad_norm", "step-000003-reward", "step-000003-reward-2"]
    evidence = json.loads((saved["step-000003-reward"] / "evidence.json").read_text())
    assert (evidence["action"], evidence["since"]) == ("roll-back", 2) and evidence["value"] < evidence["bound"] == 0.05
    assert [one["step"] for one in evidence["window"]] == [1, 2, 3] and "train/loss" in evidence["window"][-1]
    samples = [sample["group_id"] for sample in read_frames(saved["step-000003-reward"] / "samples.jsonl.zst")]
    assert sorted(set(samples)) == evidence["groups"] and len(samples) == 16
    assert (saved["step-000003-reward"] / "config.toml").read_text() == (run.path / "config.toml").read_text()
    assert f"continue after step 1 with: relax resume {run.path}" in err and "Traceback" not in err
    assert inbox == [f"mine: {title}" for title in (
        "started", "guard grad_norm fired at step 1 (pause)", "guard reward fired at step 3 (roll-back)",
        "rolled back to step 1", "actor works again", "guard reward fired at step 3 (stop)", "diverged",
    )]  # fmt: skip
    assert summary["guards"] == {"grad_norm": 1, "reward": 2}
    shown = EventAccumulator(str(run.path / "tensorboard")).Reload()
    assert [event.step for event in shown.Scalars("reward/mean")] == [1, 2], "the undone step 2 is hidden"
    again = relax_here("continue", run.path)
    assert again.code == 2 and "only a paused run can be continued" in again.err


@pytest.mark.faults
def test_a_second_ctrl_c_ends_at_once(start: Start, tiny: Path) -> None:
    run = train(start, tiny / "recipe.toml", *LONG)
    run.until_steps(1)
    os.kill(run.process.pid, signal.SIGINT)
    time.sleep(0.05)  # two signals that arrive together are one
    os.kill(run.process.pid, signal.SIGINT)
    code, document, err = ended(run)
    assert code == 130 and document["status"] in ("interrupted", "stopped") and "Traceback" not in err


@pytest.mark.faults
def test_a_stop_while_roles_start_leaves_a_stopped_run_without_checkpoint(start: Start, tiny: Path) -> None:
    run = train(start, tiny / "recipe.toml", *LONG)
    until((run.path / "status.json").exists, lambda: run.err)
    run.interrupt()
    code, document, err = ended(run)
    assert (code, document["status"], document["steps"]) == (130, "stopped", 0), err
    assert "before its first checkpoint" in err and "Traceback" not in err


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_during_a_recipes_build_leaves_no_run(start: Start, number: signal.Signals) -> None:
    run = train(start, "quickstart", "run.runner=local")
    until((run.path / "recipe/recipe.toml").exists, lambda: run.err)
    os.killpg(run.process.pid, number)
    code, document, err = ended(run)
    assert code == 130 and document["exit_code"] == 130
    assert err.strip().splitlines()[-1] == "relax: interrupted" and "Traceback" not in err
    assert not run.path.exists()


def test_a_process_under_a_tether_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "forever.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    child = subprocess.Popen(
        [sys.executable, "-m", "relax_core.runners.local.parent_death", "forever"], cwd=tmp_path, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, start_new_session=True, env=environment(PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path])),
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    child.stdin.close()
    assert child.wait(60) == -signal.SIGKILL
    child.stdout.close()
