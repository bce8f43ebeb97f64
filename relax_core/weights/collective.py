# SPDX-License-Identifier: Apache-2.0
"""The `collective` transport: tensors go from the trainer's memory to the receivers', through torch.distributed.

Nothing is stored. `send` says what will come and where the door is (door.py); `transfer` seats who has come and hands
every bucket to each of them over a group of two (pair.py). A fan of pairs and no broadcast: a broadcast of gloo or nccl
fails as a whole when one member hangs, a pair fails alone. The default process group is never touched.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from relax_core.api.errors import InfrastructureError
from relax_core.api.options import Options
from relax_core.api.weights import (
    Manifest,
    Payload,
    Resident,
    TensorInfo,
    Version,
    WeightTransport,
    combined_fingerprint,
)
from relax_core.weights.collective_pair import Incoming, Pair, Sending, on_gpu
from relax_core.weights.collective_payload import (
    CollectiveDeltaBase,
    Tensors,
    arrive,
    buckets,
    delta_head,
    describe,
    whole,
    wire_bytes,
)
from relax_core.weights.collective_rendezvous import Receiver, Rendezvous, join
from relax_core.weights.http import Host


class CollectiveOptions(Options):
    """How live weights travel. It is for networks whose hosts trust each other: what travels is not encrypted."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """`auto`: nccl where sender and receiver work on different GPUs, else gloo."""
    host: Host = "127.0.0.1"
    """Address of the sender's host that receivers reach; the default serves one host."""
    port: NonNegativeInt = Field(0, le=65535)
    """Of the sender's door; 0: any free one."""
    bucket_mb: PositiveInt = 32
    """Bytes on their way at once; a side holds two buckets and one tensor beyond its own weights."""
    silence_s: PositiveFloat = 30.0
    """Longest time without progress of one bucket; a receiver that is slower is cut off, the others go on."""
    patience_s: PositiveFloat = 30.0
    """How long a receiver that found nobody handing out stays at the door before it asks for the newest version again."""


