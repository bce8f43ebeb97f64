# SPDX-License-Identifier: Apache-2.0
"""A detached run outlives the terminal that started it and the process that runs it; it can be watched, left and stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.graph.conftest import Relax, command, environment, survivors
from tests.graph.terminal import Terminal

pytestmark = pytest.mark.timeout(1800)  # several starts of a run, on a machine that others use too
SMALL = (
    "run.runner=local", "rollout.groups_per_step=4", "rollout.group_size=4", "eval.every=0", "checkpoint.every=4",
    "max_staleness=1",
)  # fmt: skip
DEADLINE_S = 400.0
FULL_FILTER = """
from relax_core.api import Filter

class FullFilter(Filter):
    def __init__(self, options=None):
        raise RuntimeError("no room")

    def reject(self, task, attempts, trajectories, rewards): ...
"""
"""A filter with which the rollout never becomes ready, so that `--detach` cannot return before the run has failed."""


def until(found: Callable[[], Any], what: str = "") -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (value := found()):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
    return value


def document(run: Path, name: str) -> dict[str, Any]:
    path = run / f"{name}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


@pytest.fixture
def ended(relax: Relax, tmp_path: Path) -> Iterator[None]:
    """Ends what a test that fails leaves behind, which is in no process group of ours."""
    yield
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(tmp_path):
                process.kill()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    until(lambda: survivors(tmp_path) == [])


@pytest.mark.usefixtures("ended")
def test_a_run_outlives_its_terminal_and_its_driver_and_is_left_and_stopped_from_others(
    relax: Relax, tiny: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = command("train", tiny / "recipe.toml", *SMALL, "steps=5000", "--run-dir", run, "--detach")
    terminal = subprocess.Popen(
        ["sh", "-c", '"$@"; sleep 600', "sh", *words], cwd=tmp_path, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert terminal.stdout is not None
    lines = [terminal.stdout.readline() for _ in range(3)]
    assert lines == [f"run:   {run}\n", f"watch: relax attach {run}\n", f"stop:  relax stop {run}\n"], lines
    assert document(run, "status")["state"] == "running"
    os.killpg(terminal.pid, signal.SIGKILL)
    terminal.communicate(timeout=DEADLINE_S)  # returns: the run holds no pipe of the terminal
    until(lambda: f"{run}, ready after" in (run / "logs/console.log").read_text())

    until((run / "checkpoints/step-000004/state.json").exists)
    watch = Terminal(tmp_path, "attach", run)
    watch.shows("reward")
    watch.types("\x03")
    watch.shows("[d]etach")
    watch.types("\n")
    assert watch.ends() == 130 and "detached; the run continues" in watch.shown, watch.shown
    left = subprocess.Popen(
        command("attach", run), cwd=tmp_path, env=environment(), text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert left.stderr is not None and left.stderr.readline().startswith("step ")
    left.send_signal(signal.SIGINT)
    assert "detached; the run continues" in left.communicate(timeout=DEADLINE_S)[1] and left.returncode == 130

    killed = document(run, "status")["pid"]
    os.kill(killed, signal.SIGKILL)
    status = until(lambda: (now := document(run, "status"))["pid"] != killed and now["state"] == "running" and now)
    log = run / "events.jsonl"
    until(lambda: '"event":"role recovered","role":"run"' in log.read_text())
    assert f"the run's process (pid {killed}) died of SIGKILL" in log.read_text()
    until(lambda: document(run, "status")["step"] >= status["step"] + 4)
    attached = Terminal(tmp_path, "attach", run)
    attached.shows("step")
    stopped = relax("stop", run, "--json")
    assert (stopped.code, stopped.json["detail"]) == (0, "the run is stopped"), stopped.err
    assert attached.ends() == 130 and f"continue with: relax resume {run}" in attached.shown.replace("\r\n", "")
    account = document(run, "summary")
    assert account["status"] == "stopped" and account["restarts"] == {"run": 1}
    until(lambda: survivors(tmp_path) == [], "the supervisor ends with the run")

    again = relax("resume", run, f"steps={account['steps'] + 4}", "--detach", "--json")
    assert again.code == 0 and again.json["run_dir"] == str(run), again.err
    finished = relax("attach", run, "--json")
    assert finished.code == 0, finished.err
    account = finished.json
    assert account["status"] == "finished" and account["balanced"] and account["max_lag"] <= 1
    assert account["samples_trained"] == account["steps"] * 16
    assert account["samples_issued"] == (
        account["samples_trained"] + sum(account["samples_dropped"].values()) + account["samples_in_flight"]
    )
    steps = [
        json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines() if "reward/mean" in line
    ]
    assert steps == list(range(1, account["steps"] + 1))
    refused = relax("stop", run)
    assert refused.code == 0 and "finished" in refused.out

    (run / "export/model.safetensors").unlink()
    died = {
        **document(run, "supervisor"),
        "pid": os.getpid(),
        "died": "it died between its last checkpoint and its export",
    }
    (run / "supervisor.json").write_text(json.dumps(died))
    # Started by this process itself, since a successor knows its supervisor by the id of its parent.
    words = command("resume", run, "--supervised")
    successor = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, check=False)
    assert successor.returncode == 0, successor.stderr
    assert (run / "export/model.safetensors").exists() and document(run, "summary")["samples_trained"] == account[
        "samples_trained"
    ]
    until(lambda: survivors(tmp_path) == [])


def test_a_detached_run_that_does_not_start_ends_with_the_error_of_one_in_the_foreground(
    relax: Relax, tiny: Path, tmp_path: Path
) -> None:
    words = ("train", tiny / "recipe.toml", "optimizer.lrr=1", "--run-dir", tmp_path / "run", "--json")
    foreground, detached = relax(*words), relax(*words, "--detach")
    assert (detached.code, detached.json) == (foreground.code, foreground.json) and detached.code == 2
    assert detached.err == foreground.err
    (tmp_path / "full_filter.py").write_text(FULL_FILTER)
    run = tmp_path / "failed"
    late = relax("train", tiny / "recipe.toml", *SMALL, f'plugins=["{tmp_path}/full_filter.py"]',
                 'filters=["full-filter"]', "--run-dir", run, "--detach", "--json")  # fmt: skip
    assert late.code == document(run, "summary")["exit_code"] == late.json["exit_code"] == 3, late.err
    assert late.json["error"] == document(run, "summary")["error"]
    assert f"relax: the run failed; its files are in {run}" in late.err
    attached = relax("attach", run)
    assert attached.code == late.code and attached.err.splitlines()[-1] == late.err.splitlines()[-1], attached.err
    inline = relax("train", tiny / "recipe.toml", "--runner", "inline", "--run-dir", tmp_path / "run", "--detach")
    assert inline.code == 2 and "a debugger needs the terminal" in inline.err and not (tmp_path / "run").exists()
