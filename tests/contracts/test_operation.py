# SPDX-License-Identifier: Apache-2.0
"""Device leases of colocated roles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import pytest

from relax_core.api import DeadlineExceeded, DeviceLeases, InfrastructureError
from relax_core.api.plan import OffloadPart
from relax_core.api.role import SystemClock
from relax_core.devices.client import DeviceLeaseClient
from relax_core.devices.scheduler import DeviceService


class Body:
    """Something with memory: which of its parts are awake."""

    broken = False

    def __init__(self, *parts: OffloadPart) -> None:
        self.parts, self.awake = frozenset(parts), set(parts)

    async def offload(self, parts: Sequence[OffloadPart]) -> int:
        if self.broken:
            raise RuntimeError("it will not")
        freed = len(self.awake & set(parts))
        self.awake -= set(parts)
        return freed

    async def onload(self, parts: Sequence[OffloadPart]) -> None:
        self.awake |= self.parts & set(parts)


class Hand(SystemClock):
    """A clock that is moved by hand."""

    shows = 0.0

    def now(self) -> float:
        return self.shows


DEVICES = frozenset({"gpu:0", "gpu:1"})


@contextmanager
def unseen(reason: str, blocked_by: str, deadline_s: float) -> Iterator[None]:
    yield


@asynccontextmanager
async def colocated() -> AsyncIterator[tuple[DeviceLeases, DeviceLeases, Body, Body]]:
    """Both sides, and what is offloaded."""
    service = DeviceService(SystemClock())
    engines, trainers = (DeviceLeaseClient(service, role, DEVICES, unseen) for role in ("rollout", "actor"))
    engine, trainer = Body("weights", "kv"), Body("weights", "optimizer", "gradients")
    await engines.join("engine", DEVICES, engine)
    await trainers.join("trainer", DEVICES, trainer)
    try:
        yield engines, trainers, engine, trainer
    finally:
        await asyncio.gather(engines.close(), trainers.close())


async def test_colocated_roles_alternate_and_a_publish_has_both_sides_weights() -> None:
    async with colocated() as (engines, trainers, engine, trainer):
        async with engines.acquire(DEVICES, "generate", {"engine": ("weights", "kv")}, 60.0) as lease:
            assert (engine.awake, trainer.awake) == ({"weights", "kv"}, set())
            assert lease.freed_bytes == 3
        async with trainers.acquire(
            DEVICES, "train", {"trainer": ("weights", "optimizer", "gradients")}, 60.0
        ) as lease:
            assert (engine.awake, trainer.awake) == (set(), {"weights", "optimizer", "gradients"})
            await lease.change_phase("publish", {"engine": ("weights",), "trainer": ("weights",)}, 60.0)
            assert engine.awake == trainer.awake == {"weights"}


async def test_a_lease_that_does_not_come_is_an_error_at_its_deadline() -> None:
    async with colocated() as (engines, trainers, _, _):
        async with trainers.acquire(DEVICES, "train", {"trainer": ("weights",)}, 60.0):
            with pytest.raises(
                DeadlineExceeded, match=r"a lease to generate on shared devices; held by actor \(train\)"
            ):
                async with engines.acquire(DEVICES, "generate", {"engine": ("weights", "kv")}, 0.01):
                    raise AssertionError("two had the devices")
        async with engines.acquire(DEVICES, "generate", {"engine": ("weights", "kv")}, 60.0):
            """Refused once is not refused for ever."""


async def test_a_wait_for_devices_names_its_current_blocker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not whoever was at first: a member that never offloads would stay unknown."""
    monkeypatch.setattr("relax_core.devices.client.POLL_S", 0.01)
    blockers, proceed = list[str](), asyncio.Event()

    @contextmanager
    def seen(reason: str, blocked_by: str, deadline_s: float) -> Iterator[None]:
        blockers.append(blocked_by)
        yield

    class Slow(Body):
        async def offload(self, parts: Sequence[OffloadPart]) -> int:
            await proceed.wait()
            return await super().offload(parts)

    async def until(blocker: str) -> None:
        async with asyncio.timeout(60.0):
            while blockers[-1:] != [blocker]:
                await asyncio.sleep(0.01)

    service = DeviceService(SystemClock())
    engines, trainers = (DeviceLeaseClient(service, role, DEVICES, seen) for role in ("rollout#1", "actor#1"))
    await engines.join("rollout", DEVICES, Slow("weights", "kv"))
    held = engines.acquire(DEVICES, "generate", {"rollout": ("weights", "kv", "optimizer", "gradients")}, 60.0)
    await held.__aenter__()
    asking = asyncio.create_task(_once(trainers))
    await until("rollout (generate)")
    await held.__aexit__(None, None, None)
    await until("rollout (has yet to offload)")
    proceed.set()
    await asking
    await asyncio.gather(engines.close(), trainers.close())


async def test_one_of_two_entering_leases_can_be_cancelled() -> None:
    class Slow(DeviceService):
        async def enter(self, owner: str) -> None:
            await asyncio.sleep(0.05)
            await super().enter(owner)

    client = DeviceLeaseClient(Slow(SystemClock()), "actor", DEVICES, unseen)
    first, second = (asyncio.ensure_future(client.join(name, DEVICES, Body("weights"))) for name in ("a", "b"))
    await asyncio.sleep(0.01)
    first.cancel()
    await second
    await client.close()


async def test_the_holder_of_devices_is_notified_of_a_request() -> None:
    async with colocated() as (engines, trainers, engine, _):
        held = engines.acquire(DEVICES, "generate", {"engine": ("weights", "kv")}, 60.0)
        lease = await held.__aenter__()
        asking = asyncio.create_task(_once(trainers))
        async with asyncio.timeout(60.0):
            await lease.wanted()
        assert engine.awake == {"weights", "kv"}  # asked, not robbed
        await held.__aexit__(None, None, None)
        await asking


async def test_a_member_that_leaves_or_fails_to_offload_blocks_no_lease() -> None:
    async with colocated() as (engines, trainers, engine, _):
        engine.broken = True
        async with trainers.acquire(DEVICES, "train", {"trainer": ("weights",)}, 60.0):
            with pytest.raises(InfrastructureError, match="it will not"):
                async with engines.acquire(DEVICES, "generate", {"engine": ("weights", "kv")}, 60.0):
                    raise AssertionError("a member that can't be offloaded has no leases")


async def test_a_silent_holder_loses_its_lease_and_is_notified() -> None:
    clock = Hand()
    service = DeviceService(clock)
    first, second = (DeviceLeaseClient(service, role, DEVICES, unseen) for role in ("rollout", "actor"))
    async with first.acquire(DEVICES, "generate", {}, 60.0) as lease:
        clock.shows += 100.0  # its loop stood still
        await second.join("trainer", DEVICES, Body("weights"))
        with pytest.raises(InfrastructureError, match="lost its devices"):
            await lease.wanted()
    await asyncio.gather(first.close(), second.close())


async def test_a_role_with_its_own_devices_gets_its_lease_without_a_call() -> None:
    apart = frozenset({"gpu:7"})
    async with colocated() as (_, trainers, engine, _):
        alone = Body("weights")
        await trainers.join("reference", apart, alone)
        async with (
            trainers.acquire(DEVICES, "train", {"trainer": ("weights",)}, 60.0),
            trainers.acquire(apart, "forward", {"reference": ("weights",)}, 0.0) as lease,
        ):
            assert alone.awake == {"weights"} and not engine.awake
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await lease.wanted()


async def _once(leases: DeviceLeases) -> None:
    async with leases.acquire(DEVICES, "train", {"trainer": ("weights",)}, 60.0):
        """Had."""
