# SPDX-License-Identifier: Apache-2.0
"""The supervisor of a detached run: a process in a session of its own, the parent of the run's driver.

The driver is an ordinary `relax train`. When the driver dies, or fails with an infrastructure error, the supervisor
waits until all processes that the driver started are gone. Then it resumes the run from its newest checkpoint in a new
process, at most `[recovery] restarts` times in a row. This is the second tier of recovery; in the first, the run itself
restarts an engine, a rank or a role in place.
The supervisor does none of the run's work, so that it stays small and is unlikely to fail.
`python -m relax_core.control.supervisor train my.toml` starts a supervised run.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from relax_core.api.errors import InfrastructureError
from relax_core.api.run_commands import Stop
from relax_core.observe.event_log import EventLog
from relax_core.observe.files import disk_errors, read_document
from relax_core.observe.run_directory import RunDirectory
from relax_core.observe.status import host_mark
from relax_core.rpc.waiting import RestartBudget

DOCUMENT = "supervisor"
"""`supervisor.json` of a run directory: the supervisor's process, its restarts, and the cause of the last death."""
CONSOLE = "console.log"
DRIVER = (sys.executable, "-m", "relax_core")
SUPERVISED = "--supervised"
REPORT = "relax.detached/1"
RESTARTS = 3
"""Number of restarts if the run's config.toml, written by an older Relax, lacks `[recovery] restarts`."""
ORPHANS_S, KILLED_S, LOOK_S = 20.0, 20.0, 0.1
"""Seconds for the children of a dead driver to end by themselves, because the driver's pipe has closed; seconds for
killed children to be gone after that; seconds between two checks."""
PAUSES_S = (0.0, 5.0, 20.0, 60.0)
"""Seconds before the first, second, ... restart in a row; a machine may need minutes to recover."""
PR_SET_CHILD_SUBREAPER = 36
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class DriverDeath:
    """The death of a driver, as recorded by the next driver."""

    reason: str
    in_a_row: int
    """Number of deaths since the last new checkpoint, this one included."""


def enter_supervision(directory: RunDirectory) -> DriverDeath | None:
    """Make this process the driver of the supervisor that started it: log stderr, and write a report to stdout.

    Returns the death of the previous driver; None if this is the first driver.
    """
    console = directory.logs / CONSOLE
    with disk_errors(console):
        written = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    begins = os.lseek(written, 0, os.SEEK_END)
    sys.stderr.flush()
    os.dup2(written, 2)
    os.close(written)
    death = predecessor(directory)
    if death is None:
        directory.write(DOCUMENT, {"pid": os.getppid(), "host": host_mark(), "restarts": 0})
    report = {"schema": REPORT, "run_dir": str(directory.path), "console": str(console), "console_from": begins}
    sys.stdout.write(json.dumps({**report, "pid": os.getppid(), "at": time.time()}) + "\n")
    sys.stdout.flush()
    return death


def predecessor(directory: RunDirectory) -> DriverDeath | None:
    """Return the death of the driver that this process was started to replace; None for the first driver."""
    known = directory.read(DOCUMENT) or {}
    if known.get("pid") != os.getppid() or known.get("host") != host_mark() or "died" not in known:
        return None
    return DriverDeath(known["died"], int(known["restarts"]))


def reported(file: int) -> dict[str, Any]:
    """Return the newest report that the drivers wrote to their standard output; empty before the first report."""
    for line in reversed(os.pread(file, 1 << 20, 0).splitlines()):
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            if isinstance(said, dict) and said.get("schema") == REPORT:
                return said
    return {}


