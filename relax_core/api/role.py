# SPDX-License-Identifier: Apache-2.0
"""Roles, the logic that runs on the graph, and all that a role may touch: leases on devices, worker processes, the
status of the run, the clock, the weight service.

A role gets a `Context` and nothing else: the same code runs as a task of the local runner, in a Ray Serve shell,
and under a virtual clock in tests. Everything here is a contract; `runners` implements it.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar, overload

from relax_core.api.bus import Bus
from relax_core.api.component import Chosen, Configurable, ContractT, OptionsT
from relax_core.api.events import Event, Span, SpanKind
from relax_core.api.plan import OffloadPart, Operation, Plan
from relax_core.api.weights import Manifest, Receipt, Version

if TYPE_CHECKING:
    from random import Random


Phase = Literal["generate", "answer", "forward", "train", "publish"]
"""`answer`: an auxiliary pool's turn on the devices of the policy's engines."""


class Offloadable(Protocol):
    """An engine pool or a rank group, which can give its devices' memory back. Parts that it does not have are ignored."""

    async def offload(self, parts: Sequence[OffloadPart]) -> int:
        """Free parts; return the bytes that were really freed."""

    async def onload(self, parts: Sequence[OffloadPart]) -> None:
        """Undo `offload`."""


class DeviceLease(Protocol):
    """Devices that are held now, with the parts that are onloaded on them meanwhile.

    Nobody waits for rows while holding a lease: generation has the engines' parts onloaded, training the trainers', and a
    publish the weights of both.
    """

    @property
    def freed_bytes(self) -> int:
        """Bytes that other members freed for it; 0 where none had to be offloaded."""

    async def change_phase(self, phase: Phase, holders: Mapping[str, Sequence[OffloadPart]], deadline_s: float) -> None:
        """Go on with these parts onloaded instead, without anybody coming between. Raises DeadlineExceeded."""

    async def wanted(self) -> None:
        """Return when somebody else waits for the devices: come to a safe point and release them. Never where nobody shares."""


class DeviceLeases(Protocol):
    """The leases of a run's devices, as one role sees them."""

    async def join(self, name: str, devices: frozenset[str], member: Offloadable) -> None:
        """Make known that a member lives on these devices; it starts with all of its parts onloaded."""

    async def leave(self, name: str) -> None:
        """Make known that a member is gone from its devices."""

    def acquire(
        self, devices: frozenset[str], phase: Phase, holders: Mapping[str, Sequence[OffloadPart]], deadline_s: float
    ) -> AbstractAsyncContextManager[DeviceLease]:
        """Hold the devices with these holders' parts onloaded and everything else offloaded. Raises DeadlineExceeded."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One process to start."""

    name: str
    """Unique in the run: `engine-0`, `actor-rank-1`."""
    component: Chosen
    """What it hosts; `options` are plain data."""
    python: str = ""
    """Another interpreter; empty: this one."""
    env: Mapping[str, str] = field(default_factory=dict)
    run_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The run's own variables (`[run] env`), secrets read: over `env`, and never in logs."""
    devices: tuple[str, ...] = ()
    """Of the plan's, `gpu:3`, that are its own or its part of; none named: whatever this process sees."""
    num_gpus: float = 0.0
    """Its share of them: those on one device have equal parts."""
    memory_mb: int = 0
    """Address-space limit of a child process; 0: none."""
    inherit_env: tuple[str, ...] | None = None
    """The only variables of the starting process that a child process sees; None: all of them. `*` stands for anything, but
    for no name of a credential."""
    untrusted: bool = False
    """Code of authors: a child process works in a scratch folder of its own and can't write to the run directory."""
    writable: tuple[str, ...] = ()
    """Folders of the run directory that an untrusted child process writes to all the same."""
    preload: tuple[str, ...] = ()
    """Modules that it needs and that take seconds to import: a child process may be forked from one that has them."""
    target: str = ""
    """Instead of a component: `module:Class`, built without arguments (the core's own hosts)."""


class Worker(Protocol):
    """A running process that hosts one component and answers calls of its public methods."""

    name: str
    pid: int
    host: str
    """Address of its machine as other machines reach it; loopback where all workers are on one."""

    async def free_port(self, address: str) -> int:
        """A port of its machine, at this address of it, that was free a moment ago."""

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Await one method. Its plain error comes back as the same built-in type, or PluginError with its frames.

        Raises WorkerDied when the process ended, DeadlineExceeded after `timeout_s` (the call may still run).
        """

    def stream(self, method: str, *args: Any, timeout_s: float) -> AsyncIterator[Any]:
        """Items of an async-iterating method; `timeout_s` bounds the silence between items."""

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Let it end, then kill it with its children."""

    async def kill(self) -> None:
        """SIGKILL it with its children, now."""


