# SPDX-License-Identifier: Apache-2.0
"""The supervisor of a detached run over real processes: a driver of the tests that dies, ends or waits as it is told."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from random import Random
from typing import IO, Any

import psutil
import pytest

from relax_core.api.run_commands import Stop
from relax_core.control.supervisor import ORPHANS_S
from relax_core.observe.run_directory import RunDirectory
from relax_core.views.run import RunView, health

DRIVER = """
import os, signal, subprocess, sys, time
from pathlib import Path
from relax_core.control.supervisor import enter_supervision
from relax_core.observe.run_directory import RunDirectory

run, starts, plan = Path("run"), Path("starts"), Path("plan").read_text().split()
deaths = starts.read_text().count("\\n") if starts.exists() else 0
death = enter_supervision(RunDirectory.open(run))
with starts.open("a") as told:
    told.write(f"{' '.join(sys.argv[1:])} after {death.reason if death else 'nothing'}\\n")
print("to the console", file=sys.stderr, flush=True)
for does in plan[min(deaths, len(plan) - 1)].split("+"):
    verb, _, argument = does.partition("=")
    if verb == "save":
        checkpoint = run / "checkpoints" / f"step-{int(argument):06d}"
        checkpoint.mkdir()
        (checkpoint / "state.json").write_text("{}")
    elif verb == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        Path("child").write_text(str(child.pid))
    elif verb == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif verb == "fail":
        RunDirectory.open(run).write("summary", {"status": "failed", "error": "hub died", "retry": argument == "retry"})
        sys.exit(4)
    elif verb == "state":
        RunDirectory.open(run).write("status", {"pid": os.getpid(), "state": argument})
    elif verb == "wait":
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        Path("waits").touch()
        time.sleep(600)
    else:
        sys.exit(int(argument))
"""
SUPERVISE = (
    "import sys; from relax_core.control import supervisor; supervisor.ORPHANS_S = float(sys.argv[1]);"
    "supervisor.PAUSES_S = (0.0,);"
    "sys.exit(supervisor.supervise(sys.argv[3:], 1, (sys.executable, sys.argv[2])))"
)
DEADLINE_S = 200.0
Supervise = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Supervise]:
    """Supervise a driver that does what `plan` says, one word at each start."""
    run = RunDirectory.create(tmp_path / "run", "run", datetime(2026, 1, 1), Random(0))
    run.write_config("[recovery]\nrestarts = 1\n")
    run.close()
    (tmp_path / "driver.py").write_text(DRIVER)
    begun: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []

    def start(*plan: str, orphans_s: float = ORPHANS_S) -> subprocess.Popen[bytes]:
        (tmp_path / "plan").write_text(" ".join(plan))
        output = (tmp_path / "out").open("w+b")
        words = [sys.executable, "-c", SUPERVISE, str(orphans_s), str(tmp_path / "driver.py"), "train", "my.toml"]
        process = subprocess.Popen(words, cwd=tmp_path, stdout=output, start_new_session=True)
        begun.append((process, output))
        return process

    yield start
    for process, output in begun:
        left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait()
        output.close()


def starts(folder: Path) -> list[str]:
    return (folder / "starts").read_text().splitlines()


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_driver_is_resumed_and_the_exit_code_is_that_of_the_last_one(
    supervise: Supervise, tmp_path: Path
) -> None:
    assert supervise("die", "exit=3").wait(DEADLINE_S) == 3
    first, second = starts(tmp_path)
    assert first == "train my.toml --supervised after nothing"
    resumed, _, reason = second.partition(" after ")
    assert resumed == f"resume {tmp_path / 'run'} --supervised"
    assert reason.startswith("the run's process (pid ") and reason.endswith(") died of SIGKILL")
    console = (tmp_path / "run/logs/console.log").read_text()
    assert console.count("to the console\n") == 2 and f"relax: {reason}; another process resumes the run" in console
    log = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [(record["level"], record["fields"]) for record in log] == [("warning", {"restart": 1})]


def test_a_driver_is_resumed_after_a_retryable_failure_or_an_unexpected_exit(
    supervise: Supervise, tmp_path: Path
) -> None:
    drivers = "fail=retry", "save=1+state=running+exit=1", "state=failed+fail=final"
    assert supervise(*drivers).wait(DEADLINE_S) == 4
    _, second, third = starts(tmp_path)
    assert second.endswith(") failed: hub died")
    assert third.endswith(") ended with exit code 1 in the middle of the run")


def test_restarts_without_progress_end_and_progress_gives_them_back(supervise: Supervise, tmp_path: Path) -> None:
    """One is forgiven: the second death in a row without a newer checkpoint is the end."""
    assert supervise("die", "save=4+die", "die").wait(DEADLINE_S) == 4
    assert len(starts(tmp_path)) == 3
    console = (tmp_path / "run/logs/console.log").read_text()
    assert "2 times since step 4, beyond recovery.restarts; continue with: relax resume" in console


def test_the_orphans_of_a_dead_driver_end_before_the_next_one_starts_which_is_not_resumed_after_sigterm(
    supervise: Supervise, tmp_path: Path
) -> None:
    """A scheduler sends SIGTERM to the supervisor, and SIGKILL when the notice has passed."""
    supervisor = supervise("child+die", "wait", orphans_s=0.2)
    until((tmp_path / "waits").exists)
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))
    assert len(psutil.Process(supervisor.pid).children(recursive=True)) == 1
    supervisor.terminate()
    assert supervisor.wait(DEADLINE_S) == 128 + signal.SIGKILL
    assert len(starts(tmp_path)) == 2


def test_a_requested_stop_does_not_cause_a_restart(supervise: Supervise, tmp_path: Path) -> None:
    RunDirectory.open(tmp_path / "run").send(Stop())
    assert supervise("die").wait(DEADLINE_S) == 4
    assert len(starts(tmp_path)) == 1 and not RunDirectory.open(tmp_path / "run").take_commands()


def test_a_run_between_two_drivers_is_restarting_and_without_a_supervisor_it_is_lost(
    supervise: Supervise, tmp_path: Path
) -> None:
    supervisor = supervise("wait")
    until((tmp_path / "waits").exists)
    view = RunView(tmp_path / "run")
    mark, gone = view.document("supervisor")["host"], subprocess.Popen(["true"])
    gone.wait()
    RunDirectory.open(view.path).write("status", {"state": "running", "pid": gone.pid, "host": mark, "written_at": 0.0})
    named = "relax_core.control.supervisor" in psutil.Process(supervisor.pid).cmdline()
    assert not named and health(view, 1.0).state == "lost", "a process of another name has that id by now"
    code = "import time; time.sleep(600)"
    other = subprocess.Popen([sys.executable, "-c", code, "relax_core.control.supervisor"])
    try:
        RunDirectory.open(view.path).write("supervisor", {"pid": other.pid, "host": mark, "restarts": 1})
        assert health(view, 1.0).state == "restarting"
        RunDirectory.open(view.path).write("status", {"state": "failed", "pid": gone.pid, "host": mark})
        for retry, state in ((True, "restarting"), (False, "failed")):
            RunDirectory.open(view.path).write("summary", {"status": "failed", "error": "hub died", "retry": retry})
            assert health(RunView(view.path), 1.0).state == state
        again = RunDirectory.reopen(view.path)
        assert health(RunView(view.path), 1.0).state == "starting"
        again.close()
        RunDirectory.open(view.path).write("status", {"state": "running", "pid": gone.pid, "host": mark})
    finally:
        other.kill()
        other.wait()
    assert health(view, 1.0).state == "lost"
