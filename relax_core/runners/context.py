# SPDX-License-Identifier: Apache-2.0
"""The context of one role: `api.role.Context`, built from a launch and the services of the run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from relax_core.api.bus import Bus
from relax_core.api.clock import Clock
from relax_core.api.errors import DeadlineExceeded
from relax_core.api.role import WeightService
from relax_core.api.status import Beat, Board, RoleState, Wait
from relax_core.api.trainer import Chosen
from relax_core.api.turn import Turns
from relax_core.api.worker import Worker, Workers, WorkerSpec
from relax_core.observe.activity import Activity
from relax_core.options.run_config import RunConfig
from relax_core.plugins.catalogue import Catalogue
from relax_core.rollout.passed_function import announce
from relax_core.runners.launch import Launch
from relax_core.runners.turns import TurnBoard, TurnService, owner_of
from relax_core.runners.turns_client import TurnClient

AGAIN_S = 0.5
"""A wait that is said again within this goes on, unless something was done between."""


class Furnished:
    """Workers that get the run's own environment variables."""

    def __init__(self, workers: Workers, env: Mapping[str, str]) -> None:
        self._workers, self._env = workers, env

    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float = 120.0) -> tuple[Worker, ...]:
        return await self._workers.start([replace(spec, run_env=self._env) for spec in specs], timeout_s)


class RoleContext:
    """What a role may touch, and what it says of itself."""

    def __init__(
        self, role: str, launch: Launch, catalogue: Catalogue, bus: Bus, weights: WeightService, board: Board,
        workers: Workers, children: Workers, clock: Clock, incarnation: int, turns: TurnService | None = None,
    ) -> None:  # fmt: skip
        self.role, self.plan, self.run_id, self.run_dir = role, launch.plan, launch.run_id, launch.run_dir
        announce(launch.functions, catalogue)
        self.functions = launch.functions
        self.run = RunConfig.parse(launch.config, catalogue)
        self.bus, self.weights, self.board = bus, weights, board
        env = self.run.run.revealed_env()
        self.workers: Workers = Furnished(workers, env)
        self.children: Workers = Furnished(children, env)
        self.clock = clock
        self.random = Random(f"{self.run.seed}/{role}/{incarnation}")
        self.incarnation, self.resume = incarnation, launch.resume
        self._catalogue = catalogue
        self._waits: dict[int, Wait] = {}
        self._waited: dict[tuple[str, str], tuple[float, float]] = {}
        """(since, end) of waits that ended with nothing done since: asked again at once, they go on."""
        self._doing, self._facts = "starting", dict[str, Any]()
        self._state: RoleState = "starting"
        self._activity = Activity(role, clock)
        self._activity.rest("starting", "overhead")
        self._lanes: dict[str, Activity] = {}
        self._going = asyncio.Event()
        self._going.set()
        self._stopping = False
        owner = owner_of(role, incarnation)
        self._client = TurnClient(turns or TurnBoard(clock), owner, self.plan.shared, partial(self.waiting, holds=True))
        self.turns: Turns = self._client

    def build(self, chosen: Chosen) -> Any:
        return self._catalogue.build(chosen)

    @contextmanager
    def waiting(self, reason: str, owed_by: str, deadline_s: float, holds: bool = False) -> Iterator[Wait]:
        now = self.clock.now()
        since, ended = self._waited.get((reason, owed_by), (now, now))
        again = since < now <= ended + AGAIN_S
        wait = Wait(self.role, reason, owed_by, since if again else now, now + deadline_s, again)
        self._waits[id(wait)] = wait
        try:
            with self._activity.span("wait", reason, owed_by, holds):
                yield wait
        finally:
            del self._waits[id(wait)]
            self._waited[reason, owed_by] = (wait.since, self.clock.now())

    def working(self, what: str) -> AbstractContextManager[None]:
        return self._activity.section(what)

    def lane(self, name: str, devices: tuple[str, ...] = ()) -> Activity:
        return self._lanes.setdefault(name, Activity(name, self.clock, devices))

    def check(self, wait: Wait, fix: str = "") -> None:
        """Raise when a wait ran out."""
        now = self.clock.now()
        if now > wait.deadline:
            raise DeadlineExceeded(wait.owner, f"{wait.reason} (owed by {wait.owed_by})", now - wait.since, fix)

    def doing(self, what: str, **facts: Any) -> None:
        self._state, self._doing = "busy", what
        self._activity.rest(what)
        self._waited.clear()
        self._facts.update(facts)

    async def pause_point(self) -> None:
        await self._going.wait()

    @property
    def stopping(self) -> bool:
        return self._stopping

    # -- for the role's runner ----------------------------------------------------------------------------------

    def beat(self) -> Beat:
        """What it is at, and the spans that no beat told before."""
        facts = {name: fact() if callable(fact) else fact for name, fact in self._facts.items()}
        lanes = (self._activity, *self._lanes.values())
        return Beat(
            self.role, self._now(), self._doing, tuple(self._waits.values()), facts, incarnation=self.incarnation,
            pid=os.getpid(), sent=self.clock.now(), spans=tuple(span for lane in lanes for span in lane.take()),
        )  # fmt: skip

    def _now(self) -> RoleState:
        if not self._going.is_set():
            return "paused"
        return "waiting" if self._waits and not self._activity.working else self._state

    async def close(self) -> None:
        """The role is over: what lived on shared devices is gone."""
        await self._client.close()

    def take(self, command: str) -> None:
        """A person's or the controller's command."""
        if command == "stop":
            self._stopping = True
            self._going.set()
        elif command == "pause":
            self._going.clear()
        elif command == "continue":
            self._going.set()