class Workers(Protocol):
    """A starter of workers; a role never learns whether a worker is a child process or a Ray actor.

    Workers end with the role that started them: a role that is restarted starts its own.
    """

    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float = 120.0) -> tuple[Worker, ...]:
        """All of them, or none: on a failure what was started is killed and the error raised."""


RoleState = Literal["starting", "busy", "waiting", "paused", "stopped", "failed"]
CommandName = Literal["pause", "continue", "stop", "checkpoint"]


@dataclass(frozen=True, slots=True)
class Wait:
    """Somebody waits: for what, who owes it, since when and until when (monotonic seconds of the hub's clock)."""

    owner: str
    reason: str
    owed_by: str
    since: float
    deadline: float
    polls: bool = False
    """At the deadline it is asked for again; `since` is when that began."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A role's heartbeat, written by its work loop."""

    role: str
    state: RoleState
    doing: str = ""
    waits: tuple[Wait, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    at: float = 0.0
    incarnation: int = 0
    pid: int = 0
    sent: float = 0.0
    """When it was made, by the role's own clock; 0: not told. The run status puts `waits` and `spans` on its own."""
    spans: tuple[Span, ...] = ()
    """Of the role and its devices since the last heartbeat, whole up to `sent`."""


@dataclass(frozen=True, slots=True)
class Command:
    """From a person or the controller to one role."""

    number: int
    name: CommandName
    argument: str = ""


class RunStatus(Protocol):
    """The place where roles report and take commands; one a run."""

    async def heartbeat(self, heartbeat: Heartbeat) -> None: ...

    async def heartbeats(self) -> tuple[Heartbeat, ...]: ...

    async def emit(self, event: Event) -> None:
        """Send an event to the controller, which passes it to the run directory, sinks, observers and display."""

    async def events(self, after: int, wait_s: float) -> tuple[tuple[int, Event], ...]:
        """Numbered events after `after`, all of which the caller has written down; waits up to `wait_s` for one."""

    async def recorded(self, wait_s: float) -> bool:
        """Wait until the controller has written down every event so far, where there is one; False after `wait_s`."""

    async def command(self, role: str, name: CommandName, argument: str = "") -> None: ...

    async def commands(self, role: str, after: int, wait_s: float) -> tuple[Command, ...]:
        """Commands for a role after number `after`."""


class Clock(Protocol):
    """Monotonic seconds and a way to let them pass; property tests and the simulator pass a virtual one in."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's own."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class WeightService(Protocol):
    """Versions of published weights, and who proved to have them."""

    async def announce(self, manifest: Manifest, transport: Chosen) -> None: ...

    async def newest(self, model: str, after: Version | None, wait_s: float) -> tuple[Manifest, Chosen] | None:
        """The newest version later than `after`; None after `wait_s`."""

    async def route(
        self,
        model: str,
        have: Version | None,
        wait_s: float,
        after: Version | None = None,
        receiver: str = "",
        within_s: float = 300.0,
    ) -> tuple[tuple[Manifest, Chosen], ...]:
        """Return the manifests that a receiver that has `have` must load, in order, to be at the newest version: one
        full version, or deltas on top of what it has, or a full one and deltas. Return nothing where no version newer
        than `after` (or `have`) that it can load came within `wait_s`. Versions given to a receiver are kept for it
        until it proves the last of them, or for `within_s`."""

    async def needed(self, model: str) -> frozenset[Version]:
        """Versions that are on a route, or that a receiver was given and may still be reading."""

    async def handed_out(self, version: Version) -> None:
        """Note that the transfer of a live version is over. A receiver that comes later calls `want`, and the version is
        announced and transferred again."""

    async def want(self, receiver: str, model: str) -> None:
        """Ask for the newest version to be transferred again: no route leads to it from what the receiver has."""

    async def wanted(self, model: str) -> tuple[str, ...]:
        """Return the receivers that called `want` since the last announcement; the publisher serves them between steps."""

    async def receipt(self, receipt: Receipt) -> bool:
        """A receiver's proof; False where its version was abandoned meanwhile, so that it proves nothing. Raises
        InfrastructureError where its fingerprint is not the manifest's."""

    async def receivers(self, model: str) -> Mapping[str, Version]:
        """Return the version that each receiver last proved."""

    async def forget(self, receiver: str, model: str) -> None:
        """Forget a receiver that died or is not to be trusted: its proof no longer counts."""


@dataclass(frozen=True, slots=True)
class Resume:
    """A point to continue a run from: a complete checkpoint."""

    step: int
    directory: str
    state: Mapping[str, Any]
    """`state.json` of the checkpoint: sampler and random state."""


class SpanTrack(Protocol):
    """The record of one worker's activity, moment by moment; writing to it costs no call."""

    def span(self, kind: SpanKind, name: str, owed_by: str = "") -> AbstractContextManager[None]:
        """From entry to exit; where several overlap, work goes before overhead, and that before a wait."""

    def say(self, work: str) -> None:
        """Say what the worker does from now on; the empty string means nothing."""


ConfigT_co = TypeVar("ConfigT_co", covariant=True)


class Context(Protocol[ConfigT_co]):
    """All that a role may touch. The core's own roles read a `Context[RunConfig]`."""

    plan: Plan
    """Operations by role, worker groups and their devices."""
    run_id: str
    run_dir: str
    epoch: int
    """Number of this start of the run, from 1; drafts of files carry it in their names."""
    bus: Bus
    weights: WeightService
    run_status: RunStatus
    devices: DeviceLeases
    """Leases on devices that several worker groups share."""
    workers: Workers
    """Device worker groups, placed by the runner."""
    children: Workers
    """Killable child processes beside the role: rewards, environments, processors."""
    clock: Clock
    random: Random
    incarnation: int
    restarted: bool
    """An earlier process of the role died in this start of the run."""
    resume: Resume | None
    functions: Mapping[str, bytes]
    """Rewards passed from Python, by name; only their own child processes load them."""

    @property
    def config(self) -> ConfigT_co:
        """The resolved configuration of the run."""

    @overload
    def build(self, chosen: Chosen) -> Configurable: ...

    @overload
    def build(self, chosen: Chosen, contract: type[ContractT]) -> ContractT:
        """Make a component of an installed plugin; `contract` is the base class of its kind, such as `Algorithm`."""
        ...

    def waiting(
        self, reason: str, owed_by: str, deadline_s: float, holds: bool = False
    ) -> AbstractContextManager[Wait]:
        """Say what is waited for, by whom it is owed and until when; `relax why` prints it. `holds`: what else the role
        has begun stands still meanwhile, and its time is the wait's."""

    def working(self, what: str) -> AbstractContextManager[None]:
        """Work beside others of the same role, which goes on whatever its loops wait for. A role that says so is idle
        where it neither works nor waits; one that never does is busy whenever it does not wait."""

    def track(self, name: str, devices: tuple[str, ...] = ()) -> SpanTrack:
        """The account of a worker's time: an engine's, a rank's. Asked again, it goes on."""

    def changing_files(self) -> AbstractContextManager[None]:
        """Let files of the run appear, change or go within the block, which must be short. InfrastructureError where the
        run was started again since: its files belong to other processes."""

    def check(self, wait: Wait, fix: str = "") -> None:
        """Raise DeadlineExceeded when a wait ran out; `fix` says what a person may do about it."""

    def doing(self, what: str, **facts: Any) -> None:
        """Say what the work loop does now; the next heartbeat carries it. A fact that is a function is asked at each
        heartbeat."""

    async def pause_point(self) -> None:
        """Return at once, or hold here while the run is paused."""

    async def pause(self, reason: str, deadline_s: float) -> bool:
        """Hold here until a person goes on with the run, which `relax why` prints with the reason; False where the run was
        told to stop. Raises DeadlineExceeded."""
        ...

    @property
    def stopping(self) -> bool: ...

    def take_checkpoint_request(self) -> bool:
        """Tell, once, that somebody has asked for a checkpoint."""


class Role(Configurable[OptionsT], Generic[OptionsT]):
    """A role's logic."""

    kind: ClassVar[str] = "role"
    name: ClassVar[str] = ""
    stateless: ClassVar[bool] = True
    """A stateless role is restarted after an infrastructure failure. A role with state handles the failures of its workers
    itself. When its process dies, it runs again with `Context.restarted` set, and restores its newest checkpoint."""

    @classmethod
    def operations(cls) -> tuple[Operation, ...]:
        """Return the operations that the role can do; the graph picks those that the algorithm needs."""
        raise NotImplementedError

    @abstractmethod
    async def run(self, context: Context[Any]) -> None:
        """Work until the context says stop; return cleanly then."""
