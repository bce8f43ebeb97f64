# SPDX-License-Identifier: Apache-2.0
"""The pool of environments: an instance a sample, in this process where the class says it can't block or crash,
else in killable worker processes, many instances each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from relax_core.api.clock import Clock
from relax_core.api.environment import Environment, Tool
from relax_core.api.trainer import Chosen
from relax_core.api.worker import Workers
from relax_core.engines.model_rpc_server import ModelRpcServer
from relax_core.sampling.environment_handle import EnvironmentHandle, InProcess
from relax_core.sampling.environment_process import EnvironmentProcess, RemoteEnvironment
from relax_core.sampling.single_turn import SingleTurn


class EnvironmentPool:
    """Environments of one run."""

    def __init__(
        self,
        chosen: Chosen,
        children: Workers,
        clock: Clock,
        num_workers: int = 1,
        timeout_s: float = 60.0,
        *,
        isolate: bool = False,
        build: Callable[[Chosen], Any] | None = None,
        desk: ModelRpcServer | None = None,
    ) -> None:
        self._desk = desk or ModelRpcServer({})
        self._chosen, self._children, self._clock = chosen, children, clock
        self._timeout_s, self._isolate = timeout_s, isolate
        self._prototype: Environment = (build or _from_catalogue)(chosen)
        self._shared: object = None
        self._seats = [] if isolate or self.in_process else [self._seat(number) for number in range(num_workers)]
        self._alone = 0

    @property
    def in_process(self) -> bool:
        return self._prototype.in_process

    @property
    def answers_once(self) -> bool:
        """Whether a sample is one turn of the policy and nothing else: it needs no instance. A subclass may do more."""
        return type(self._prototype) is SingleTurn

    @property
    def tools(self) -> tuple[Tool, ...]:
        """To render prompts with."""
        return tuple(self._prototype.tools)

    async def start(self) -> None:
        """The shared set-up of every process; an error of the author's `open` comes out here."""
        if self.in_process:
            self._shared = await type(self._prototype).open(self._prototype.options)
        await asyncio.gather(*(seat.ready() for seat in self._seats))

    async def stop(self) -> None:
        await asyncio.gather(*(seat.end() for seat in self._seats))

    @asynccontextmanager
    async def instance(self) -> AsyncIterator[EnvironmentHandle]:
        """An environment for one sample; closed at the end, whatever happened."""
        if self.in_process:
            timeout_s = 0.0 if getattr(self._prototype, "never_waits", False) else self._timeout_s
            handle: EnvironmentHandle = InProcess(self._made(), timeout_s)
            try:
                yield handle
            finally:
                await handle.close()
            return
        async with self._seated() as handle:
            yield handle

    @asynccontextmanager
    async def _seated(self) -> AsyncIterator[EnvironmentHandle]:
        seat = self._seat_alone() if self._isolate else min(self._seats, key=lambda seat: seat.samples)
        seat.samples += 1
        try:
            prototype = self._prototype
            handle = RemoteEnvironment(
                seat, await seat.ready(), self.tools, prototype.drives(), prototype.format_observation, self._timeout_s
            )
            try:
                yield handle
            finally:
                await handle.close()
        finally:
            seat.samples -= 1
            if self._isolate:
                self._seats.remove(seat)
                await seat.end()

    def _made(self) -> Environment:
        instance = type(self._prototype)(self._prototype.options)
        instance.shared = self._shared
        instance.engines = {name: self._desk.hands[name] for name in instance.needs_engines}
        return instance

    def _seat_alone(self) -> EnvironmentProcess:
        self._alone += 1
        seat = self._seat(self._alone)
        self._seats.append(seat)
        return seat

    def _seat(self, number: int) -> EnvironmentProcess:
        return EnvironmentProcess(f"environment-{self._chosen.name}-{number}", self._chosen, self._children, self._desk)


def _from_catalogue(chosen: Chosen) -> Any:
    from relax_core.registry.catalogue import Catalogue

    return Catalogue.load().build(chosen)
