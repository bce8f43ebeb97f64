# SPDX-License-Identifier: Apache-2.0
"""A run on Ray that goes on while a test looks into its directory and kills its processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tests.graph.conftest import start_relax

T = TypeVar("T")
WAIT_S = 400.0
SHORT = ("rollout.groups_per_step=8", "eval.every=0", "checkpoint.every=5", "checkpoint.keep=1", "run.runner=ray")


def until(found: Callable[[], T | None | bool], what: str | Callable[[], str], deadline_s: float = WAIT_S) -> T:
    """What `found` gives once it gives something; `what` says what was missing."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        value = found()
        if value:
            return value  # type: ignore[return-value]
        time.sleep(0.05)
    raise AssertionError(f"not within {deadline_s:g} s: {what() if callable(what) else what}")


class Running:
    """One `relax` process in a process group of its own."""

    def __init__(self, run: Path, *arguments: str | Path, **env: str) -> None:
        self.path = run
        run.parent.mkdir(parents=True, exist_ok=True)
        self._out, self._err = run.parent / f"{run.name}.out", run.parent / f"{run.name}.err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = start_relax(arguments, run.parent, env, out, err)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    # -- what it says of itself ---------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.path / "status.json").read_text()))
        except (OSError, ValueError):
            return {}

    def role(self, name: str) -> dict[str, Any]:
        return next((beat for beat in self.status().get("roles", ()) if beat["role"] == name), {})

    def pid(self, role: str) -> int:
        return until(lambda: self.role(role).get("pid"), f"{role} shows its pid\n{self.err}")

    def fact(self, role: str, name: str) -> Mapping[str, Any]:
        return until(lambda: self.role(role).get("facts", {}).get(name), f"{role} says {name}\n{self.err}")

    def steps(self) -> list[dict[str, Any]]:
        """Records of its finished steps, whole lines only."""
        try:
            lines = (self.path / "metrics.jsonl").read_text().splitlines(keepends=True)
        except OSError:
            return []
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return [record for record in records if "reward/mean" in record]

    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.path / "summary.json").read_text()))

    # -- waiting and ending -------------------------------------------------------------------------------------

    def until_steps(self, count: int, deadline_s: float = WAIT_S) -> int:
        """Until so many steps are done; how many are."""

        def reached() -> bool:
            ended = self.process.poll() is not None
            done = len(self.steps()) >= count
            assert done or not ended, f"it ended with {self.process.returncode}\n{self.err}"
            return done

        until(reached, f"{count} steps", deadline_s)
        return len(self.steps())

    def until_more_steps(self, count: int = 2) -> None:
        self.until_steps(len(self.steps()) + count)

    def interrupt(self) -> None:
        """Ctrl-C, as a terminal sends it: to every process of the group."""
        assert self.process.poll() is None, f"it ended with {self.process.returncode}\n{self.err}"
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self, timeout_s: float = WAIT_S) -> int:
        """Its exit code."""
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def children(pid: int, word: str) -> list[psutil.Process]:
    """Child processes with a word in their command line."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            if word in " ".join(child.cmdline()):
                found.append(child)
    return found


def named(pid: int, name: str) -> list[int]:
    """Child processes whose name begins like this one, of which the system shows 15 characters; the newest is last."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            if Path(f"/proc/{child.pid}/comm").read_text().startswith(name[:15]):
                found.append((child.create_time(), child.pid))
    return [pid for _, pid in sorted(found)]


class Start:
    """Starts runs under one directory; `started_runs` ends them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[Running] = []

    def __call__(self, run: Path, *arguments: str | Path, **env: str) -> Running:
        self.started.append(Running(run, *arguments, **env))
        return self.started[-1]

    def train(self, run: Path, recipe: Path, *overrides: str, **env: str) -> Running:
        return self(run, "train", recipe, *SHORT, *overrides, "--run-dir", run, **env)
