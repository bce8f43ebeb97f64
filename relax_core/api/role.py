# SPDX-License-Identifier: Apache-2.0
"""Roles: logic that runs on the graph. A role offers operations; the algorithm's columns and fits select them.

A role gets a `Context` and nothing else: the same code runs as a task of the local runner, in a Ray Serve shell,
and under a virtual clock in tests.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from relax_core.api.bus import Bus
from relax_core.api.clock import Clock
from relax_core.api.component import Chosen, Configurable, OptionsT
from relax_core.api.devices import DeviceLeases
from relax_core.api.events import SpanKind
from relax_core.api.plan import Operation, Plan
from relax_core.api.status import RunStatus, Wait
from relax_core.api.weights import Manifest, Receipt, Version
from relax_core.api.worker import Workers

if TYPE_CHECKING:
    from random import Random


class WeightService(Protocol):
    """Versions of published weights, and who proved to have them."""

    async def announce(self, manifest: Manifest, transport: Chosen) -> None: ...

    async def newest(self, model: str, after: Version | None, wait_s: float) -> tuple[Manifest, Chosen] | None:
        """The newest version later than `after`; None after `wait_s`."""
        ...

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
        ...

    async def needed(self, model: str) -> frozenset[Version]:
        """Versions that are on a route, or that a receiver was given and may still be reading."""
        ...

    async def handed_out(self, version: Version) -> None:
        """live: the transfer is over; who comes now must want it. Announcing it again opens the door again."""
        ...

    async def want(self, receiver: str, model: str) -> None:
        """A receiver stands at the door: the newest version is live, or no route leads there from what it has."""
        ...

    async def wanted(self, model: str) -> tuple[str, ...]:
        """Receivers at the door since the newest version was handed out; the publisher serves them between steps."""
        ...

    async def receipt(self, receipt: Receipt) -> None:
        """A receiver's proof. Raises InfrastructureError where its fingerprint is not the manifest's."""
        ...

    async def receivers(self, model: str) -> Mapping[str, Version]:
        """Return the version that each receiver last proved."""
        ...

    async def forget(self, receiver: str, model: str) -> None:
        """Forget a receiver that died or is not to be trusted: its proof no longer counts."""
        ...


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a run continues: a complete checkpoint."""

    step: int
    directory: str
    state: Mapping[str, Any]
    """`state.json` of the checkpoint: sampler and random state."""


class SpanTrack(Protocol):
    """The record of one worker's activity, moment by moment; writing to it costs no call."""

    def span(self, kind: SpanKind, name: str, owed_by: str = "") -> AbstractContextManager[None]:
        """From entry to exit; where several overlap, work goes before overhead, and that before a wait."""
        ...

    def say(self, work: str) -> None:
        """Say what the worker does from now on; the empty string means nothing."""
        ...


ConfigT_co = TypeVar("ConfigT_co", covariant=True)


class Context(Protocol[ConfigT_co]):
    """All that a role may touch. The core's own roles read a `Context[RunConfig]`."""

    plan: Plan
    """Operations by role, worker groups and their devices."""
    run_id: str
    run_dir: str
    bus: Bus
    weights: WeightService
    board: RunStatus
    devices: DeviceLeases
    """Leases on devices that several worker groups share."""
    workers: Workers
    """Device worker groups, placed by the runner."""
    children: Workers
    """Killable child processes beside the role: rewards, environments, processors."""
    clock: Clock
    random: Random
    incarnation: int
    resume: Resume | None
    functions: Mapping[str, bytes]
    """Rewards passed from Python, by name; only their own child processes load them."""

    @property
    def config(self) -> ConfigT_co:
        """The resolved configuration of the run."""
        ...

    def build(self, chosen: Chosen) -> Any:
        """A component of an installed plugin."""
        ...

    def waiting(
        self, reason: str, owed_by: str, deadline_s: float, holds: bool = False
    ) -> AbstractContextManager[Wait]:
        """Say what is waited for, by whom it is owed and until when; `relax why` prints it. `holds`: what else the role
        has begun stands still meanwhile, and its time is the wait's."""
        ...

    def working(self, what: str) -> AbstractContextManager[None]:
        """Work beside others of the same role, which goes on whatever its loops wait for. A role that says so is idle
        where it neither works nor waits; one that never does is busy whenever it does not wait."""
        ...

    def lane(self, name: str, devices: tuple[str, ...] = ()) -> SpanTrack:
        """The account of a worker's time: an engine's, a rank's. Asked again, it goes on."""
        ...

    def check(self, wait: Wait, fix: str = "") -> None:
        """Raise DeadlineExceeded when a wait ran out; `fix` says what a person may do about it."""
        ...

    def doing(self, what: str, **facts: Any) -> None:
        """Say what the work loop does now; the next heartbeat carries it. A fact that is a function is asked at each
        heartbeat."""
        ...

    async def pause_point(self) -> None:
        """Return at once, or hold here while the run is paused."""
        ...

    @property
    def stopping(self) -> bool: ...


class Role(Configurable[OptionsT], Generic[OptionsT]):
    """A role's logic."""

    kind: ClassVar[str] = "role"
    name: ClassVar[str] = ""
    stateless: ClassVar[bool] = True
    """Restarted in place when it dies; a role with state goes back to its last checkpoint."""

    @classmethod
    def operations(cls) -> tuple[Operation, ...]:
        """Return the operations that the role can do; the graph picks those that the algorithm needs."""
        raise NotImplementedError

    @abstractmethod
    async def run(self, context: Context[Any]) -> None:
        """Work until the context says stop; return cleanly then."""