class Collective(WeightTransport[CollectiveOptions]):
    """Hands tensors out from memory to memory, bucket by bucket."""

    payloads: ClassVar[frozenset[str]] = frozenset({"full", "delta", "lora"})
    live: ClassVar[bool] = True

    def __init__(self, options: CollectiveOptions | None = None) -> None:
        super().__init__(options)
        self._door: Rendezvous | None = None
        self._newest: dict[str, Manifest] = {}
        self._kept: dict[str, CollectiveDeltaBase] = {}

    # -- the sender ---------------------------------------------------------------------------------------------

    def send(
        self,
        version: Version,
        payload: Payload,
        base: str,
        tensors: Tensors,
        location: str,
    ) -> Manifest:
        if payload not in self.payloads:
            raise ValueError(f"payload {payload!r}: this transport moves {', '.join(sorted(self.payloads))}")
        before, kept = self._newest.get(version.model), self._kept.get(version.model)
        if payload == "delta":
            if kept is None:  # nobody said that deltas would be wanted: this one is whole, and the base of the next
                kept, payload, base = self._kept.setdefault(version.model, CollectiveDeltaBase(location)), "full", ""
            elif str(kept.version) != base:
                raise ValueError(f"{version}: a delta on top of {base}, but {kept.version} was sent last; send it full")
        if kept is not None and payload != "lora":
            tensors = kept.replace(version, tensors, whole=payload == "full")
        infos, seconds = describe(version, tensors)
        known = {info.name: info.fingerprint for info in before.tensors} if before else {}
        unchanged = tuple(info.name for info in infos if known.get(info.name) == info.fingerprint)
        door = self._open_door()
        if before is not None:
            door.close(before)
        manifest = Manifest(
            version, payload, infos, door.address, base, combined_fingerprint(infos), unchanged, seconds=seconds, live=True,
            secret=door.new_secret(),
        )  # fmt: skip
        lengths = kept.lengths if kept is not None and payload == "delta" else {}
        manifest = replace(manifest, wire_bytes=wire_bytes(manifest, lengths))
        self._newest[version.model] = manifest
        return manifest

    def _open_door(self) -> Rendezvous:
        if self._door is None:
            self._door = Rendezvous(self.options.host, self.options.port, self.options.silence_s)
        return self._door

    def transfer(self, manifest: Manifest, tensors: Tensors, receivers: int, wait_s: float) -> int:
        newest = self._newest.get(manifest.version.model)
        if newest is None or self._door is None or newest.secret != manifest.secret:
            have = newest.version if newest else "nothing"
            raise ValueError(f"{manifest.version}: this sender has {have} to hand out; send before transfer")
        guests = self._door.admit(manifest, receivers, wait_s)
        if not guests:
            return 0
        pairs = self._seat(manifest, guests)
        try:
            self._hand_out(pairs, manifest, tensors)
            return self._door.took(pairs.keys(), self.options.silence_s)
        finally:
            for pair in pairs.values():
                pair.close()

    def _seat(self, manifest: Manifest, guests: list[Receiver]) -> dict[Receiver, Pair]:
        """A pair with each of them that answers in time."""
        door = self._open_door()

        def seat(guest: Receiver) -> Pair | None:
            backend = self._backend(guest)
            guest.seat({"backend": backend, "bucket_bytes": self._bucket_bytes, "silence_s": self.options.silence_s})
            return Pair.connect(guest.store(), 0, backend, door.host, self.options.silence_s)

        with ThreadPoolExecutor(len(guests), thread_name_prefix="seat") as threads:
            found = zip(guests, threads.map(seat, guests), strict=True)
            return {guest: pair for guest, pair in found if pair is not None}

    def _backend(self, guest: Receiver) -> str:
        """nccl can't join two processes on one GPU."""
        if self.options.backend != "auto":
            return self.options.backend
        mine = on_gpu()
        return "nccl" if mine and guest.gpu and mine != guest.gpu else "gloo"

    def _hand_out(self, pairs: dict[Receiver, Pair], manifest: Manifest, tensors: Tensors) -> None:
        """Every bucket to all; whoever stalls on one is left out of the rest."""
        under_way: deque[list[tuple[Receiver, Sending]]] = deque()
        size = min(self._bucket_bytes, manifest.wire_bytes)
        for bucket in buckets(self._bytes(manifest, tensors), size):
            under_way.append(
                [(guest, sending) for guest, pair in list(pairs.items()) if (sending := pair.send(bucket)) is not None]
            )
            if len(under_way) == 2:  # the next bucket is filled into the older one's memory
                self._finish(pairs, under_way.popleft())
            if not pairs:
                return
        while under_way:
            self._finish(pairs, under_way.popleft())

    def _bytes(self, manifest: Manifest, tensors: Tensors) -> Iterator[np.ndarray]:
        if manifest.payload != "delta":
            return whole(manifest, tensors)
        kept = self._kept[manifest.version.model]
        return chain([delta_head(manifest, kept.lengths)], kept.read_delta(self._bucket_bytes))

    def _finish(self, pairs: dict[Receiver, Pair], sendings: list[tuple[Receiver, Sending]]) -> None:
        deadline = time.monotonic() + self.options.silence_s
        for guest, sending in sendings:
            if guest in pairs and not sending.done(max(0.001, deadline - time.monotonic())):
                pairs.pop(guest).close()

    def release(self, manifest: Manifest) -> None:
        """Nothing is stored; the sender itself stops handing it out."""
        newest = self._newest.get(manifest.version.model)
        if self._door is not None and newest is not None and newest.secret == manifest.secret:
            del self._newest[manifest.version.model]
            self._door.close(manifest)

    @property
    def _bucket_bytes(self) -> int:
        return self.options.bucket_mb << 20

    # -- a receiver ---------------------------------------------------------------------------------------------

    def receive(self, manifest: Manifest, resident: Resident | None = None) -> Iterator[tuple[TensorInfo, np.ndarray]]:
        if manifest.fingerprint != combined_fingerprint(manifest.tensors):
            raise ValueError(f"{manifest.version}: the manifest contradicts its own fingerprint; publish again")
        seat = join(manifest, on_gpu(), self.options.patience_s, self.options.silence_s)
        pair = Pair.connect(seat.store(), 1, seat.backend, seat.host, seat.silence_s)
        if pair is None:
            raise InfrastructureError(f"{manifest.version}: its sender did not answer within {seat.silence_s:.0f} s")
        incoming = Incoming(pair, manifest, seat.bucket_bytes, 3 * seat.silence_s)
        took = False
        try:
            yield from arrive(manifest, incoming, resident)
            took = True
        finally:
            seat.leave(took)
            pair.close()
