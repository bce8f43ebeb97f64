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
from tests.clocks import SleepersClock, settle

DISK = Chosen("weight-transport", "disk")


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
    registry = WeightRegistry(SleepersClock())
    waiting = asyncio.create_task(registry.newest("actor", None, 60.0))
    await settle()
    await registry.announce(manifest(1, model="critic"), DISK)
    await settle()
    assert not waiting.done()
    await registry.announce(manifest(1), DISK)
    assert await asyncio.wait_for(waiting, 5) == (manifest(1), DISK)


async def test_newest_gives_up_at_its_deadline() -> None:
    clock = SleepersClock()
    waiting = asyncio.create_task(WeightRegistry(clock).newest("actor", None, 60.0))
    await settle()
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


@pytest.mark.parametrize(
    ("published", "said"),
    [
        (manifest(1), "only go up"),
        (manifest(2, content="x"), "different bytes"),
        (replace(manifest(3), fingerprint=""), "without a fingerprint"),
        (replace(manifest(3), tensors=manifest(3).tensors[:1]), "publish the whole model"),
    ],
)
def test_an_invalid_successor_of_a_version_is_refused(published: Manifest, said: str) -> None:
    registry = ImmediateRegistry()
    for _ in range(2):  # the same version again is harmless
        registry.announce(manifest(2), DISK)
    with pytest.raises(InfrastructureError, match=said):
        registry.announce(published, DISK)


@pytest.mark.parametrize(
    ("receipt", "said"),
    [
        (proof(manifest(3)), "never published"),
        (replace(proof(manifest(1)), fingerprint=manifest(2).fingerprint), "differs on arrival"),
    ],
)
def test_receipts_are_checked_also_of_the_version_before(receipt: Receipt, said: str) -> None:
    registry = ImmediateRegistry()
    registry.announce(manifest(1), DISK)
    registry.announce(manifest(2), DISK)
    registry.receipt(proof(manifest(1)))
    with pytest.raises(InfrastructureError, match=said):
        registry.receipt(receipt)


def test_a_vanished_or_reshaped_tensor_and_an_update_without_change_are_faults() -> None:
    before, after = manifest(1), manifest(2)
    with pytest.raises(InfrastructureError, match="lacks \\['b'\\]"):
        prove_successor(before, replace(after, tensors=after.tensors[:1]), applied=True)
    reshaped = (replace(after.tensors[0], shape=(1, 2)), after.tensors[1])
    with pytest.raises(InfrastructureError, match="a: have"):
        prove_successor(before, replace(after, tensors=reshaped), applied=True)
    same = replace(before, version=Version("actor", 0, 2))
    with pytest.raises(InfrastructureError, match="all 2 tensors equal"):
        prove_successor(before, same, applied=True)
    prove_successor(before, same, applied=False)
    changed = replace(before.tensors[0], fingerprint="new"), before.tensors[1]
    prove_successor(before, replace(same, tensors=changed), applied=True)
