# SPDX-License-Identifier: Apache-2.0
"""A trainer on several rank processes with the interface of one trainer, so that the same tests apply.

Loading torch takes longer than any test. So rank processes are reused by later trainers, and are forked from a fork
server that has loaded torch once. A trainer with more ranks than the machine has GPUs computes on the CPU. All of
these processes end when this process ends and its connections close. Each rank builds the algorithm and transport of
the trainer suite.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from relax_core.api.algorithm import Output
from relax_core.api.batch import Ragged, RowBatch
from relax_core.api.component import Chosen
from relax_core.api.errors import WorkerDied
from relax_core.api.trainer import Chunk, ChunkPlan, Trainer, TrainerSpec, UpdateResult
from relax_core.api.weights import Manifest, Payload, Version
from relax_core.rpc import messages
from relax_core.rpc.host import Failure, describe, free_port, raised
from relax_core.runners.local.fork_server import ForkedProcess, ForkServer

CALL_S, GRACE_S = 120.0, 3.0
"""Seconds to wait for an answer, and for the remaining answers once a rank has failed."""


class RankProcess:
    """The process of one rank, forked from a server or started by this process."""

    def __init__(self, process: subprocess.Popen[bytes] | ForkedProcess) -> None:
        self._process, self.pid = process, process.pid
        self._handle = os.pidfd_open(process.pid)
        weakref.finalize(self, os.close, self._handle)
        self._ended = select.poll()
        self._ended.register(self._handle, select.POLLIN)

    @property
    def alive(self) -> bool:
        return not self._ended.poll(0)

    def kill(self) -> None:
        """Kill the process and return once it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        self._ended.poll()
        self._process.wait()


