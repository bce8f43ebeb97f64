# SPDX-License-Identifier: Apache-2.0
"""A signal, or a guard, ends a run soon, keeps what was done, and says how to go on; nothing of it stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from relax_core.observe.records import read_frames
from tests.graph.conftest import Relax, command, environment, survivors

pytestmark = pytest.mark.process
LONG = (
    "steps=5000", "run.runner=local",
    "rollout.groups_per_step=4", "rollout.group_size=4", "eval.every=0", "checkpoint.every=0",
)  # fmt: skip
DEADLINE_S = 400.0


@dataclass
class Under:
    """A `relax` process under way."""

    process: subprocess.Popen[str]
    run: Path

    def until(self, true: Callable[[], bool], poll_s: float = 0.01) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not true():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(poll_s)

    def steps(self) -> int:
        metrics = self.run / "metrics.jsonl"
        return metrics.read_text().count("train/loss") if metrics.exists() else 0

    def ended(self) -> tuple[int, dict[str, Any], str]:
        """(exit code, the document on stdout, stderr)."""
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, json.loads(out), err


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Under]]:
    """Start `relax ... --run-dir run --json` in a session of its own, as a terminal would."""
    begun: list[subprocess.Popen[str]] = []
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # below `nohup` a run would ignore it, as it should

    def call(*words: str | Path) -> Under:
        process = subprocess.Popen(
            command(*words, "--run-dir", "run", "--json"), cwd=tmp_path, env=environment(), text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        begun.append(process)
        return Under(process, tmp_path / "run")

    yield call
    signal.signal(signal.SIGHUP, former)
    for process in begun:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert survivors(tmp_path) == []


def test_checkpoints_on_demand_and_a_preemption_notice_to_every_process_of_a_run(
    start: Callable[..., Under], relax_here: Relax, tiny: Path
) -> None:
    """A scheduler sends SIGTERM, and maybe SIGHUP, to all processes of a job: none of them may end before the run has saved.

    The run's own process gets what it gets when its terminal is closed.
    """
    under = start("train", tiny / "recipe.toml", *LONG, "checkpoint.keep=9")
    found = (under.run / "checkpoints").glob
    under.until(lambda: under.steps() >= 1)
    under.process.send_signal(signal.SIGUSR1)
    under.until(lambda: any(found("step-*/state.json")))
    asked = relax_here("checkpoint", under.run, "--json")
    assert asked.code == 0, asked.err
    assert (under.run / f"checkpoints/step-{asked.json['step']:06d}/files.json").exists()
    under.until(lambda: under.steps() >= 3)
    for process in psutil.Process(under.process.pid).children(recursive=True):
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGHUP)
    under.process.send_signal(signal.SIGHUP)
    code, document, err = under.ended()
    assert code == 130, err
    assert document["status"] == "preempted" and document["steps"] >= 3 and document["balanced"]
    assert (under.run / f"checkpoints/step-{document['steps']:06d}").is_dir()
    ended = relax_here("checkpoint", under.run, "--wait-s", "0")
    assert f"checkpoint of step {document['steps']}, which is the newest step" in ended.out
    assert f"preempted with a checkpoint of step {document['steps']}; continue with: relax resume {under.run}" in err
    assert "Traceback" not in err
    assert "preempted" in relax_here("status", under.run).out


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
    start: Callable[..., Under], relax_here: Relax, tiny: Path, inbox: list[str]
) -> None:
    """One run: the first gradient pauses it, the rewards of what a person let pass roll it back, and then they end it."""
    under = start(
        "train", tiny / "recipe.toml", *LONG, "run.runner=inline", "checkpoint.every=1", "checkpoint.keep=1",
        "optimizer.lr=1000.0",
        "optimizer.grad_clip=0", "guards.rollbacks=1", 'guards.grad_norm={action="pause",limit=0.0,steps=1}',
        'guards.reward={action="roll-back",limit=0.05,steps=2}', 'notify.urls=["env:INBOX"]', "run.name=mine",
    )  # fmt: skip
    under.until((under.run / "guards").is_dir)
    under.until(lambda: "paused, step 0 of 5000" in relax_here("why", under.run).out, poll_s=0.5)
    told = relax_here("why", under.run).out
    assert "guard grad_norm: train/grad_norm was" in told and f"`relax continue {under.run.name}`" in told
    assert "owed by a person" in told and under.steps() == 0
    went_on = relax_here("continue", under.run, "--json")
    assert went_on.code == 0 and "grad_norm" in went_on.json["paused_for"], went_on.err
    code, document, err = under.ended()
    assert code == document["exit_code"] == 5, err
    assert "guard reward" in document["error"] and "guards.rollbacks allows 1" in document["error"]
    summary = json.loads((under.run / "summary.json").read_text())
    assert (summary["status"], summary["restarts"]) == ("diverged", {"actor": 1}) and summary["balanced"]
    assert [path.name for path in (under.run / "checkpoints").glob("step-*")] == ["step-000001"]
    saved = {path.name: path for path in (under.run / "guards").iterdir()}
    assert sorted(saved) == ["step-000001-grad_norm", "step-000003-reward", "step-000003-reward-2"]
    evidence = json.loads((saved["step-000003-reward"] / "evidence.json").read_text())
    assert (evidence["action"], evidence["since"]) == ("roll-back", 2) and evidence["value"] < evidence["bound"] == 0.05
    assert [one["step"] for one in evidence["window"]] == [1, 2, 3] and "train/loss" in evidence["window"][-1]
    samples = [sample["group_id"] for sample in read_frames(saved["step-000003-reward"] / "samples.jsonl.zst")]
    assert sorted(set(samples)) == evidence["groups"] and len(samples) == 16
    assert (saved["step-000003-reward"] / "config.toml").read_text() == (under.run / "config.toml").read_text()
    assert f"continue after step 1 with: relax resume {under.run}" in err and "Traceback" not in err
    assert inbox == [f"mine: {title}" for title in (
        "started", "guard grad_norm fired at step 1 (pause)", "guard reward fired at step 3 (roll-back)",
        "rolled back to step 1", "actor works again", "guard reward fired at step 3 (stop)", "diverged",
    )]  # fmt: skip
    assert summary["guards"] == {"grad_norm": 1, "reward": 2} and summary["notifications"]["suppressed"] == 0
    again = relax_here("continue", under.run)
    assert again.code == 2 and "only a paused run can be continued" in again.err


@pytest.mark.faults
def test_a_second_ctrl_c_ends_at_once(start: Callable[..., Under], tiny: Path) -> None:
    under = start("train", tiny / "recipe.toml", *LONG)
    under.until(lambda: under.steps() >= 1)
    os.kill(under.process.pid, signal.SIGINT)
    time.sleep(0.05)  # two signals that arrive together are one
    os.kill(under.process.pid, signal.SIGINT)
    code, document, err = under.ended()
    assert code == 130
    assert document["status"] in ("interrupted", "stopped")
    assert "Traceback" not in err


@pytest.mark.faults
def test_a_stop_while_roles_start_leaves_a_stopped_run_without_checkpoint(
    start: Callable[..., Under], tiny: Path
) -> None:
    under = start("train", tiny / "recipe.toml", *LONG)
    under.until((under.run / "status.json").exists)
    os.killpg(under.process.pid, signal.SIGINT)
    code, document, err = under.ended()
    assert (code, document["status"], document["steps"]) == (130, "stopped", 0), err
    assert "before its first checkpoint" in err and "Traceback" not in err


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_during_a_recipes_build_leaves_no_run(start: Callable[..., Under], number: signal.Signals) -> None:
    under = start("train", "quickstart", "--runner", "local")
    under.until((under.run / "recipe/recipe.toml").exists)
    os.killpg(under.process.pid, number)
    code, document, err = under.ended()
    assert code == 130 and document["exit_code"] == 130
    assert err.strip().splitlines()[-1] == "relax: interrupted" and "Traceback" not in err
    assert not under.run.exists()


def test_a_process_under_a_tether_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "forever.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    child = subprocess.Popen(
        [sys.executable, "-m", "relax_core.runners.local.parent_death", "forever"], cwd=tmp_path, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, start_new_session=True, env=environment(PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path])),
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    child.stdin.close()
    assert child.wait(DEADLINE_S) == -signal.SIGKILL
    child.stdout.close()
