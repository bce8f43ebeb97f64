# SPDX-License-Identifier: Apache-2.0
"""Turns on shared devices: colocated engines and trainers ask for one, whoever shares nothing gets one at once.

Nobody waits for rows while holding a turn. A turn says who must be awake in it and with which parts: generation
wakes the engines, training the trainers, and a publish both sides' weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

Phase = Literal["generate", "forward", "train", "publish"]
OffloadPart = Literal["weights", "kv", "optimizer", "gradients"]


class Offloadable(Protocol):
    """Whoever can give its devices' memory back: an engine pool or a trainer group. Parts it does not have are ignored."""

    async def sleep(self, parts: Sequence[OffloadPart]) -> int:
        """Free parts; returns bytes really freed."""
        ...

    async def wake(self, parts: Sequence[OffloadPart]) -> None:
        """Undo `sleep`."""
        ...


class DeviceLease(Protocol):
    """Devices held now."""

    @property
    def freed_bytes(self) -> int:
        """Bytes that others really freed for it; 0 where nobody had to sleep."""
        ...

    async def become(self, phase: Phase, holders: Mapping[str, Sequence[OffloadPart]], deadline_s: float) -> None:
        """Go on with these parts awake instead, without anybody coming between. Raises DeadlineExceeded."""
        ...

    async def wanted(self) -> None:
        """Return when somebody else waits for the devices: come to a safe point and let go. Never for who is alone."""
        ...


class DeviceLeases(Protocol):
    """The arbiter of a run's devices, as one role sees it."""

    async def join(self, name: str, devices: frozenset[str], sleeper: Offloadable) -> None:
        """Make known who lives on which devices; everyone starts awake."""
        ...

    async def leave(self, name: str) -> None:
        """It is gone from its devices."""
        ...

    def acquire(
        self, devices: frozenset[str], phase: Phase, holders: Mapping[str, Sequence[OffloadPart]], deadline_s: float
    ) -> AbstractAsyncContextManager[DeviceLease]:
        """Have the devices with these holders' parts awake and everyone else's asleep. Raises DeadlineExceeded."""
        ...
