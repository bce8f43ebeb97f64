# SPDX-License-Identifier: Apache-2.0
"""Leases on shared devices: colocated engines and trainers acquire one; a role that shares nothing gets one at once.

Nobody waits for rows while holding a lease. A lease says which members are onloaded under it and with which parts:
generation has the engines', training the trainers', and a publish both sides' weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

from relax_core.api.plan import OffloadPart

Phase = Literal["generate", "forward", "train", "publish"]


class Offloadable(Protocol):
    """An engine pool or a rank group, which can give its devices' memory back. Parts that it does not have are ignored."""

    async def offload(self, parts: Sequence[OffloadPart]) -> int:
        """Free parts; return the bytes that were really freed."""
        ...

    async def onload(self, parts: Sequence[OffloadPart]) -> None:
        """Undo `offload`."""
        ...


class DeviceLease(Protocol):
    """Devices that are held now."""

    @property
    def freed_bytes(self) -> int:
        """Bytes that other members freed for it; 0 where none had to be offloaded."""
        ...

    async def change_phase(self, phase: Phase, holders: Mapping[str, Sequence[OffloadPart]], deadline_s: float) -> None:
        """Go on with these parts onloaded instead, without anybody coming between. Raises DeadlineExceeded."""
        ...

    async def wanted(self) -> None:
        """Return when somebody else waits for the devices: come to a safe point and release them. Never where nobody shares."""
        ...


class DeviceLeases(Protocol):
    """The leases of a run's devices, as one role sees them."""

    async def join(self, name: str, devices: frozenset[str], member: Offloadable) -> None:
        """Make known that a member lives on these devices; it starts with all of its parts onloaded."""
        ...

    async def leave(self, name: str) -> None:
        """Make known that a member is gone from its devices."""
        ...

    def acquire(
        self, devices: frozenset[str], phase: Phase, holders: Mapping[str, Sequence[OffloadPart]], deadline_s: float
    ) -> AbstractAsyncContextManager[DeviceLease]:
        """Hold the devices with these holders' parts onloaded and everything else offloaded. Raises DeadlineExceeded."""
        ...