class TrainerRanks:
    """The rank processes of one trainer; each executes the calls that it is sent."""

    def __init__(self, size: int, preload: Sequence[str] = ()) -> None:
        started = [_start_rank(preload, size) for _ in range(size)]
        self.processes = [process for process, _ in started]
        self._lines = [line for _, line in started]
        atexit.register(self.end)

    def ask(self, method: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """Call a method on every rank; return the answers, or raise the first failure.

        If a rank does not answer, all ranks are killed.
        """
        for line, arguments in zip(self._lines, calls, strict=True):
            line.send_bytes(messages.encode((method, tuple(arguments))))
        answers: dict[Connection, Any] = {}
        while len(answers) < len(self._lines):
            failed = any(isinstance(answer, Failure) for answer in answers.values())
            ready = wait([line for line in self._lines if line not in answers], GRACE_S if failed else CALL_S)
            if not ready:
                self.end()
                break
            answers |= {line: _answer(line) for line in ready if isinstance(line, Connection)}
        failures = [answer for answer in answers.values() if isinstance(answer, Failure)]
        if failures or len(answers) < len(self._lines):
            raise raised(failures[0], "rank") if failures else WorkerDied(f"{method}: a rank did not answer in time")
        return [answers[line] for line in self._lines]

    @property
    def alive(self) -> bool:
        return all(process.alive for process in self.processes)

    def end(self) -> None:
        atexit.unregister(self.end)
        for process in self.processes:
            process.kill()


class RankedTrainer(Trainer[Any]):
    """A trainer that runs a trainer class on several rank processes."""

    idle: dict[int, list[TrainerRanks]] = {}
    """Rank processes without a trainer, by number of ranks; a process holds one trainer at a time."""

    def __init__(self, target: type[Trainer], options: Mapping[str, Any], size: int) -> None:
        super().__init__(target.options_model()(**options))
        self._target, self._plain, self._size = target, target(self.options), size
        self._groups = groups_of(self._plain, size)
        self._given = dict(options)

    def start(self, spec: TrainerSpec) -> Mapping[str, Any]:
        waiting = self.idle.setdefault(self._size, [])
        self._ranks = waiting.pop() if waiting else TrainerRanks(self._size, self._target.preload)
        name = f"{self._target.__module__}:{self._target.__qualname__}"
        self._ranks.ask("make", [(name, self._given)] * self._size)
        ranks = [replace(spec, rank=r, world_size=self._size, rendezvous=f"127.0.0.1:{port}")
                 for port in [free_port("127.0.0.1")] for r in range(self._size)]  # fmt: skip
        try:
            facts: Mapping[str, Any] = self._each("start", [(rank,) for rank in ranks])[0]
        except BaseException:  # the ranks may be in different states: some have joined, some have not
            self._ranks.end()
            raise
        return facts

    def _each(self, method: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        return self._ranks.ask("call", [(method, *arguments) for arguments in calls])

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        return self._each(method, [arguments] * self._size)

    def plan(self, lengths: Sequence[int], world_size: int, tokens_per_micro_batch: int = 0) -> ChunkPlan:
        return self._plain.plan(lengths, world_size, tokens_per_micro_batch)

    def begin_step(self, version: Version) -> None:
        self._all("begin_step", version)

    def begin_update(self, denominators: Mapping[str, float]) -> None:
        self._all("begin_update", dict(denominators))

    def accumulate(self, chunk: Chunk, last: bool) -> None:
        self._all("accumulate", spread(chunk, self._groups), last)

    def finish_update(self, denominators: Mapping[str, float]) -> UpdateResult:
        first, *others = self._all("finish_update", dict(denominators))
        if differing := [other for other in others if repr(other) != repr(first)]:
            raise AssertionError(
                f"finish_update() returned different results on different ranks: {first} and {differing[0]}"
            )
        return first  # type: ignore[no-any-return]

    def abort_update(self) -> None:
        self._all("abort_update")

    def forward(self, chunk: Chunk, columns: Sequence[str]) -> RowBatch:
        parts: list[RowBatch] = self._all("forward", spread(chunk, self._groups), tuple(columns))
        place = {row: (part, index) for part in parts for index, row in enumerate(part.ids)}
        rows = [place[row] for row in chunk.rows.ids]
        names = [name for key in columns for name in Output.parse(key).gives]
        filled = {name: Ragged.of([list(part.columns[name].rows())[index] for part, index in rows]) for name in names}
        return RowBatch(chunk.rows.ids, filled)

    def publish(
        self, version: Version, transport: Chosen, location: str, payload: Payload = "full", base: str = ""
    ) -> Manifest:
        return self._all("publish", version, transport, location, payload, base)[0]  # type: ignore[no-any-return]

    def save(self, directory: str) -> None:
        self._all("save", directory)

    def load(self, directory: str) -> None:
        self._all("load", directory)

    def export(self, directory: str) -> None:
        self._all("export", directory)

    def stop(self) -> None:
        if self._ranks.alive:
            self._all("stop")
            self.idle[self._size].append(self._ranks)


def groups_of(trainer: Trainer, size: int) -> list[int]:
    """Return the group of each rank. The ranks of one group compute the same rows, according to the trainer's plan."""
    numbers: dict[object, int] = {}
    plan = trainer.plan([1] * size, size)
    return [numbers.setdefault(tuple(map(tuple, batches)), len(numbers)) for batches in plan.micro_batches]


def spread(chunk: Chunk, groups: Sequence[int]) -> Chunk:
    """Distribute a plan for one rank over several ranks; some ranks get fewer rows or no rows.

    `groups`: the group of each rank; the ranks of one group get the same rows.
    """
    batches, count = chunk.plan.micro_batches[0], len(set(groups))
    dealt = (tuple(batch[(own + at) % count :: count] for at, batch in enumerate(batches)) for own in groups)
    return replace(chunk, plan=ChunkPlan(tuple(dealt)))


def _start_rank(preload: Sequence[str], size: int) -> tuple[RankProcess, Connection]:
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    if len(list(Path("/dev").glob("nvidia[0-9]*"))) < size:  # ranks cannot share a GPU
        environ["CUDA_VISIBLE_DEVICES"] = ""
    with theirs:
        cuda = Path("/dev/nvidiactl").exists()  # CUDA does not survive a fork
        process = None if cuda else _fork(preload, environ, theirs.fileno())
        started = process or subprocess.Popen(
            [sys.executable, "-m", "relax_core.testing.trainer_ranks", str(theirs.fileno())],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environ,
        )  # fmt: skip
    return RankProcess(started), Connection(ours.detach())


def _fork(preload: Sequence[str], environ: Mapping[str, str], channel: int) -> ForkedProcess | None:
    """Fork a rank from the fork server of all ranks; return None if the server cannot fork."""
    server = ForkServer.of(environ, "ranks")
    given = [os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_WRONLY), os.dup(2), os.dup(channel)]
    pid = server.fork("relax_core.testing.trainer_ranks:serve_rank", preload, environ, given).result()
    return ForkedProcess(server, pid) if pid else None


def _answer(line: Connection) -> Any:
    try:
        return messages.decode(line.recv_bytes())
    except (EOFError, ConnectionError):
        return Failure("WorkerDied", "a rank's process ended")


def serve_rank(channel: int) -> None:
    """Make trainers and call them in this rank until the parent closes the connection."""
    line = Connection(channel)
    from relax_core.testing.trainer_fixture import InMemory, Reinforce

    made: Any = None
    while True:
        try:
            method, (what, *arguments) = messages.decode(line.recv_bytes())
        except (EOFError, ConnectionError):
            return
        try:
            answer = None
            if method == "make":
                module, _, qualname = what.partition(":")
                target = getattr(importlib.import_module(module), qualname)
                made = target(target.options_model()(**arguments[0]))
                transport = InMemory()
                made.build = lambda chosen, transport=transport: (
                    Reinforce(chosen.options) if chosen.kind == "algorithm" else transport
                )
            else:
                while isinstance(answer := getattr(made, what)(*arguments), Trainer):
                    made = answer
        except Exception as error:
            answer = describe(error)
        line.send_bytes(messages.encode(answer))


if __name__ == "__main__":
    serve_rank(int(sys.argv[1]))
