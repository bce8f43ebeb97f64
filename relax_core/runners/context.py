# SPDX-License-Identifier: Apache-2.0
"""`RoleContext`, built from a launch and the services of the run, and `run_role`, which runs a role to its end.

Roles run the same way in a task of the local runner and in a Ray replica: they send the same heartbeats, obey the same
commands and are restarted after the same errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, overload

from relax_core.api.bus import Bus
from relax_core.api.component import Chosen, Configurable, ContractT
from relax_core.api.errors import DeadlineExceeded, InfrastructureError, LastingFailure, PluginError, RelaxError
from relax_core.api.events import RoleFailed, RoleRecovered
from relax_core.api.role import (
    Clock,
    DeviceLeases,
    Heartbeat,
    Role,
    RoleState,
    RunStatus,
    Wait,
    WeightService,
    Workers,
)
from relax_core.api.run_commands import Command, Continue, Evaluate, Pause, Profile, SaveCheckpoint, ScaleRequest, Stop
from relax_core.config.compose import parse_config
from relax_core.devices.client import DeviceLeaseClient
from relax_core.devices.scheduler import DeviceService, owner_of
from relax_core.observe.console import open_waits
from relax_core.observe.process_log import bound
from relax_core.observe.spans import SpanRecorder
from relax_core.registry.catalogue import Catalogue
from relax_core.rewards.host import announce
from relax_core.rpc.waiting import RestartBudget, attended
from relax_core.runners.launch import Launch

AGAIN_S = 0.5
"""Longest gap in seconds after which a repeated wait counts as the same wait, if `doing` was not called in it."""
HEARTBEAT_S = 0.5
MAX_RESTARTS = 3
"""Restarts of one role before the run stops at its last checkpoint."""
PERSON = "a person"
"""The `blocked_by` of a pause."""
REFILL_S = 600.0
"""Seconds after which a restart no longer counts."""
SELDOM = (50_000, 20, 20)
"""Arguments of gc.set_threshold while roles work, so that garbage is collected rarely."""
freezes = True
"""False in a process that calls gc.freeze itself, as the test suite does: gc.unfreeze would undo its call, too."""
_thresholds: list[tuple[int, int, int]] = []
"""For each role at work in this process: the garbage collection thresholds from before its start."""
_worked = threading.Event()
"""Set once a role has worked in this process."""


class RoleContext:
    """The implementation of `api.role.Context`: the services of the run for one role, and the role's heartbeats."""

    def __init__(
        self, role: str, launch: Launch, catalogue: Catalogue, bus: Bus, weights: WeightService, run_status: RunStatus,
        workers: Workers, children: Workers, clock: Clock, registration: int, devices: DeviceService | None = None,
    ) -> None:  # fmt: skip
        self.role, self.plan, self.run_id, self.run_dir = role, launch.plan, launch.run_id, launch.run_dir
        self._run_epoch, self.epoch = launch.epoch, launch.epoch_number
        announce(launch.functions, catalogue)
        self.functions = launch.functions
        self.plugins: Sequence[tuple[str, ...]] = launch.resolved
        self.config = parse_config(launch.config, catalogue)
        self.bus, self.weights, self.run_status = bus, weights, run_status
        self.workers, self.children, self.clock = workers, children, clock
        self.random = Random(f"{self.config.seed}/{role}/{registration}")
        self.registration, self.restarted, self.resume = registration, False, launch.resume
        self.lost_at: float | None = None
        self._catalogue = catalogue
        self._waits: dict[int, Wait] = {}
        self._waited: dict[tuple[str, str], tuple[float, float]] = {}
        """(start, end) of each wait that ended since the last call of `doing`, by (reason, blocked_by)."""
        self._doing, self._facts = "starting", dict[str, Any]()
        self._state: RoleState = "starting"
        self._activity = SpanRecorder(role, clock)
        self._activity.rest("starting", "overhead")
        self._tracks: dict[str, SpanRecorder] = {}
        self._scale_requests: list[ScaleRequest] = []
        self.profiles_left = 0
        self._going = asyncio.Event()
        self._going.set()
        self._stopping = self._checkpoint_requested = self._evaluation_requested = self._pause_requested = False
        owner = owner_of(role, registration)
        self._leases = DeviceLeaseClient(
            devices or DeviceService(clock), owner, self.plan.shared, partial(self.waiting, holds=True)
        )
        self.devices: DeviceLeases = self._leases

    @overload
    def build(self, chosen: Chosen) -> Configurable: ...

    @overload
    def build(self, chosen: Chosen, contract: type[ContractT]) -> ContractT: ...

    def build(self, chosen: Chosen, contract: type[Any] = Configurable) -> Any:
        return self._catalogue.build(chosen, contract)

    def part(self, hook: str, **facts: object) -> object:
        return self._catalogue.part(hook, **facts)

    @contextmanager
    def waiting(self, reason: str, blocked_by: str, deadline_s: float, holds: bool = False) -> Iterator[Wait]:
        now = self.clock.now()
        since, ended = self._waited.get((reason, blocked_by), (now, now))
        again = since < now <= ended + AGAIN_S
        wait = Wait(self.role, reason, blocked_by, since if again else now, now + deadline_s, again)
        self._waits[id(wait)] = wait
        try:
            with self._activity.span("wait", reason, blocked_by, holds):
                yield wait
        finally:
            del self._waits[id(wait)]
            self._waited[reason, blocked_by] = (wait.since, self.clock.now())

    def working(self, what: str) -> AbstractContextManager[None]:
        return self._activity.section(what)

    def track(self, name: str, devices: tuple[str, ...] = ()) -> SpanRecorder:
        return self._tracks.setdefault(name, SpanRecorder(name, self.clock, devices))

    def changing_files(self) -> AbstractContextManager[None]:
        return nullcontext() if self._run_epoch is None else self._run_epoch.hold()

    def check(self, wait: Wait, fix: str = "") -> None:
        now = self.clock.now()
        if now > wait.deadline:
            raise DeadlineExceeded(wait.role, f"{wait.reason} (blocked by {wait.blocked_by})", now - wait.since, fix)

    def doing(self, what: str, **facts: Any) -> None:
        self._state, self._doing = "busy", what
        self._activity.rest(what)
        self._waited.clear()
        self._facts.update(facts)

    async def pause_point(self) -> None:
        if self._pause_requested:
            try:
                await self.pause("a user, who paused the run", self.config.guards.pause_timeout_s)
            except DeadlineExceeded as error:  # a restart would continue the run without a person
                fix = f"the run ends after guards.pause_timeout_s; continue it with `relax resume {self.run_dir}`"
                raise LastingFailure(f"{error}; {fix}") from error

    async def pause(self, reason: str, deadline_s: float) -> bool:
        self._going.clear()
        self._pause_requested = False
        try:
            with self.waiting(reason, PERSON, deadline_s) as wait:
                while not (self._going.is_set() or self._stopping):
                    self.check(wait)
                    await self.clock.sleep(HEARTBEAT_S)
        finally:
            self._going.set()
        return not self._stopping

    @property
    def stopping(self) -> bool:
        return self._stopping

    def take_checkpoint_request(self) -> bool:
        requested, self._checkpoint_requested = self._checkpoint_requested, False
        return requested

    def take_evaluation_request(self) -> bool:
        requested, self._evaluation_requested = self._evaluation_requested, False
        return requested

    def take_scale_requests(self) -> tuple[ScaleRequest, ...]:
        requests = tuple(self._scale_requests)
        self._scale_requests.clear()
        return requests

    # -- for the role's runner ----------------------------------------------------------------------------------

    def heartbeat(self) -> Heartbeat:
        """Make a heartbeat with the role's present state and the spans since the last heartbeat."""
        facts = {name: fact() if callable(fact) else fact for name, fact in self._facts.items()}
        tracks = (self._activity, *self._tracks.values())
        state: RoleState = "waiting" if self._waits and not self._activity.working else self._state
        if not self._going.is_set():
            state = "paused"
        waits = [what for what, _ in open_waits(self.role)] if state == "starting" else []
        return Heartbeat(
            self.role, state, "; ".join(waits) or self._doing, tuple(self._waits.values()), facts,
            registration=self.registration, pid=os.getpid(), sent=self.clock.now(),
            spans=tuple(span for track in tracks for span in track.take()),
        )  # fmt: skip

    async def close(self) -> None:
        """Kill the role's workers and end its device leases."""
        await asyncio.gather(self.workers.close(), self.children.close())
        await self._leases.close()

    def take(self, command: Command) -> None:
        """Obey a command of a user or the controller."""
        match command:
            case Stop():
                self._stopping = True
                self._going.set()
            case Pause():
                self._pause_requested = True
            case Continue():
                self._pause_requested = False
                self._going.set()
            case SaveCheckpoint():
                self._checkpoint_requested = True
            case Evaluate():
                self._evaluation_requested = True
            case Profile(steps):
                self.profiles_left = steps
            case ScaleRequest():
                self._scale_requests.append(command)


