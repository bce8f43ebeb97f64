# SPDX-License-Identifier: Apache-2.0
"""Real child processes: what they may do, how they end, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from relax_core.api.component import Chosen
from relax_core.api.errors import ConfigError, DeadlineExceeded, InfrastructureError, PluginError, WorkerDied
from relax_core.api.role import WorkerSpec
from relax_core.observe.redaction import Redactor
from relax_core.runners.local.fork_server import ForkServer
from relax_core.runners.local.workers import LocalWorker, LocalWorkers
from tests.processes import gone, stop

CALL_S = 60.0


preload: tuple[str, ...] = ()


@pytest.fixture(autouse=True, params=["started plainly", "forked"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A child promises the same however it is made."""
    if request.param == "forked":
        monkeypatch.setitem(globals(), "preload", ("tests.unit.runners.hosted",))
    return str(request.param)


FORKED = pytest.mark.parametrize("way", ["forked"], indirect=True)
"""For what happens once a child serves, and in its parent: the code is the same for both kinds of children."""
PLAIN = pytest.mark.parametrize("way", ["started plainly"], indirect=True)
"""For children that are never forked."""


def spec(name: str = "w", target: str = "Hosted", memory_mb: int = 0, python: str = "") -> WorkerSpec:
    env = {"PYTHONPATH": os.getcwd()}
    target = f"tests.unit.runners.hosted:{target}"
    return WorkerSpec(name, Chosen("role", name), python, env, memory_mb=memory_mb, target=target, preload=preload)


@pytest.fixture
def others() -> set[int]:
    """The children of earlier tests in this process (a library's own helper may live on): none of ours."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[LocalWorkers]:
    made = LocalWorkers(log_dir=tmp_path)
    yield made
    await made.close()


@pytest.fixture
async def worker(workers: LocalWorkers) -> LocalWorker:
    (one,) = await workers.start([spec()])
    assert isinstance(one, LocalWorker)
    return one


async def until(ready: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not ready():
            await asyncio.sleep(0.02)


def ours(others: set[int]) -> list[psutil.Process]:
    """Children that were started since; the fork server is there for all tests."""
    others = others | {server.pid for server in ForkServer._running.values()}
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.pid not in others and not gone(child.pid)]


@FORKED
async def test_large_arrays_travel_both_ways(worker: LocalWorker) -> None:
    sent = np.arange(4_000_000, dtype=np.float64).reshape(2, -1)
    got = await worker.call("double", sent, timeout_s=CALL_S)
    np.testing.assert_array_equal(got, sent * 2)


async def test_output_of_hosted_code_goes_to_the_log_and_not_into_the_channel(
    worker: LocalWorker, tmp_path: Path
) -> None:
    assert await worker.call("chatter", timeout_s=CALL_S) == "done"
    assert await worker.call("double", np.ones(1), timeout_s=CALL_S) == 2
    await until(lambda: "loud" in (tmp_path / "w.log").read_text())


@FORKED
async def test_the_log_is_its_owner_s_and_has_no_secret_and_no_control_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the file was there before, the secret comes in two writes, and a line never ends."""
    monkeypatch.setenv("SOME_API_KEY", "of-the-environment")
    log = tmp_path / "w.log"
    log.write_text("before\n")
    log.chmod(0o644)
    workers = LocalWorkers(log_dir=tmp_path, redactor=Redactor(["of-the-configuration"]))
    try:
        (worker,) = await workers.start([spec()])
        for text in ("a \x1b[2J\x1b]0;title\x07 of-the-conf", "iguration\r50 %\n", "of-the-environment \x9b5n and on"):
            await worker.call("write", text, timeout_s=CALL_S)
        await until(lambda: "and on" in log.read_text())
    finally:
        await workers.close()
    assert log.stat().st_mode & 0o777 == 0o600
    assert log.read_text().splitlines()[-3:] == [
        r"a \u001b[2J\u001b]0;title\u0007 [redacted]", "50 %", r"[redacted] \u009b5n and on"
    ]  # fmt: skip


@FORKED
async def test_only_its_parent_reaches_a_worker(worker: LocalWorker) -> None:
    assert psutil.Process(worker.pid).net_connections("inet") == []
    assert await worker.call("double", np.ones(1), timeout_s=CALL_S) == 2


