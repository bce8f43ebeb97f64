# SPDX-License-Identifier: Apache-2.0
"""The parent's side of an environment in a process of its own: the process's place in the pool, and one sample's hand.

A call that the process does not answer kills it: that sample timed out, the process's other samples lost their
environment, which is their outcome; the next sample gets a new process.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from typing import Any

from relax_core.api.environment import Action, Tool
from relax_core.api.errors import DeadlineExceeded, RelaxError, WorkerDied
from relax_core.api.task import Task
from relax_core.api.trainer import Chosen
from relax_core.api.trajectory import Outcome
from relax_core.api.worker import Worker, Workers, WorkerSpec
from relax_core.engines.model_rpc_server import ModelRpcServer
from relax_core.sampling.environment_handle import Answer, EnvironmentFailed, Shown, driven, late
from relax_core.sampling.session import Branch, Format

START_S = 120.0
GRACE_S = 2.0
"""On top of an environment's own deadline before its process's silence counts."""


class EnvironmentProcess:
    """One process, replaced when it has died."""

    def __init__(self, name: str, chosen: Chosen, children: Workers, desk: ModelRpcServer) -> None:
        self.name, self._chosen, self._children, self._desk = name, chosen, children, desk
        self.worker: Worker | None = None
        self.samples = self._started = self._numbered = 0
        # Held across the start of a process: samples that come meanwhile want that process, not one each.
        self._starting = asyncio.Lock()

    async def ready(self) -> Worker:
        """Its process, started if there is none. Raises what the author's `open` raises."""
        async with self._starting:
            if self.worker is None:
                name = f"{self.name}.{self._started}" if self._started else self.name
                self._started += 1
                target = "relax_core.sampling.environment_host:EnvironmentHost"
                (worker,) = await self._children.start([WorkerSpec(name, self._chosen, target=target)], START_S)
                try:
                    needs = await worker.call("open", timeout_s=START_S)
                    self._desk.attend(worker, f"environment {self._chosen.name}", needs)
                except BaseException:
                    await worker.kill()
                    raise
                self.worker = worker
            return self.worker

    async def replace(self, worker: Worker) -> None:
        """Kill a process that can't be trusted, unless that has happened."""
        if self.worker is worker:
            self.worker = None
            await worker.kill()

    async def end(self) -> None:
        if self.worker is not None:
            await self.replace(self.worker)

    def number(self) -> int:
        self._numbered += 1
        return self._numbered


class RemoteEnvironment:
    """One sample's hand on an instance in a seat's process."""

    def __init__(
        self,
        seat: EnvironmentProcess,
        worker: Worker,
        tools: tuple[Tool, ...],
        drives: bool,
        form: Format,
        timeout_s: float,
    ) -> None:
        self.tools, self.drives, self.format_observation = tools, drives, form
        self._seat, self._worker, self._timeout_s = seat, worker, timeout_s
        self._number = seat.number()
        self._closed = False

    async def reset(self, task: Task, seed: int) -> Shown:
        messages, state = await self._call("reset", task, seed)
        return messages, state

    async def step(self, action: Action) -> Answer:
        answer: Answer = await self._call("step", action)
        return answer

    async def run(self, task: Task, seed: int, session: Branch) -> None:
        await driven(self._drive(task, seed, session), self._timeout_s, session)

    async def close(self) -> str:
        if self._closed:
            return ""
        self._closed = True
        try:
            await self._call("close")
        except EnvironmentFailed as failure:
            return str(failure)
        return ""

    async def _call(self, method: str, *args: Any) -> Any:
        if self._seat.worker is not self._worker:
            raise EnvironmentFailed(Outcome.ENVIRONMENT_ERROR, f"{method}: the environment's process was replaced")
        try:
            outcome, result = await self._worker.call(
                method, self._number, *args, self._timeout_s, timeout_s=self._timeout_s + GRACE_S
            )
        except (DeadlineExceeded, WorkerDied) as error:
            raise await self._lost(method, error) from error
        except RelaxError as error:  # such as an answer that can't travel
            raise EnvironmentFailed(Outcome.ENVIRONMENT_ERROR, f"{method}: {error}") from error
        if outcome:
            raise EnvironmentFailed(Outcome(outcome), result)
        return result

    async def _lost(self, method: str, error: Exception) -> EnvironmentFailed:
        first = self._seat.worker is self._worker
        await self._seat.replace(self._worker)
        if first and isinstance(error, DeadlineExceeded):
            return EnvironmentFailed(Outcome.ENVIRONMENT_TIMEOUT, late(method, self._timeout_s))
        return EnvironmentFailed(Outcome.ENVIRONMENT_ERROR, f"{method}: the environment's process ended: {error}")

    async def _drive(self, task: Task, seed: int, session: Branch) -> None:
        """Do what the instance asks until it says how it ended."""
        driver = _Driver(self._worker, self._number, session, self._timeout_s)
        stream: Any = self._worker.stream("run", self._number, task, seed, timeout_s=self._timeout_s + GRACE_S)
        try:
            async with aclosing(stream) as items:
                async for requests in items:
                    for request in requests:
                        driver.take(*request)
        except (DeadlineExceeded, WorkerDied) as error:
            raise await self._lost("run", error) from error
        finally:
            await driver.end()
        outcome, message = driver.ending
        if outcome:
            raise EnvironmentFailed(Outcome(outcome), message)


class _Driver:
    """Branches by their numbers, and the turns under way."""

    def __init__(self, worker: Worker, number: int, session: Branch, timeout_s: float) -> None:
        self._worker, self._number, self._timeout_s = worker, number, timeout_s
        self._branches = {0: session}
        self._turns: set[asyncio.Task[None]] = set()
        self.ending = ("", "")

    def take(self, what: str, *rest: Any) -> None:
        if what == "end":
            self.ending = (rest[0], rest[1])
            return
        branch = self._branches[rest[0]]
        if what == "generate":
            turn = asyncio.create_task(self._turn(branch, *rest[1:]))
            self._turns.add(turn)
            turn.add_done_callback(self._turns.discard)
        elif what == "observe":
            branch.append(rest[1], rest[2])
        elif what == "fork":
            self._branches[rest[1]] = branch.fork()
        elif what == "restart":
            self._branches[rest[1]] = branch.restart(rest[2])
        elif what == "reward":
            branch.reward(rest[1])

    async def end(self) -> None:
        for turn in self._turns:
            turn.cancel()
        await asyncio.gather(*self._turns, return_exceptions=True)

    async def _turn(self, branch: Branch, request: int, max_new_tokens: int | None, stop: tuple[str, ...]) -> None:
        try:
            action = await branch.generate(max_new_tokens, tuple(stop))
        except Exception:  # ended, or broken: the sample knows, the instance only has to stop waiting
            action = None
        with suppress(DeadlineExceeded, WorkerDied):  # the stream of requests tells
            await self._worker.call("answer", self._number, request, action, timeout_s=self._timeout_s + GRACE_S)