async def run_role(role: Role, make_context: Callable[[int], RoleContext], without_s: float | None = None) -> None:
    """Run a role until it returns. Restart a stateless role with fresh workers after an infrastructure failure.

    All remaining errors are raised, and so is LastingFailure. A failed restart counts against the same restart budget.
    `without_s`: seconds since the role's last process died; None for its first process.
    """
    lost_at: float | None = None
    budget = RestartBudget(MAX_RESTARTS, REFILL_S)
    while True:
        context = make_context(0)
        if not budget.spent and without_s is not None:
            lost_at = context.clock.now() - without_s
        try:
            context = make_context(await context.bus.register(role.name))
            context.restarted, context.lost_at = without_s is not None, lost_at
            with bound(role=role.name), collected_seldom():
                await _run_attended(role, context)
            return
        except Exception as error:
            recovers = (
                role.stateless and isinstance(error, InfrastructureError) and not isinstance(error, LastingFailure)
            )
            fatal = not (recovers and budget.spend(context.clock.now()))
            code = error.exit_code if isinstance(error, RelaxError) else 1
            frames = error.frames if isinstance(error, PluginError) else ""
            if not isinstance(error, RelaxError):
                frames = "".join(traceback.format_exception(error))
            with contextlib.suppress(RelaxError):
                await context.run_status.heartbeat(_last_heartbeat(context, "failed", str(error)))
                failed = RoleFailed(role.name, f"{error}" or type(error).__name__, code, fatal, frames)
                await context.run_status.emit(failed)
            if fatal:
                raise
            lost_at = context.clock.now()