async def test_a_workers_environment_has_the_runs_variables() -> None:
    one = replace(spec(), env={"RELAX_TEST_A": "core", "PYTHONPATH": os.getcwd()})
    env = {"RELAX_TEST_A": "run", "RELAX_TEST_B": "too"}
    workers = LocalWorkers(run_env=env)
    (worker,) = await workers.start([one], CALL_S)
    assert [await worker.call("variable", name, timeout_s=CALL_S) for name in sorted(env)] == ["run", "too"]
    await workers.close()


@FORKED
async def test_the_handle_of_a_replaced_worker_is_dropped(workers: LocalWorkers) -> None:
    for _ in range(2):
        (worker,) = await workers.start([spec()])
        assert workers._started == [worker]
        await worker.kill()


@FORKED
async def test_only_public_methods_can_be_called(worker: LocalWorker) -> None:
    for method in ("no_such", "_private", "component", "__class__"):
        with pytest.raises(ConfigError, match="no such public method"):
            await worker.call(method, timeout_s=CALL_S)
        with pytest.raises(ConfigError, match="no such public method"):
            _ = [item async for item in worker.stream(method, timeout_s=CALL_S)]


@FORKED
async def test_plain_errors_come_back_by_their_type_and_others_with_their_frames(worker: LocalWorker) -> None:
    with pytest.raises(ValueError, match="got 3; give 4"):
        await worker.call("refuse", timeout_s=CALL_S)
    with pytest.raises(PluginError, match="LookupError: author's mistake") as failed:
        await worker.call("fail", timeout_s=CALL_S)
    assert "hosted.py" in failed.value.frames


@FORKED
async def test_a_stream_gives_its_items_then_its_error(worker: LocalWorker) -> None:
    assert [item async for item in worker.stream("count", 5, timeout_s=CALL_S)] == [0, 1, 2, 3, 4]
    got = []
    with pytest.raises(ValueError, match="no more"):
        async for item in worker.stream("count_then_fail", timeout_s=CALL_S):
            got.append(item)
    assert got == [0]


@FORKED
async def test_a_call_past_its_deadline_is_an_error(worker: LocalWorker) -> None:
    with pytest.raises(DeadlineExceeded, match="w waited .* for spin"):
        await worker.call("spin", timeout_s=0.2)


async def test_calls_of_a_killed_worker_name_it_and_its_end(worker: LocalWorker) -> None:
    spinning = asyncio.create_task(worker.call("spin", timeout_s=CALL_S))
    await asyncio.sleep(0)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="worker w .* ended with status -9"):
        await spinning
    with pytest.raises(WorkerDied):
        await worker.call("double", np.ones(1), timeout_s=CALL_S)


async def test_killing_a_worker_kills_what_it_started(worker: LocalWorker) -> None:
    pid = await worker.call("grandchild", timeout_s=CALL_S)
    await worker.kill()
    await until(lambda: gone(worker.pid) and gone(pid))


async def test_processes_of_a_worker_end_when_it_dies(worker: LocalWorker) -> None:
    pid = await worker.call("grandchild", timeout_s=CALL_S)
    os.kill(worker.pid, signal.SIGKILL)
    await until(lambda: gone(worker.pid) and gone(pid))


async def test_a_signal_to_every_process_of_a_job_ends_what_a_worker_started_but_not_the_worker(
    worker: LocalWorker,
) -> None:
    """Its parent still needs it to save; authors' children and pools end as they always do."""
    started = [await worker.call(how, timeout_s=CALL_S) for how in ("grandchild", "forked")]
    for pid in (worker.pid, *started):
        os.kill(pid, signal.SIGTERM)
    await until(lambda: all(map(gone, started)))
    os.kill(worker.pid, signal.SIGUSR1)
    assert (await worker.call("double", np.ones(1), timeout_s=CALL_S)).tolist() == [2.0]


@FORKED
async def test_stopping_a_worker_that_spins_ends_it(worker: LocalWorker) -> None:
    spinning = asyncio.create_task(worker.call("spin", timeout_s=CALL_S))
    await worker.stop(timeout_s=5.0)
    with pytest.raises(WorkerDied):
        await spinning
    assert gone(worker.pid)


@FORKED
async def test_a_memory_limit_is_the_authors_error_and_not_the_machines(workers: LocalWorkers) -> None:
    (one,) = await workers.start([spec(memory_mb=1024)])
    assert await one.call("take_memory", 16, timeout_s=CALL_S) == 16 << 20
    with pytest.raises(PluginError, match="MemoryError"):
        await one.call("take_memory", 2048, timeout_s=CALL_S)


