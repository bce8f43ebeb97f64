# SPDX-License-Identifier: Apache-2.0
"""The contract of roles, and of the services in a role's `Context`: device leases, workers, run status, clock, weights.

A role uses nothing but its `Context`. So the same code runs as a task of the local runner, in a Ray Serve shell, and
under a virtual clock in tests. `runners` implements the services.
"""

from __future__ import annotations

import asyncio
import re
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar, overload

from relax_core.api.bus import Bus
from relax_core.api.component import Chosen, Configurable, ContractT, OptionsT
from relax_core.api.events import Event, Span, SpanKind
from relax_core.api.plan import OffloadPart, Operation, Plan
from relax_core.api.run_commands import Command, ScaleRequest
from relax_core.api.weights import Manifest, Receipt, Version

if TYPE_CHECKING:
    from random import Random


Phase = Literal["generate", "answer", "forward", "train", "publish"]
"""The work for which devices are leased; `answer`: an auxiliary pool uses the devices of the policy's engines."""


class Offloadable(Protocol):
    """An engine pool or a rank group that can free its device memory; both methods ignore parts that it lacks."""

    async def offload(self, parts: Sequence[OffloadPart]) -> int:
        """Free parts; return the number of bytes freed."""

    async def onload(self, parts: Sequence[OffloadPart]) -> None:
        """Load parts that `offload` has freed."""


class DeviceLease(Protocol):
    """A lease on devices. While it lasts, only the parts of its holders are loaded on the devices.

    A role must not wait for rows while it holds a lease. `generate` loads the engines' parts, `train` the
    trainer's, `publish` the weights of both.
    """

    @property
    def freed_bytes(self) -> int:
        """Return the number of bytes freed for this lease; 0 if no member had to offload."""

    async def change_phase(self, phase: Phase, holders: Mapping[str, Sequence[OffloadPart]], deadline_s: float) -> None:
        """Load the parts of another phase and offload the rest, keeping the devices. Raises DeadlineExceeded."""

    async def wanted(self) -> None:
        """Wait until another lease needs the devices; the role should then release them at a safe point."""


class DeviceLeases(Protocol):
    """A role's access to device leases. Members are the engine pools and rank groups that use the devices."""

    async def join(self, name: str, devices: frozenset[str], member: Offloadable) -> None:
        """Register a member on its devices; all of its parts count as loaded."""

    async def leave(self, name: str) -> None:
        """Remove a member from its devices."""

    def acquire(
        self, devices: frozenset[str], phase: Phase, holders: Mapping[str, Sequence[OffloadPart]], deadline_s: float
    ) -> AbstractAsyncContextManager[DeviceLease]:
        """Lease devices and load on them only the parts of `holders`, member -> parts. Raises DeadlineExceeded."""


CREDENTIALS = frozenset({"TOKEN", "SECRET", "PASSWORD", "KEY"})
"""Words in the name of an environment variable that holds a credential."""
PACKAGES_ENV = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_*", "UV_*")
"""Environment variables with which a program trusts servers and installs packages, for `visible_environment`."""
PROGRAM_ENV = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH", *PACKAGES_ENV)
"""Environment variables that a program of an environment inherits from its worker, for `visible_environment`."""


