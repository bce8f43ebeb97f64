# SPDX-License-Identifier: Apache-2.0
"""The fixture of weight transport tests: a sender, a plain receiver, and the real chain between them.

The receiver performs no checks: it copies the tensors that arrive and submits the fingerprints of its copy. So a
detected corruption was detected by the transport or by the proofs of the weight service.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from relax_core.api.component import Chosen
from relax_core.api.errors import InfrastructureError, RelaxError
from relax_core.api.weights import (
    PLAIN,
    Manifest,
    Payload,
    Receipt,
    TensorInfo,
    Version,
    WeightTransport,
    combined_fingerprint,
    tensor_fingerprint,
)
from relax_core.weights.registry import WeightRegistry, prove_successor

Tensors = Sequence[tuple[str, np.ndarray, str]]
REFUSED = (ValueError, RelaxError)
WAIT_S = 5.0
"""Seconds that a live sender waits for its receiver; the wait is in vain if the receiver has refused the manifest."""


def infos_of(tensors: Tensors) -> tuple[TensorInfo, ...]:
    return tuple(
        TensorInfo(name, array.shape, dtype, tensor_fingerprint(array), array.nbytes) for name, array, dtype in tensors
    )


class Transfer:
    """A thread in which a live sender transfers a version during the `with` block; a stored version needs no thread."""

    def __init__(self, sender: WeightTransport, manifest: Manifest, tensors: Tensors, receivers: int = 1) -> None:
        self.took, self.error = 0, ""
        self._work = (sender, manifest, tensors, receivers)
        self._thread = threading.Thread(target=self._run, name="transfer") if sender.live else None

    def _run(self) -> None:
        sender, manifest, tensors, receivers = self._work
        try:
            self.took = sender.transfer(manifest, tensors, receivers, WAIT_S)
        except REFUSED as error:  # the receiver fails too and reports the error
            self.error = str(error)

    def __enter__(self) -> Transfer:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.join()


@dataclass
class Receiver:
    """A model that loads all arriving tensors without checks."""

    name: str
    tensors: dict[str, tuple[np.ndarray, str]]
    honest: bool = True
    """False if receipts repeat the manifest's fingerprints; True if they have fingerprints of the loaded tensors."""

    def load(self, transport: WeightTransport, manifest: Manifest) -> Receipt:
        arrived = []
        for info, array in transport.receive(manifest, lambda name: self.tensors[name][0]):
            self.tensors[info.name] = (np.array(array), info.dtype)
            arrived.append(info.name)
        if not self.honest:
            return self._receipt(manifest, manifest.wire_fingerprint, manifest.fingerprint)
        wire = combined_fingerprint(infos_of([(name, *self.tensors[name]) for name in arrived]))
        resident = combined_fingerprint(infos_of([(name, *value) for name, value in self.tensors.items()]))
        return self._receipt(manifest, wire, resident)

    def _receipt(self, manifest: Manifest, wire: str, resident: str) -> Receipt:
        return Receipt(self.name, manifest.version, "resident", wire, resident=resident, layout=PLAIN)


class ImmediateRegistry:
    """A `WeightRegistry` with synchronous calls that must not wait, and a clock that the test sets through `time`."""

    def __init__(self) -> None:
        self.time = 0.0
        self._registry = WeightRegistry(self)
        self.announce: Any = self.__getattr__("announce")

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("a call of the registry would wait")

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._registry, name)

        def call(*args: Any, **named: Any) -> Any:
            try:
                method(*args, **named).send(None)
            except StopIteration as end:
                return end.value
            raise AssertionError(f"{name} of the registry would wait")

        return call


@dataclass
class PublishedChain:
    """A chain of publishes from one trainer to one receiver, through the real weight service."""

    sender: WeightTransport
    transport: WeightTransport
    """The receiver's transport instance."""
    location: str
    payload: Payload
    receiver: Receiver
    now: Tensors = ()
    """Tensors of the trainer after the last publish."""
    newest: Manifest | None = None
    registry: ImmediateRegistry = field(default_factory=ImmediateRegistry)

    @classmethod
    def begin(
        cls, sender: WeightTransport, transport: WeightTransport, location: str, payload: Payload, tensors: Tensors,
        honest: bool = True,
    ) -> PublishedChain:  # fmt: skip
        """Make a chain whose first version is received and proved."""
        receiver = Receiver("engine-0", {}, honest)
        chain = cls(sender, transport, location, payload, receiver)
        if payload == "delta":
            _ = chain.publish(tensors, payload="full")
            if sender.live:  # a live sender learns from its first delta that deltas are used
                chain.publish(moved(tensors), payload="delta")
        else:
            chain.publish(tensors)
        return chain

    @property
    def version(self) -> Version:
        """The version published last; actor@0.0 before the first."""
        return self.newest.version if self.newest else Version("actor", 0, 0)

    def publish(
        self, tensors: Tensors, wire: Tensors | None = None, payload: Payload | None = None, **false_fields: object
    ) -> Receipt:
        """Publish the trainer's `tensors` and receive them.

        `wire`: tensors to send in their place. `false_fields`: false values for fields of the manifest.
        """
        manifest, sent = self.send(tensors, wire, payload, **false_fields), tensors if wire is None else wire
        return self.arrive(manifest, sent, tensors)

    def send(
        self, tensors: Tensors, wire: Tensors | None = None, payload: Payload | None = None, **false_fields: object
    ) -> Manifest:
        kind = payload or self.payload
        base = str(self.version) if kind == "delta" else ""
        sent = tensors if wire is None else wire
        manifest = self.sender.send(self.version.next(), kind, base, sent, self.location)
        if wire is not None:
            manifest = self._honest(manifest, tensors)
        return replace(manifest, **false_fields)  # type: ignore[arg-type]

    def _honest(self, manifest: Manifest, tensors: Tensors) -> Manifest:
        """Return the manifest with the infos and fingerprints of `tensors`, although different tensors were sent."""
        infos = infos_of(tensors)
        known = {info.name: info.fingerprint for info in self.newest.tensors} if self.newest else {}
        unchanged = tuple(info.name for info in infos if known.get(info.name) == info.fingerprint)
        return replace(
            manifest, tensors=infos, fingerprint=combined_fingerprint(infos), unchanged=unchanged,
            wire_bytes=manifest.wire_bytes if manifest.payload == "delta" else sum(info.size_bytes for info in infos),
        )  # fmt: skip

    def arrive(self, manifest: Manifest, sent: Tensors, tensors: Tensors) -> Receipt:
        """Announce a manifest, receive its version and prove the receipt; raise an error if a step is refused."""
        prove_successor(self.newest, manifest, applied=self.newest is not None)
        self.registry.announce(manifest, Chosen("weight-transport", "tested"))
        with Transfer(self.sender, manifest, sent):
            receipt = self.receiver.load(self.transport, manifest)
        if not self.registry.receipt(receipt):
            raise InfrastructureError(f"{receipt.version}: the receipt is refused, since its version was abandoned")
        self.newest, self.now = manifest, tensors
        return receipt


def moved(tensors: Tensors, by: int = 1) -> list[tuple[str, np.ndarray, str]]:
    """Imitate a training step: add `by` to the bits of every third element, in all tensors but the last."""
    after = [(name, np.array(array), dtype) for name, array, dtype in tensors]
    for _, array, _ in after[:-1]:
        bits = array.reshape(-1).view(f"u{array.itemsize}")
        bits[::3] += by
    return after
