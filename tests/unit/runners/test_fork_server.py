# SPDX-License-Identifier: Apache-2.0
"""The fork server: modules are imported once for all children; where it can't fork, or died, children start plainly."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from relax_core.api.component import Chosen
from relax_core.api.errors import WorkerDied
from relax_core.api.role import WorkerSpec
from relax_core.runners.local.fork_server import ForkServer
from relax_core.runners.local.workers import VISIBLE, LocalWorkers
from tests.unit.runners.test_local_workers import CALL_S, gone, until

MODULES = {
    "slow_module": "import os, tempfile\nPID = os.getpid()\ntempfile.gettempdir()\n",
    "threaded": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
    "broken": "raise LookupError('it needs what is not there')\n",
}


@pytest.fixture
def spec(tmp_path: Path) -> WorkerSpec:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    return WorkerSpec(
        "w", Chosen("role", "w"), env={"PYTHONPATH": f"{os.getcwd()}:{tmp_path}"}, preload=("slow_module",),
        target="tests.unit.runners.hosted:Hosted",
    )  # fmt: skip


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[LocalWorkers]:
    made = LocalWorkers(log_dir=tmp_path / "logs")
    yield made
    await made.close()


def servers() -> dict[int, ForkServer]:
    return {server.pid: server for server in ForkServer._running.values()}


async def test_slow_modules_are_imported_once_and_children_are_otherwise_their_own(
    workers: LocalWorkers, spec: WorkerSpec
) -> None:
    one, two = await workers.start([replace(spec, env={**spec.env, VISIBLE: own}) for own in ("", "-1")])
    server = await one.call("imported_by", "slow_module", timeout_s=CALL_S)
    assert server in servers() and await two.call("imported_by", "slow_module", timeout_s=CALL_S) == server
    assert server == await one.call("parent", timeout_s=CALL_S) != os.getpid()
    numbers = [await worker.call("random_numbers", timeout_s=CALL_S) for worker in (one, two)]
    assert not set(numbers[0][:2]) & set(numbers[1][:2])
    assert [await worker.call("variable", VISIBLE, timeout_s=CALL_S) for worker in (one, two)] == ["", "-1"]
    assert all(os.getsid(worker.pid) == worker.pid for worker in (one, two))
    assert [psutil.Process(worker.pid).name() for worker in (one, two)] == ["w", "w"]


async def test_a_killed_child_is_reported_with_its_status_and_leaves_no_zombie(
    workers: LocalWorkers, spec: WorkerSpec
) -> None:
    (worker,) = await workers.start([spec])
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="ended with status -9"):
        await worker.call("spin", timeout_s=CALL_S)
    await until(lambda: not psutil.pid_exists(worker.pid))


async def test_children_outlive_a_killed_server_and_the_next_one_has_another(
    workers: LocalWorkers, spec: WorkerSpec
) -> None:
    (worker,) = await workers.start([spec])
    server = await worker.call("parent", timeout_s=CALL_S)
    os.kill(server, signal.SIGSTOP)  # as busy as with a long import
    before = threading.enumerate()
    asked = servers()[server].fork("no:entry", (), {}, [])
    assert all(thread.daemon for thread in threading.enumerate() if thread not in before), (
        "no exit waits for the answer"
    )
    os.kill(server, signal.SIGKILL)
    assert asked.result() == 0
    await until(lambda: gone(server))
    assert await worker.call("imported_by", "slow_module", timeout_s=CALL_S) == server
    (later,) = await workers.start([spec])
    assert await later.call("parent", timeout_s=CALL_S) in servers().keys() - {server}
    await worker.kill()
    assert gone(worker.pid)


@pytest.mark.parametrize("module", ["threaded", "broken"])
async def test_a_child_starts_in_a_new_interpreter_if_a_fork_is_unsafe_or_an_import_fails(
    workers: LocalWorkers, spec: WorkerSpec, module: str
) -> None:
    (worker,) = await workers.start([replace(spec, preload=(module,))])
    assert await worker.call("parent", timeout_s=CALL_S) == os.getpid()


async def test_workers_with_a_gpu_are_never_forked(workers: LocalWorkers, spec: WorkerSpec) -> None:
    (worker,) = await workers.start([replace(spec, devices=("gpu:0",))])
    assert await worker.call("parent", timeout_s=CALL_S) == os.getpid()


async def test_authors_code_is_forked_from_a_server_that_knows_no_more_than_it_may(
    workers: LocalWorkers, spec: WorkerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "of-the-run")
    author = replace(spec, untrusted=True, inherit_env=("PATH", "PYTHON*"))
    one, two = await workers.start([author, replace(author, name="v")])
    server = await one.call("imported_by", "slow_module", timeout_s=CALL_S)
    assert server in servers() and await two.call("imported_by", "slow_module", timeout_s=CALL_S) == server
    assert "SOME_API_KEY" not in psutil.Process(server).environ()
    for worker in (one, two):
        scratch = await worker.call("temporary_folder", timeout_s=CALL_S)
        assert scratch == await worker.call("variable", "HOME", timeout_s=CALL_S) != tempfile.gettempdir()
    assert await one.call("temporary_folder", timeout_s=CALL_S) != await two.call("temporary_folder", timeout_s=CALL_S)