def visible_environment(environment: Mapping[str, str], allowed: Sequence[str] | None) -> dict[str, str]:
    """Return the variables that match `allowed`, or all for None.

    A pattern with `*` matches no credential: no name with a word of CREDENTIALS, and no address with a user or token.
    """

    def named(name: str, value: str, pattern: str) -> bool:
        secret = CREDENTIALS & set(re.split(r"[_.-]", name.upper())) or re.search(r"://[^/\s]*@", value)
        return name == pattern or ("*" in pattern and fnmatchcase(name, pattern) and not secret)

    if allowed is None:
        return dict(environment)
    return {name: value for name, value in environment.items() if any(named(name, value, each) for each in allowed)}


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The description of a worker process to start."""

    name: str
    """Name, unique in the run: `engine-0`, `actor-rank-1`."""
    component: Chosen
    """The component that the process hosts."""
    python: str = ""
    """Path of another Python interpreter; empty: the interpreter of this process."""
    env: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    """Devices that the plan assigns, such as `gpu:3`; empty: all devices that the starting process sees."""
    num_gpus: float = 0.0
    """Number of GPUs; processes that share a GPU have equal shares."""
    memory_mb: int = 0
    """Address-space limit of a child process in MiB; 0: no limit."""
    inherit_env: tuple[str, ...] | None = None
    """Variables that a child process inherits; None: all. `*` stands for any text, but never matches a credential."""
    untrusted: bool = False
    """True: the process runs code of plugin authors, in a scratch folder, and can write only there, to temporary folders
    and to `writable`."""
    writable: tuple[str, ...] = ()
    """Further folders to which an untrusted process may write. `/`: all but the run directory, unless it is listed, too."""
    preload: tuple[str, ...] = ()
    """Slow modules that the process imports; the core may fork it from a process that has imported them already."""
    elastic: bool = False
    """True: an engine that joins a live run. On Ray it gets room of its own, on nodes with `placement.elastic_labels`."""
    target: str = ""
    """`module:Class` of a host class of the core, built without arguments; empty: host `component` directly."""


class Worker(Protocol):
    """A running process that hosts one component and answers calls of its public methods."""

    name: str
    pid: int
    host: str
    """Address of the worker's machine in the network; loopback if all workers run on one machine."""

    async def free_port(self, address: str) -> int:
        """Return a port that is free now on an address of the worker's machine."""

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a method of the hosted object, and return its result.

        RelaxError, ValueError, KeyError and NotImplementedError of the method keep their types; any other error becomes
        PluginError. Raises WorkerDied if the process ended, DeadlineExceeded after `timeout_s` (the method may run on).
        """

    def stream(self, method: str, *args: Any, timeout_s: float) -> AsyncIterator[Any]:
        """Yield the items of an async-iterating method; `timeout_s`: longest time between two items."""

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Ask the process to end; after `timeout_s`, kill it with its children."""

    async def kill(self) -> None:
        """Kill the process and its children at once with SIGKILL."""


class Workers(Protocol):
    """The workers of one role. A role does not see whether a worker is a child process or a Ray actor.

    Workers end with the role that started them; a restarted role starts new workers. They have the variables of
    `[run] env`, which override those of their specification.
    """

    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float = 120.0) -> tuple[Worker, ...]:
        """Start all workers; if one worker fails, kill all and raise its error."""

    async def close(self) -> None:
        """Kill all workers. The core calls this when the role ends."""


