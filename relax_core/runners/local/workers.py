# SPDX-License-Identifier: Apache-2.0
"""Local workers: child processes in sessions of their own, called over a private pair of sockets.

A child ends when its parent ends, which closes the child's standard input; all processes that it started are killed,
too. Calls use `rpc.connection`, without pickle or a listening socket.

A child's end is noticed through its pidfd. asyncio's subprocess transport is not used, since it never returns if it is
cancelled while it connects its pipes. If the plan gives a child devices, it sees only these.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import site
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from relax_core.api.errors import DeadlineExceeded, InfrastructureError, WorkerDied
from relax_core.api.options import revealed
from relax_core.api.role import Clock, SystemClock, WorkerSpec, visible_environment
from relax_core.observe.redaction import Redactor, credentials
from relax_core.rpc import messages
from relax_core.rpc.connection import Connection
from relax_core.rpc.host import free_port
from relax_core.rpc.remote_worker import RemoteWorker
from relax_core.runners.launch import RECIPE, Launch
from relax_core.runners.local.child_log import ChildLog
from relax_core.runners.local.fork_server import ForkedProcess, ForkServer
from relax_core.tensor_files.mapped_files import PREFIX, claim, sweep_abandoned

KEEPER_S = 5.0
"""Seconds in which the keeper of an untrusted child must end its processes before the parent kills the child's session."""


class Child:
    """One child process and everything that it starts."""

    def __init__(self, process: subprocess.Popen[bytes] | ForkedProcess, scratch: str = "") -> None:
        """`scratch`: the child's folder, deleted once the child has ended."""
        self._process, self.pid, self._scratch = process, process.pid, scratch
        self._ended = asyncio.Event()
        self._told = False
        self._deleting: asyncio.Future[None] | None = None
        self._descriptor = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._reap)

    @classmethod
    def start(cls, command: Sequence[str], env: Mapping[str, str], log: int | None, keep: int, scratch: str) -> Self:
        """Start a command. `log`: descriptor for stdout and stderr. `keep`: descriptor that the child inherits."""
        return cls(
            subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=dict(env),
                pass_fds=(keep,),
                start_new_session=True,
            ),
            scratch,
        )

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def tell(self, data: bytes) -> None:
        """Write to the child's standard input. Ignore a child that has ended: its connection fails later."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(_write, self._process.stdin.fileno(), data)
        self._told = True

    async def wait(self) -> None:
        await self._ended.wait()

    def close_stdin(self) -> None:
        """Close the child's standard input, so that the child ends by itself."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    async def kill(self) -> None:
        """Kill the child with its children, and wait for its end."""
        if self._scratch and self._told:  # then its keeper ends also the children that left the session
            self.close_stdin()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KEEPER_S):
                    await self._ended.wait()
        if not self._ended.is_set():
            self._kill_session()
        await self._ended.wait()
        self.close_stdin()
        if self._deleting is not None:
            await asyncio.wait({self._deleting})  # unlike a plain await, a cancellation does not cancel the deletion

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)  # works before the child has its own session
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Kill all processes that the ended child has started, then reap the child, which frees its process id."""
        self._kill_session()
        self._process.wait()
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        if self._scratch:
            try:
                self._deleting = asyncio.get_running_loop().run_in_executor(None, shutil.rmtree, self._scratch, True)
            except RuntimeError:  # the loop is closing and has no threads
                shutil.rmtree(self._scratch, ignore_errors=True)
        self._ended.set()


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(
    devices: Sequence[str], environment: Mapping[str, str], nodes: Path = Path("/dev")
) -> dict[str, str]:
    """Return the environment variable that limits a process to its devices.

    A process that the plan puts on a CPU sees no GPU. A process without devices sees the GPUs of this process. If the
    plan has more GPUs than the machine, its GPU numbers wrap around, and processes share a GPU without taking turns.
    """
    if not devices:
        return {}
    numbers = [int(name.removeprefix("gpu:")) for name in devices if name.startswith("gpu:")]
    seen = visible_gpus(environment, nodes)
    return {VISIBLE: ",".join(seen[number % len(seen)] if seen else str(number) for number in numbers)}


def visible_gpus(environment: Mapping[str, str], nodes: Path = Path("/dev")) -> list[str]:
    """Return the GPUs that a process with this environment sees, by CUDA's names."""
    if VISIBLE in environment:
        return [name.strip() for name in environment[VISIBLE].split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number in range(len(list(nodes.glob("nvidia[0-9]*"))))]