def supervise(words: Sequence[str], output: int, program: Sequence[str] = DRIVER) -> int:
    """Run `relax` with the arguments `words` under supervision; return the exit code of the last driver.

    `output` is the descriptor of a readable file that receives the drivers' standard output; `program` is the command
    that runs `relax`.
    """
    if sys.platform == "linux":  # orphans of a dead driver become children of this process, which waits for their end
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    driver = 0
    stops: set[int] = set()

    def forward(number: int, _: object) -> None:
        if number != signal.SIGUSR1:
            stops.add(number)
        with contextlib.suppress(ProcessLookupError):
            if driver:
                os.kill(driver, number)

    for number in FORWARDED:
        if (
            signal.getsignal(number) is not signal.SIG_IGN
        ):  # under `nohup` SIGHUP must end neither this process nor the driver
            signal.signal(number, forward)
    driver = _start([*program, *words, SUPERVISED], output)
    budget, reached = None, 0
    while death := _death(code := _wait(driver), driver, output):
        run_dir, ended = reported(output).get("run_dir"), 128 - code if code < 0 else code
        if run_dir is None or stops:
            return ended
        from relax_core.control.stages import resumable_step  # imported late, because the import takes a second

        directory = RunDirectory.open(Path(run_dir))
        if budget is None:
            config = tomllib.loads((directory.path / "config.toml").read_text(encoding="utf-8"))
            budget = RestartBudget(int(config.get("recovery", {}).get("restarts", RESTARTS)))
        step = resumable_step(directory.path) or 0
        if step > reached:
            reached = step
            budget.refill()
        reason = f"the run's process (pid {driver}) {death}"
        if any(isinstance(command, Stop) for command in directory.take_commands()):
            _log(directory, "warning", f"{reason}, and is not restarted, because a stop was requested")
            return InfrastructureError.exit_code
        if not budget.spend():
            times = f"{budget.spent} times since step {reached}, beyond recovery.restarts"
            _log(directory, "error", f"{reason}, {times}; continue with: relax resume {run_dir}")
            return InfrastructureError.exit_code
        died = {"died": reason, "restarts": budget.spent, "at": time.time()}
        directory.write(DOCUMENT, {"pid": os.getpid(), "host": host_mark(), **died})
        _log(directory, "warning", f"{reason}; another process resumes the run", restart=budget.spent)
        _end_orphans()
        resumes_at = time.monotonic() + PAUSES_S[min(budget.spent, len(PAUSES_S)) - 1]
        while not stops and time.monotonic() < resumes_at:
            time.sleep(LOOK_S)
        if stops:
            return ended
        with (directory.logs / CONSOLE).open("ab") as console:
            driver = _start([*program, "resume", run_dir, SUPERVISED], output, console.fileno())
    return code


def _start(command: Sequence[str], output: int, errors: int | None = None) -> int:
    # In its own process group: a signal to the supervisor's group reaches the driver once, forwarded by the supervisor.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, process_group=0)
    process.returncode = 0  # so that Popen does not wait: `_wait` reaps the process
    return process.pid


def _wait(driver: int) -> int:
    """Wait until the driver has ended, reaping orphans meanwhile; return its exit code, negative for a signal."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == driver:
            return os.waitstatus_to_exitcode(status)


def _death(code: int, driver: int, output: int) -> str:
    """Return why the driver died if the run should be resumed; empty if not.

    A driver that ended by itself has recorded the end of the run, and whether a retry may help.
    """
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    if not code or (run_dir := reported(output).get("run_dir")) is None:
        return ""
    from relax_core.observe.recorder import ENDINGS

    if code == InfrastructureError.exit_code and (summary := read_document(Path(run_dir) / "summary.json") or {}):
        return f"failed: {summary.get('error')}" if summary.get("retry") else ""
    status = read_document(Path(run_dir) / "status.json") or {}
    at_work = status.get("pid") == driver and status.get("state") not in ENDINGS
    return f"ended with exit code {code} in the middle of the run" if at_work else ""


def _end_orphans() -> None:
    """Wait until the children of the dead driver are gone, with their devices and ports; kill the slow ones."""
    deadline = time.monotonic() + ORPHANS_S
    while time.monotonic() < deadline + KILLED_S:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not (left := psutil.Process().children(recursive=True)):
            return
        for process in left if time.monotonic() > deadline else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(LOOK_S)


def _log(directory: RunDirectory, level: str, message: str, **fields: Any) -> None:
    """Write to the events and the console of the run, whose driver is dead."""
    with contextlib.suppress(OSError), (directory.logs / CONSOLE).open("a") as console:
        console.write(f"relax: {message}\n")
    log = EventLog(directory.path, directory.redactor, stderr=False)
    log.note(level, message, **fields)
    log.close()


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1:], output=1))
