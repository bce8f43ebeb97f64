# SPDX-License-Identifier: Apache-2.0
"""Corruptions of a publish, one function each. A corrupted publish must be refused before it ends.

A function gets a chain whose last version is proved, and makes one corrupted publish. If the function returns, neither
the transport nor the weight service has detected the corruption.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from relax_core.api.weights import Payload, combined_fingerprint
from relax_core.testing.weight_transport_fixture import PublishedChain, Transfer, moved

Corruption = Callable[[PublishedChain], object]
CORRUPTIONS: dict[str, Corruption] = {}
ONLY = {"delta_without_its_base": "delta", "delta_on_another_base": "delta", "dropped_adapter_tensor": "lora"}
"""Corruptions that exist for one payload only."""


def _corruption(function: Corruption) -> Corruption:
    CORRUPTIONS[function.__name__] = function
    return function


def corruptions_of(payload: str) -> list[str]:
    return [name for name in CORRUPTIONS if ONLY.get(name, payload) == payload]


# -- the bytes differ from the manifest -----------------------------------------------------------------------------


@_corruption
def skipped_tensor(chain: PublishedChain) -> None:
    after = moved(chain.now)
    chain.publish(after, wire=after[1:])


@_corruption
def stale_bucket(chain: PublishedChain) -> None:
    after = moved(chain.now)
    chain.publish(after, wire=[chain.now[0], *after[1:]])


@_corruption
def swapped_names(chain: PublishedChain) -> None:
    after = moved(chain.now)
    (first, a, dtype), (second, b, _), *rest = after
    chain.publish(after, wire=[(first, b, dtype), (second, a, dtype), *rest])


@_corruption
def wrong_dtype_on_the_wire(chain: PublishedChain) -> None:
    after = moved(chain.now)
    wire = [(name, array.view(np.float16), "F16") if dtype == "BF16" else (name, array, dtype)
            for name, array, dtype in after]  # fmt: skip
    chain.publish(after, wire=wire)


@_corruption
def wrong_shape_on_the_wire(chain: PublishedChain) -> None:
    (name, array, dtype), *rest = after = moved(chain.now)
    chain.publish(after, wire=[(name, np.ascontiguousarray(array.T), dtype), *rest])


@_corruption
def flipped_bit_on_the_wire(chain: PublishedChain) -> None:
    (name, array, dtype), *rest = after = moved(chain.now)
    flipped = np.array(array)
    flipped.reshape(-1).view(np.uint8)[-1] ^= 0x80
    chain.publish(after, wire=[(name, flipped, dtype), *rest])


# -- the sender sends tensors that are not the trainer's ------------------------------------------------------------


@_corruption
def identical_bytes_after_an_update(chain: PublishedChain) -> None:
    chain.publish(chain.now)


@_corruption
def tensor_that_is_no_longer_published(chain: PublishedChain) -> None:
    chain.publish(moved(chain.now)[1:])


@_corruption
def dropped_adapter_tensor(chain: PublishedChain) -> None:
    chain.publish([one for one in moved(chain.now) if "lora_B" not in one[0]])


@_corruption
def wrong_dtype_at_the_source(chain: PublishedChain) -> None:
    (name, array, _), *rest = moved(chain.now)
    chain.publish([(name, array.astype(np.float16), "F16"), *rest])


@_corruption
def renamed_tensor(chain: PublishedChain) -> None:
    (name, array, dtype), *rest = moved(chain.now)
    chain.publish([(f"{name}.renamed", array, dtype), *rest])


# -- the manifest contradicts itself or its bytes -------------------------------------------------------------------


@_corruption
def false_fingerprint_of_all(chain: PublishedChain) -> None:
    chain.publish(moved(chain.now), fingerprint="0" * 32)


@_corruption
def no_fingerprint(chain: PublishedChain) -> None:
    chain.publish(moved(chain.now), fingerprint="")


@_corruption
def false_fingerprint_of_one(chain: PublishedChain) -> None:
    after = moved(chain.now)
    manifest = chain.send(after)
    tensors = (replace(manifest.tensors[0], fingerprint="0" * 32), *manifest.tensors[1:])
    chain.arrive(replace(manifest, tensors=tensors, fingerprint=combined_fingerprint(tensors)), after, after)


@_corruption
def bytes_of_an_earlier_version(chain: PublishedChain) -> None:
    """Give the manifest of a new version the location of the last version."""
    last, after = chain.newest, moved(chain.now)
    assert last is not None
    manifest = chain.send(after)
    chain.arrive(replace(manifest, location=last.location, secret=last.secret), after, after)


# -- the wrong time or place ----------------------------------------------------------------------------------------


@_corruption
def abandoned_incarnation(chain: PublishedChain) -> None:
    """Publish from an abandoned trainer after its successor has published."""
    _successor(chain)
    chain.publish(moved(chain.now))


@_corruption
def receipt_of_an_abandoned_incarnation(chain: PublishedChain) -> None:
    """Submit the receipt of an abandoned version after its trainer's successor has published."""
    after = moved(chain.now)
    manifest = chain.send(after)
    announce, chain.registry.announce = chain.registry.announce, lambda *_: None
    announce(manifest, None)
    _successor(chain, announce)
    chain.arrive(manifest, after, after)


def _successor(chain: PublishedChain, announce: Callable[..., None] | None = None) -> None:
    assert chain.newest is not None
    version = chain.version._replace(incarnation=chain.version.incarnation + 1)
    payload: Payload = "lora" if chain.payload == "lora" else "full"
    successor = replace(chain.newest, version=version, payload=payload, base="")
    (announce or chain.registry.announce)(successor, None)


@_corruption
def delta_without_its_base(chain: PublishedChain) -> None:
    """Receive a delta without base tensors."""
    after = moved(chain.now)
    manifest = chain.send(after)
    chain.registry.announce(manifest, None)
    with Transfer(chain.sender, manifest, after):
        list(chain.transport.receive(manifest, None))


@_corruption
def delta_on_another_base(chain: PublishedChain) -> None:
    """Receive a delta on tensors that differ from its base."""
    name, (array, dtype) = next(iter(chain.receiver.tensors.items()))
    chain.receiver.tensors[name] = (moved([(name, array, dtype), ("", array, dtype)], by=5)[0][1], dtype)
    chain.publish(moved(chain.now))