async def _run_attended(role: Role, context: RoleContext) -> None:
    """Run the role while sending its heartbeats and taking its commands. An error in any of the three ends the role."""
    try:
        async with attended(_send_heartbeats(context), _take_commands(context)):
            await role.run(context)
            await _tell_recovery(context)
            await context.run_status.heartbeat(_last_heartbeat(context, "stopped"))
    finally:
        await context.close()


async def _send_heartbeats(context: RoleContext) -> None:
    """Send heartbeats for ever. After a restart, report the recovery once the role has left the state `starting`."""
    while True:
        heartbeat = context.heartbeat()
        await context.run_status.heartbeat(heartbeat)
        if heartbeat.state != "starting":
            await _tell_recovery(context)
        await context.clock.sleep(HEARTBEAT_S)


async def _tell_recovery(context: RoleContext) -> None:
    """Emit `RoleRecovered` once after a restart."""
    lost_at, context.lost_at = context.lost_at, None
    if lost_at is not None:
        await context.run_status.emit(RoleRecovered(context.role, context.clock.now() - lost_at, "restarted"))


async def _take_commands(context: RoleContext) -> None:
    last = 0
    while True:
        for number, command in await context.run_status.commands(context.role, last, 5.0):
            last = number
            context.take(command)


def _last_heartbeat(context: RoleContext, state: RoleState, doing: str = "") -> Heartbeat:
    """Make the last heartbeat of a role, with its remaining spans and without waits and facts."""
    return replace(context.heartbeat(), state=state, doing=doing, waits=(), facts={})


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Collect garbage rarely while a role of this process works, and only objects made since the first role began.

    A step makes tens of thousands of objects but hardly any reference cycles. With the default thresholds, garbage
    collection took half of a step's time outside of compute. The previous state is restored at the end, for example for
    a notebook. Garbage of an earlier run in this process is collected before the freeze, since it may include large
    models and open files.
    """
    if freezes and _worked.is_set() and not _thresholds:
        gc.collect()
    _worked.set()
    _thresholds.append(gc.get_threshold())
    if freezes:
        gc.freeze()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        if len(_thresholds) > 1:
            _thresholds.pop()  # keep the first entry, which has the process's own thresholds
        else:
            gc.set_threshold(*_thresholds.pop())
            if freezes:
                gc.unfreeze()