async def test_a_worker_that_fails_to_start_ends_the_others(workers: LocalWorkers, others: set[int]) -> None:
    with pytest.raises(PluginError, match="NoSuchClass"):
        await workers.start([spec("good"), spec("bad", "NoSuchClass")])
    assert ours(others) == []


async def test_a_worker_that_never_gets_ready_meets_its_deadline(workers: LocalWorkers) -> None:
    await workers.start([spec()])  # what starts the others is there
    with pytest.raises(DeadlineExceeded, match="worker slow to start"):
        await workers.start([spec("slow", "SlowToBuild")], timeout_s=3.0)


@PLAIN
async def test_a_missing_interpreter_is_named(workers: LocalWorkers) -> None:
    with pytest.raises(InfrastructureError, match="/no/such/python"):
        await workers.start([spec(python="/no/such/python")])


@pytest.mark.parametrize("after_s", [0.0, 0.02])
async def test_a_start_that_is_cancelled_ends_and_leaves_nothing(
    workers: LocalWorkers, others: set[int], after_s: float
) -> None:
    starting = asyncio.create_task(workers.start([spec(str(number), "SlowToBuild") for number in range(2)]))
    await asyncio.sleep(after_s)
    starting.cancel()
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await starting
    await until(lambda: not ours(others))


async def test_a_cancelled_start_ends_also_those_that_were_ready(workers: LocalWorkers, others: set[int]) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    ready, slow = spec("ready"), spec("slow", "SlowToBuild")
    starting = asyncio.create_task(workers.start([ready, slow]))
    await until(lambda: len(workers._started) == 1)  # it serves
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await until(lambda: not ours(others))
    await until(lambda: len(os.listdir("/proc/self/fd")) <= open_before)


def orphaned(*words: str, **env: str) -> list[int]:
    """A parent's worker and that one's processes, once the parent has been killed."""
    command = [sys.executable, str(Path(__file__).with_name("parent.py")), *preload, *words]
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), **env}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert not any(map(gone, pids))
        if "untrusted" in words:  # all at once: nobody is left who could delete anything
            stop(parent.pid)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # the kernel has ended a namespace with its first process
                    os.kill(pid, signal.SIGKILL)
        parent.kill()
    return pids


@PLAIN
async def test_the_folder_of_an_untrusted_child_that_died_with_its_parent_is_swept_at_a_later_start(
    workers: LocalWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    pids = await asyncio.to_thread(lambda: orphaned("untrusted", TMPDIR=str(temporary)))
    await until(lambda: all(map(gone, pids)))
    (left,) = temporary.glob("relax-*")
    (temporary / "relax-notes").mkdir()  # somebody's own
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    (alive,) = await workers.start([replace(spec(), untrusted=True)])
    (own,) = {path.name for path in temporary.iterdir()} - {"relax-notes"}
    assert own != left.name
    await alive.kill()
    assert [path.name for path in temporary.iterdir()] == ["relax-notes"]


async def test_an_orphan_ends_with_everything_it_started() -> None:
    worker, grandchild = await asyncio.to_thread(orphaned)
    await until(lambda: gone(worker) and gone(grandchild))


@FORKED
async def test_the_folder_of_a_child_that_ends_with_the_loop_is_deleted(worker: LocalWorker, tmp_path: Path) -> None:
    worker._process._scratch = str(tmp_path / "scratch")
    (tmp_path / "scratch").mkdir()
    await asyncio.get_running_loop().shutdown_default_executor()
    await worker.kill()
    assert not (tmp_path / "scratch").exists()


@FORKED
async def test_after_a_cancelled_kill_the_others_wait_until_the_childs_folder_is_deleted(
    worker: LocalWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    child, delete = worker._process, shutil.rmtree
    child._scratch = str(tmp_path / "scratch")

    def slowly(path: str, *args: Any, **options: Any) -> None:
        if path == child._scratch:
            goes_on.wait(60.0)
        delete(path, *args, **options)

    monkeypatch.setattr(shutil, "rmtree", slowly)
    first = asyncio.create_task(worker.kill())
    await until(lambda: child._deleting is not None)
    first.cancel()
    await asyncio.wait({first})
    second = asyncio.create_task(worker.kill())
    await asyncio.sleep(0.05)
    assert not second.done()
    goes_on.set()
    await second