RoleState = Literal["starting", "busy", "waiting", "paused", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait of a role: its reason, its deadline, and the role or worker that can end it."""

    role: str
    reason: str
    blocked_by: str
    """The role, worker or person whose work ends the wait; several in the order of their work."""
    since: float
    """Start of the wait, in monotonic seconds of the hub's clock; `deadline` is on the same clock."""
    deadline: float
    polls: bool = False
    """True: the same wait began before and was renewed at its deadline; `since` is the first start."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A role's regular report to the run status."""

    role: str
    state: RoleState
    doing: str = ""
    waits: tuple[Wait, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    at: float = 0.0
    registration: int = 0
    pid: int = 0
    sent: float = 0.0
    """Time of sending on the role's clock, used to convert `waits` and `spans` to the hub's clock; 0: unknown."""
    spans: tuple[Span, ...] = ()
    """Spans of the role and its devices since the last heartbeat, complete up to `sent`."""


class RunStatus(Protocol):
    """The status of a run: roles send heartbeats and events to it, and take commands from it."""

    async def heartbeat(self, heartbeat: Heartbeat) -> None: ...

    async def heartbeats(self) -> tuple[Heartbeat, ...]: ...

    async def emit(self, event: Event) -> None:
        """Send an event to the controller, which passes it to the run directory, sinks, observers and display."""

    async def events(self, after: int, wait_s: float) -> tuple[tuple[int, Event], ...]:
        """Return the numbered events after number `after`; wait up to `wait_s` for the first.

        By passing `after`, the caller confirms that it has recorded all events up to this number.
        """

    async def recorded(self, wait_s: float) -> bool:
        """Wait until the run's controller, if any, has recorded every event so far; return False after `wait_s`."""

    async def command(self, role: str, command: Command) -> None:
        """Send a command to a role."""

    async def commands(self, role: str, after: int, wait_s: float) -> tuple[tuple[int, Command], ...]:
        """Return the numbered commands for a role after number `after`; wait up to `wait_s` for the first."""


class Clock(Protocol):
    """A clock of monotonic seconds; tests and the simulator pass a virtual clock."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class WeightService(Protocol):
    """The registry of published weights, and of the version that each receiver has proved to have loaded."""

    async def announce(self, manifest: Manifest, transport: Chosen) -> None: ...

    async def newest(self, model: str, after: Version | None, wait_s: float) -> tuple[Manifest, Chosen] | None:
        """Return the newest version if it is later than `after`; None after `wait_s`."""

    async def route(
        self,
        model: str,
        have: Version | None,
        wait_s: float,
        after: Version | None = None,
        receiver: str = "",
        within_s: float = 300.0,
    ) -> tuple[tuple[Manifest, Chosen], ...]:
        """Return the manifests to load, in order, to get from version `have` to the newest version.

        A route is a full version, deltas on top of `have`, or a full version plus deltas. Return () if within `wait_s`
        there is no version newer than `after` and `have`, or no route to it. The versions of a route are kept until the
        receiver proves the route's last version, for at most `within_s`.
        """

    async def needed(self, model: str) -> frozenset[Version]:
        """Return the versions that must not be deleted, because a route contains them or a receiver may read them."""

    async def handed_out(self, version: Version) -> None:
        """Record that a live version's transfer has ended; receivers that come later must call `want`."""

    async def want(self, receiver: str, model: str) -> None:
        """Request another transfer of the newest live version, for a receiver that has no route to it."""

    async def wanted(self, model: str) -> tuple[str, ...]:
        """Return the receivers that called `want` since the last announcement, to serve them between steps."""

    async def receipt(self, receipt: Receipt) -> bool:
        """Record a receiver's proof; return False if a rollback has abandoned the version.

        Raises InfrastructureError if the receipt does not match the manifest.
        """

    async def receivers(self, model: str) -> Mapping[str, Version]:
        """Return the version that each receiver last proved."""

    async def forget(self, receiver: str, model: str) -> None:
        """Remove a receiver that left or failed a check, and its proof."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The checkpoint from which a run continues."""

    step: int
    directory: str
    state: Mapping[str, Any]
    """Content of the checkpoint's `state.json`: the states of the sampler and of random generators."""


class SpanTrack(Protocol):
    """The record of one worker's activity over time; its methods return at once and stay in this process."""

    def span(self, kind: SpanKind, name: str, blocked_by: str = "") -> AbstractContextManager[None]:
        """Record a span from entry to exit. Of overlapping spans, work counts first, then overhead, then waits."""

    def say(self, work: str) -> None:
        """Record that the worker does this work from now on; empty: no work."""


ConfigT_co = TypeVar("ConfigT_co", covariant=True)


class Context(Protocol[ConfigT_co]):
    """The services that a role may use. The core's own roles get a `Context[RunConfig]`."""

    plan: Plan
    run_id: str
    run_dir: str
    epoch: int
    """Number of this start of the run, from 1; part of the names of unfinished files."""
    bus: Bus
    weights: WeightService
    run_status: RunStatus
    devices: DeviceLeases
    """Leases on devices that several worker groups share."""
    workers: Workers
    """Starter of workers on the devices that the runner assigns to the role."""
    children: Workers
    """Starter of killable child processes on the role's machine: rewards, environments, processors."""
    clock: Clock
    random: Random
    registration: int
    """Number of times that the role has registered at the bus."""
    restarted: bool
    """True: an earlier process of the role died since the start of the run."""
    resume: Resume | None
    functions: Mapping[str, bytes]
    """Reward functions passed from Python: name -> cloudpickle; only their child processes load the functions."""
    plugins: Sequence[tuple[str, ...]]
    """Name, version and content of each plugin of the run, which every worker must have."""

    @property
    def config(self) -> ConfigT_co:
        """Return the resolved configuration of the run."""

    @overload
    def build(self, chosen: Chosen) -> Configurable: ...

    @overload
    def build(self, chosen: Chosen, contract: type[ContractT]) -> ContractT:
        """Build a component of an installed plugin; `contract` is the base class of its kind, such as `Algorithm`."""
        ...

    def part(self, hook: str, **facts: object) -> object:
        """Return a part of the run that a plugin makes by a part hook of `relax_core.api.hooks`."""

    def waiting(
        self, reason: str, blocked_by: str, deadline_s: float, holds: bool = False
    ) -> AbstractContextManager[Wait]:
        """Record a wait while the block runs, for `relax why`; `blocked_by` is the role or worker that can end the wait.

        Call `check` to enforce the deadline. `holds`: the role's open work is blocked, so its time counts as waiting.
        """

    def working(self, what: str) -> AbstractContextManager[None]:
        """Record one of several pieces of work that run concurrently with the role's main loop.

        A role that uses this method is idle while it has no such work and no wait. Without it, a role is busy or waits.
        """

    def track(self, name: str, devices: tuple[str, ...] = ()) -> SpanTrack:
        """Return the span track of a worker, such as an engine; the same name gives the same object."""

    def changing_files(self) -> AbstractContextManager[None]:
        """Allow the block to create, change or delete files of the run; keep the block short.

        Raises InfrastructureError if the run was started again meanwhile, because the new processes own the files.
        """

    def check(self, wait: Wait, fix: str = "") -> None:
        """Raise DeadlineExceeded if a wait is past its deadline; `fix` is advice for the user."""

    def doing(self, what: str, **facts: Any) -> None:
        """Set the role's current work for its heartbeats; a fact that is a function is called for each heartbeat."""

    async def pause_point(self) -> None:
        """Wait while the run is paused; else return at once.

        Raises LastingFailure if no person continues the run within `guards.pause_timeout_s`.
        """

    async def pause(self, reason: str, deadline_s: float) -> bool:
        """Pause this role until a person continues the run; return False if the run was stopped instead.

        `relax why` prints the reason. Raises DeadlineExceeded.
        """
        ...

    @property
    def stopping(self) -> bool: ...

    profiles_left: int
    """Number of next steps that a request wants profiles of. The role that writes a profile lowers the number."""

    def take_checkpoint_request(self) -> bool:
        """Return True if a checkpoint was requested; return True only once for each request."""

    def take_evaluation_request(self) -> bool:
        """Return True if an evaluation was requested; return True only once for each request."""

    def take_scale_requests(self) -> tuple[ScaleRequest, ...]:
        """Return the requests to scale engine pools since the last call."""


class Role(Configurable[OptionsT], Generic[OptionsT]):
    """The logic of a role, such as rollout or actor."""

    kind: ClassVar[str] = "role"
    name: ClassVar[str] = ""
    stateless: ClassVar[bool] = True
    """True: the core restarts the role after an infrastructure failure. False: the role handles failures of its workers
    itself. If its process dies, it runs again with `Context.restarted` set, and restores its newest checkpoint."""

    @classmethod
    def operations(cls) -> tuple[Operation, ...]:
        """Return the operations that the role can do; the planner chooses the operations of a run."""
        raise NotImplementedError

    @abstractmethod
    async def run(self, context: Context[Any]) -> None:
        """Work until done or until `context.stopping` is True, then return."""
