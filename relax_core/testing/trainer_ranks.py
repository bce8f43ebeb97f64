# SPDX-License-Identifier: Apache-2.0
"""A trainer's ranks as processes, driven like one trainer: what holds for one rank can be asked of several.

The processes outlive the trainers in them, because loading torch takes longer than any test. They end with this process,
whose connection they read. Algorithm and transport are those of the trainers' suite, built in each rank.
"""

from __future__ import annotations

import atexit
import importlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from relax_core.api.algorithm import Output
from relax_core.api.batch import Ragged, RowBatch
from relax_core.api.component import Chosen
from relax_core.api.errors import WorkerDied
from relax_core.api.trainer import Chunk, ChunkPlan, Trainer, TrainerSpec, UpdateResult
from relax_core.api.weights import Manifest, Payload, Version
from relax_core.rpc import messages
from relax_core.rpc.host import Failure, describe, free_port, raised

CALL_S, GRACE_S = 120.0, 3.0
"""For an answer; and for the others', once one rank has failed."""


class TrainerRanks:
    """Processes that wait for calls."""

    def __init__(self, size: int) -> None:
        started = [_spawn() for _ in range(size)]
        self.processes = [process for process, _ in started]
        self._lines = [line for _, line in started]
        atexit.register(self.end)

    def ask(self, method: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """One call of every rank; the first failure is raised, and ends all of them where one does not answer."""
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
            raise raised(failures[0], "rank") if failures else WorkerDied(f"{method}: no rank answered")
        return [answers[line] for line in self._lines]

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def end(self) -> None:
        atexit.unregister(self.end)
        for process in self.processes:
            process.kill()
            process.wait()


class RankedTrainer(Trainer[Any]):
    """A trainer class on several ranks, as one."""

    idle: dict[int, list[TrainerRanks]] = {}
    """Of this process, by size: a process holds one trainer at a time."""

    def __init__(self, target: type[Trainer], options: Mapping[str, Any], size: int, tensor_parallel: int = 1) -> None:
        """`tensor_parallel`: so many ranks that follow each other compute the same rows."""
        super().__init__(target.options_model()(**options))
        self._tensor_parallel = tensor_parallel
        self._target, self._plain, self._size = target, target(self.options), size
        self._given = dict(options)

    def start(self, spec: TrainerSpec) -> Mapping[str, Any]:
        waiting = self.idle.setdefault(self._size, [])
        self._ranks = waiting.pop() if waiting else TrainerRanks(self._size)
        name = f"{self._target.__module__}:{self._target.__qualname__}"
        self._ranks.ask("make", [(name, self._given)] * self._size)
        ranks = [replace(spec, rank=r, world_size=self._size, rendezvous=f"127.0.0.1:{port}")
                 for port in [free_port("127.0.0.1")] for r in range(self._size)]  # fmt: skip
        try:
            facts: Mapping[str, Any] = self._each("start", [(rank,) for rank in ranks])[0]
        except BaseException:  # it may have been refused before the ranks met, or after
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
        self._all("accumulate", spread(chunk, self._size, self._tensor_parallel), last)

    def finish_update(self, denominators: Mapping[str, float]) -> UpdateResult:
        first, *others = self._all("finish_update", dict(denominators))
        if differing := [other for other in others if repr(other) != repr(first)]:
            raise AssertionError(f"ranks tell of different updates: {first} and {differing[0]}")
        return first  # type: ignore[no-any-return]

    def abort_update(self) -> None:
        self._all("abort_update")

    def forward(self, chunk: Chunk, columns: Sequence[str]) -> RowBatch:
        parts: list[RowBatch] = self._all("forward", spread(chunk, self._size, self._tensor_parallel), tuple(columns))
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


def spread(chunk: Chunk, size: int, tensor_parallel: int = 1) -> Chunk:
    """Deal out the micro-batches of a plan for one rank: some ranks get fewer rows, or none; ranks of a group the same."""
    batches, groups = chunk.plan.micro_batches[0], size // tensor_parallel
    ranks = [rank // tensor_parallel for rank in range(size)]
    dealt = (tuple(batch[(own + at) % groups :: groups] for at, batch in enumerate(batches)) for own in ranks)
    return replace(chunk, plan=ChunkPlan(tuple(dealt)))


def _spawn() -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "relax_core.testing.trainer_ranks", str(theirs.fileno())], pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environ,
    )  # fmt: skip
    theirs.close()
    return process, Connection(ours.detach())


def _answer(line: Connection) -> Any:
    try:
        return messages.decode(line.recv_bytes())
    except (EOFError, ConnectionError):
        return Failure("WorkerDied", "a rank's process ended")


def _serve(line: Connection) -> None:
    """Make trainers and call them in this rank until the connection's other end closes."""
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
                answer = getattr(made, what)(*arguments)
        except Exception as error:
            answer = describe(error)
        line.send_bytes(messages.encode(answer))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
