# SPDX-License-Identifier: Apache-2.0
"""The weight registry: versions only go up, proofs are checked, waits end."""

import asyncio
from dataclasses import replace

import pytest

from relax_core.api.component import Chosen
from relax_core.api.errors import InfrastructureError
from relax_core.api.role import SystemClock
from relax_core.api.weights import Manifest, Receipt, TensorInfo, Version, combined_fingerprint
from relax_core.testing.weight_transport_fixture import ImmediateRegistry
from relax_core.weights.registry import WeightRegistry, prove_successor

DISK = Chosen("weight-transport", "disk")


class VirtualClock:
    """Time passes only when told to."""

    def __init__(self) -> None:
        self.time = 0.0
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self._sleepers.append((self.time + seconds, woken))
        await woken.wait()

    def advance(self, seconds: float) -> None:
        self.time += seconds
        for due, woken in self._sleepers:
            if due <= self.time:
                woken.set()

    async def until_someone_sleeps(self) -> None:
        for _ in range(100):
            if self._sleepers:
                return
            await asyncio.sleep(0)
        raise TimeoutError("nobody slept")


def manifest(step: int, incarnation: int = 0, model: str = "actor", content: str = "") -> Manifest:
    infos = tuple(TensorInfo(name, (2,), "F32", f"{name}{step}{incarnation}{content}", 8) for name in ("a", "b"))
    return Manifest(Version(model, incarnation, step), "full", infos, "", fingerprint=combined_fingerprint(infos))


def proof(of: Manifest, receiver: str = "engine-0") -> Receipt:
    return Receipt(receiver, of.version, "wire", of.fingerprint)


async def test_newest_is_by_model_and_later_than_after() -> None:
    registry = WeightRegistry(SystemClock())
    one, two, other = manifest(1), manifest(2), manifest(7, model="critic")
    for published in (one, two, other):
        await registry.announce(published, DISK)
    assert await registry.newest("actor", None, 0) == (two, DISK)
    assert await registry.newest("actor", one.version, 0) == (two, DISK)
    assert await registry.newest("actor", two.version, 0) is None
    assert await registry.newest("critic", None, 0) == (other, DISK)
    assert await registry.newest("teacher", None, 0) is None


async def test_newest_waits_until_something_is_announced() -> None:
    clock = VirtualClock()
    registry = WeightRegistry(clock)
    waiting = asyncio.create_task(registry.newest("actor", None, 60.0))
    await clock.until_someone_sleeps()
    await registry.announce(manifest(1, model="critic"), DISK)
    await asyncio.sleep(0)
    assert not waiting.done()
    await registry.announce(manifest(1), DISK)
    assert await asyncio.wait_for(waiting, 5) == (manifest(1), DISK)


async def test_newest_gives_up_at_its_deadline() -> None:
    clock = VirtualClock()
    waiting = asyncio.create_task(WeightRegistry(clock).newest("actor", None, 60.0))
    await clock.until_someone_sleeps()
    clock.advance(60.0)
    assert await asyncio.wait_for(waiting, 5) is None


async def test_receivers_are_those_who_proved() -> None:
    registry = WeightRegistry(SystemClock())
    await registry.announce(manifest(1), DISK)
    await registry.receipt(proof(manifest(1), "engine-0"))
    await registry.announce(manifest(2), DISK)
    await registry.receipt(proof(manifest(2), "engine-1"))
    assert await registry.receivers("actor") == {"engine-0": Version("actor", 0, 1), "engine-1": Version("actor", 0, 2)}
    await registry.forget("engine-0", "actor")
    assert await registry.receivers("actor") == {"engine-1": Version("actor", 0, 2)}


async def test_wrong_fingerprint_names_receiver_version_have_and_want() -> None:
    registry = WeightRegistry(SystemClock())
    await registry.announce(manifest(1), DISK)
    await registry.receipt(proof(manifest(1)))
    with pytest.raises(InfrastructureError) as refused:
        await registry.receipt(Receipt("engine-0", Version("actor", 0, 1), "wire", "beef"))
    for word in ("engine-0", "actor@0.1", "beef", manifest(1).fingerprint):
        assert word in str(refused.value)
    assert await registry.receivers("actor") == {}


def test_late_receipt_of_the_version_before_is_still_checked() -> None:
    registry = ImmediateRegistry()
    registry.announce(manifest(1), DISK)
    registry.announce(manifest(2), DISK)
    registry.receipt(proof(manifest(1)))
    with pytest.raises(InfrastructureError, match="differs on arrival"):
        registry.receipt(replace(proof(manifest(1)), fingerprint=manifest(2).fingerprint))


def test_receipt_for_what_was_never_published_is_refused() -> None:
    registry = ImmediateRegistry()
    registry.announce(manifest(1), DISK)
    with pytest.raises(InfrastructureError, match="never published"):
        registry.receipt(proof(manifest(2)))


def test_an_abandoned_incarnation_is_not_published_any_more_and_its_receipts_are_late() -> None:
    registry = ImmediateRegistry()
    registry.announce(manifest(5), DISK)
    registry.announce(manifest(3, incarnation=1), DISK)
    with pytest.raises(InfrastructureError, match="abandoned"):
        registry.announce(manifest(6), DISK)
    assert registry.receipt(proof(manifest(5))) is False
    assert registry.receivers("actor") == {}
    assert registry.receipt(proof(manifest(3, incarnation=1))) is True
    assert registry.newest("actor", Version("actor", 0, 5), 0.0) == (manifest(3, incarnation=1), DISK)


def test_versions_do_not_go_back() -> None:
    registry = ImmediateRegistry()
    registry.announce(manifest(2), DISK)
    with pytest.raises(InfrastructureError, match="only go up"):
        registry.announce(manifest(1), DISK)


def test_same_version_again_is_harmless_but_other_bytes_are_not() -> None:
    registry = ImmediateRegistry()
    registry.announce(manifest(1), DISK)
    registry.announce(manifest(1), DISK)
    with pytest.raises(InfrastructureError, match="different bytes"):
        registry.announce(manifest(1, content="x"), DISK)


def test_manifest_without_fingerprint_is_refused() -> None:
    with pytest.raises(InfrastructureError, match="without a fingerprint"):
        ImmediateRegistry().announce(replace(manifest(1), fingerprint=""), DISK)


def test_identical_weights_after_an_applied_update_are_a_fault() -> None:
    before = manifest(1)
    after = replace(before, version=Version("actor", 0, 2))
    with pytest.raises(InfrastructureError, match="all 2 tensors equal"):
        prove_successor(before, after, applied=True)
    prove_successor(before, after, applied=False)


def test_one_changed_tensor_is_proof_enough() -> None:
    before = manifest(1)
    changed = (replace(before.tensors[0], fingerprint="new"), before.tensors[1])
    prove_successor(before, replace(before, version=Version("actor", 0, 2), tensors=changed), applied=True)


def test_vanished_or_reshaped_tensor_is_a_fault() -> None:
    before, after = manifest(1), manifest(2)
    with pytest.raises(InfrastructureError, match="lacks \\['b'\\]"):
        prove_successor(before, replace(after, tensors=after.tensors[:1]), applied=True)
    reshaped = (replace(after.tensors[0], shape=(1, 2)), after.tensors[1])
    with pytest.raises(InfrastructureError, match="a: have"):
        prove_successor(before, replace(after, tensors=reshaped), applied=True)
    registry = ImmediateRegistry()
    registry.announce(before, DISK)
    with pytest.raises(InfrastructureError, match="publish the whole model"):
        registry.announce(replace(after, tensors=after.tensors[:1]), DISK)
