# SPDX-License-Identifier: Apache-2.0
"""Authors' code cannot change the run's other processes, and nothing that it starts outlives its worker."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from relax_core.api.component import Chosen
from relax_core.api.errors import WorkerDied
from relax_core.api.role import WorkerSpec
from relax_core.runners.local.keeper import namespace_refusal
from relax_core.runners.local.workers import LocalWorkers
from tests.unit.runners.test_local_workers import until

CALL_S = 60.0
WITHOUT_NAMESPACES = """#!/bin/sh
exec unshare --user --map-root-user sh -c 'echo 0 >/proc/sys/user/max_pid_namespaces; exec "$0" "$@"' {python} "$@"
"""
"""Interpreter under a kernel that makes no more process namespaces."""
REFUSED = namespace_refusal()
NAMESPACES = pytest.mark.skipif(bool(REFUSED), reason="the kernel refuses process namespaces")


@pytest.fixture(params=[pytest.param("namespace", marks=NAMESPACES), "none"])
def python(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An interpreter with namespaces, and one to which the kernel refuses them."""
    if request.param == "namespace" or REFUSED:
        return ""
    path = tmp_path / "python"
    path.write_text(WITHOUT_NAMESPACES.format(python=sys.executable))
    path.chmod(stat.S_IRWXU)
    return str(path)


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[LocalWorkers]:
    for folder in ("run", "kept"):
        (tmp_path / folder).mkdir()
    (tmp_path / "run" / "ledger.db").touch()
    (tmp_path / "run" / "recipe").mkdir()
    (tmp_path / "run" / "recipe" / "agent.py").touch()
    made = LocalWorkers(log_dir=tmp_path / "logs", protected=tmp_path / "run")
    yield made
    await made.close()


@pytest.fixture
def victim() -> Iterator[psutil.Process]:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield psutil.Process(process.pid)
        process.kill()


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[socket.socket]:
    """A listening socket at `alive`."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "alive"))
        listening.listen()
        listening.settimeout(CALL_S)
        yield listening


def spec(python: str = "", writable: tuple[str, ...] = ()) -> WorkerSpec:
    """A worker that is forked, as in a run, where it has this interpreter."""
    env, module = {"PYTHONPATH": os.getcwd()}, "tests.unit.runners.attacks"
    return WorkerSpec(
        "w",
        Chosen("role", "w"),
        python,
        env,
        target=f"{module}:Attacker",
        untrusted=True,
        preload=(module,),
        writable=writable,
    )


def state(process: psutil.Process) -> tuple[object, ...]:
    """What the attacks would change."""
    return (
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE), process.nice(), process.cpu_affinity(),
        os.sched_getscheduler(process.pid), Path(f"/proc/{process.pid}/oom_score_adj").read_text(),
    )  # fmt: skip


@NAMESPACES
async def test_code_of_authors_cannot_change_another_process(workers: LocalWorkers, victim: psutil.Process) -> None:
    before = state(victim)
    (worker,) = await workers.start([spec()])
    assert not await worker.call("attack", victim.pid, timeout_s=CALL_S)
    assert state(victim) == before


async def test_code_of_authors_may_change_its_own_process_and_writable_folders_alone(
    workers: LocalWorkers, python: str, tmp_path: Path
) -> None:
    writable = (str(tmp_path / "kept"), str(tmp_path / "run" / "media"))
    (worker,) = await workers.start([spec(python, writable)])
    assert not await worker.call("touch", str(tmp_path / "run"), timeout_s=CALL_S)
    used = await worker.call("use", list(writable), str(tmp_path / "run" / "recipe"), timeout_s=CALL_S)
    has_mounts = not (python or REFUSED)
    open_to_all = ("devices", "terminal", "temporary", "writable", "read", "recipe", "locks")
    assert used == (*(["mode"] if has_mounts else []), *open_to_all)
    own = await worker.call("own_rights", timeout_s=CALL_S)
    assert own["self"] and own["nice"] == "19" and own["session"] > 0


@pytest.mark.parametrize("python", ["none"], indirect=True)
async def test_the_log_names_the_refusal_of_a_namespace(workers: LocalWorkers, python: str, tmp_path: Path) -> None:
    (worker,) = await workers.start([spec(python)])
    await worker.kill()
    said = f"no process namespace ({REFUSED or 'unshare: No space left on device'})"
    await until(lambda: said in (tmp_path / "logs" / "w.log").read_text())


@pytest.mark.parametrize("how", ["kill", "stop", "exit", "SIGKILL", "SIGSEGV"])
async def test_a_grandchild_with_its_own_session_ends_with_the_worker(
    workers: LocalWorkers, python: str, alive: socket.socket, tmp_path: Path, how: str
) -> None:
    (worker,) = await workers.start([spec(python)])
    await worker.call("leave_behind", str(tmp_path / "alive"), timeout_s=CALL_S)
    line, _ = await asyncio.to_thread(alive.accept)
    assert line.recv(2) == b"up"
    if how in ("kill", "stop"):
        await getattr(worker, how)()
    else:
        status = 3 if how == "exit" else -getattr(signal, how)
        with pytest.raises(WorkerDied, match=f"ended with status {status} during end"):
            await worker.call("end", how, timeout_s=CALL_S)
    with line:
        line.settimeout(CALL_S)
        assert await asyncio.to_thread(line.recv, 1) == b""