REAP_S = 2.0
"""Seconds to wait for the exit status of a process after its connection has closed."""


class LocalWorker(RemoteWorker):
    """A handle on one child process: `api.role.Worker`."""

    def __init__(self, spec: WorkerSpec, process: Child, connection: Connection, clock: Clock) -> None:
        super().__init__(spec.name, connection, clock)
        self.pid, self.host = process.pid, "127.0.0.1"
        self._process = process

    async def _died(self, method: str, error: Exception) -> WorkerDied:
        code = None
        if not self._connection.refused:
            await self.wait(REAP_S)
            code = self._process.returncode
        state = f"ended with status {code}" if code is not None else f"stopped answering ({error})"
        return WorkerDied(
            f"worker {self.name} (pid {self.pid}) {state} during {method}; its log is logs/{self.name}.log"
        )

    async def free_port(self, address: str) -> int:
        return free_port(address)

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def wait(self, timeout_s: float) -> None:
        """Wait until the process has ended, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._process.wait()

    async def stop(self, timeout_s: float = 5.0) -> None:
        self._process.close_stdin()
        await self.wait(timeout_s)
        await self.kill()

    async def kill(self) -> None:
        await self._process.kill()
        self._connection.close()
        await self._connection.served()


class LocalWorkers:
    """The child processes of one role: `api.role.Workers`."""

    def __init__(
        self,
        plugin_files: Sequence[str] = (),
        resolved: Sequence[Any] = (),
        log_dir: Path | None = None,
        clock: Clock | None = None,
        protected: Path | None = None,
        redactor: Redactor | None = None,
        run_env: Mapping[str, str] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Start nothing yet.

        `redactor` removes secrets from logs. `protected`: the run directory, of which untrusted children see only a
        recipe's files, and can't change them. `run_env`: variables of all children. `about`: fields of all records in
        the logs.
        """
        self._certificate = {"plugin_files": tuple(plugin_files), "resolved": tuple(resolved)}
        self._log_dir, self._clock = log_dir, clock or SystemClock()
        self._protected, self._run_env, self._about = protected, run_env or {}, dict(about or {})
        self._redactor = redactor or Redactor()
        self._redactor.add(credentials(os.environ))
        self._started: list[LocalWorker] = []
        self._swept = False

    @classmethod
    def of_run(cls, launch: Launch, clock: Clock, role: str) -> Self:
        """Make workers of a role with a run's plugins and variables; they log without secrets and protect its directory."""
        return cls(
            launch.plugin_files, launch.resolved, Path(launch.run_dir) / "logs", clock, protected=launch.whole_run,
            redactor=Redactor(revealed(launch.config)), run_env=launch.run_env, about={"run": launch.run_id, "role": role},
        )  # fmt: skip

    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float = 120.0) -> tuple[LocalWorker, ...]:
        self._started = [worker for worker in self._started if worker.alive]
        starting = [asyncio.create_task(self._start(spec, timeout_s)) for spec in specs]
        try:
            return tuple(await asyncio.gather(*starting))
        except BaseException:
            for task in starting:
                task.cancel()
            results = await asyncio.gather(*starting, return_exceptions=True)
            await asyncio.gather(*(result.kill() for result in results if isinstance(result, LocalWorker)))
            raise

    async def close(self) -> None:
        await asyncio.gather(*(worker.kill() for worker in self._started))
        self._started = []

    def _new_scratch(self) -> str:
        """Make the folder of an untrusted child, claimed by this process. The first call removes abandoned folders.

        A folder is abandoned if the process that claimed it was killed together with its children.
        """
        if not self._swept:
            sweep_abandoned(Path(tempfile.gettempdir()))
            self._swept = True
        scratch = tempfile.mkdtemp(prefix=PREFIX)
        claim(Path(scratch))
        return scratch

    async def _start(self, spec: WorkerSpec, timeout_s: float) -> LocalWorker:
        ours, theirs = socket.socketpair()
        scratch = self._new_scratch() if spec.untrusted else ""
        try:
            with theirs:
                process, log = await self._spawn(spec, theirs.fileno(), scratch)
                if log is not None:
                    log.started(process.pid)
        except BaseException:
            ours.close()
            shutil.rmtree(scratch, ignore_errors=True)
            raise

        def lost(connection: Connection) -> None:
            connection.close()
            if connection.refused:
                process.close_stdin()  # which ends the process, also while no call waits for it

        connection = Connection(spec.name, on_lost=lost)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=ours)
                own = {
                    "name": spec.name, "component": spec.component, "target": spec.target, "memory_mb": spec.memory_mb,
                    "own_interpreter": bool(spec.python), "scratch": scratch,
                    "protected": str(self._protected or ""), "writable": spec.writable, "records": log is not None,
                    "recipe": str(self._protected / RECIPE) if self._protected else "",
                }  # fmt: skip
                body = messages.encode({**own, **self._certificate})
                await process.tell(struct.pack("<I", len(body)) + body)
                await connection.greet()
        except BaseException as error:
            connection.close()
            ours.close()
            await process.kill()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded("runner", f"worker {spec.name} to start", timeout_s) from None
            if isinstance(error, ConnectionError):
                if log is not None:
                    await asyncio.to_thread(log.join, REAP_S)
                raise self._silent(spec) from None
            raise
        worker = LocalWorker(spec, process, connection, self._clock)
        self._started.append(worker)
        return worker

    async def _spawn(self, spec: WorkerSpec, channel: int, scratch: str) -> tuple[Child, ChildLog | None]:
        settled = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        settled |= visible_devices(spec.devices, os.environ)
        inherited = visible_environment(os.environ, spec.inherit_env)
        if scratch:
            own = {"TMPDIR": scratch, "HOME": scratch, "PYTHONUSERBASE": site.getuserbase()}
            settled |= {name: value for name, value in own.items() if name not in inherited}
        env = {**inherited, **settled, **spec.env, **self._run_env}
        log = None
        if self._log_dir is not None:
            log = ChildLog(self._log_dir / f"{spec.name}.log", self._redactor, self._about)
        output = log.writes if log is not None else None
        try:
            if spec.preload and not spec.python and (spec.untrusted or not visible_gpus(env)):
                shared = {name: value for name, value in env.items() if not scratch or value != scratch}
                forked = await ForkServer.of(shared).fork_worker(spec.preload, env, output, channel)
                if forked is not None:
                    return Child(forked, scratch), log
            process = Child.start(
                [spec.python or sys.executable, "-m", "relax_core.runners.local.child", str(channel)],
                env, output, channel, scratch,
            )  # fmt: skip
            return process, log
        except OSError as error:
            raise InfrastructureError(
                f"worker {spec.name}: could not start {spec.python or sys.executable}: {error}"
            ) from error
        finally:
            if log is not None:
                os.close(log.writes)

    def _silent(self, spec: WorkerSpec) -> InfrastructureError:
        where = (
            f"; the end of logs/{spec.name}.log: {_tail(self._log_dir / f'{spec.name}.log')}" if self._log_dir else ""
        )
        install = (
            f"; it needs relax-core and the plugin of {spec.component.name}" if spec.python and spec.component else ""
        )
        return InfrastructureError(
            f"worker {spec.name} ended before it was ready under {spec.python or sys.executable}{install}{where}"
        )


def _tail(path: Path, lines: int = 5) -> str:
    try:
        return " | ".join(path.read_text(errors="replace").strip().splitlines()[-lines:])
    except OSError:
        return "(no log)"
