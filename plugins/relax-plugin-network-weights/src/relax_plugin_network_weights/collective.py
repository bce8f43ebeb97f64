# SPDX-License-Identifier: Apache-2.0
"""The `collective` transport: sends tensors from the trainer's memory to the receivers' memory by torch.distributed.

No version is stored. `send` describes a version and opens the rendezvous at which receivers join (rendezvous.py).
`transfer` makes a process group of two with each receiver that has joined (pair.py), and sends every bucket to all
receivers. If one receiver hangs, only its pair fails, while a broadcast of gloo or nccl would fail for all receivers.
The default process group is not used.
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
    Tensors,
    Version,
    WeightTransport,
    combined_fingerprint,
)
from relax_core.tensor_files.delta import DeltaBase, check_own_fingerprint, unchanged_names
from relax_core.tensor_files.safetensors_file import Stopwatch, describe
from relax_plugin_network_weights.http import Host
from relax_plugin_network_weights.pair import Incoming, Pair, Sending, on_gpu
from relax_plugin_network_weights.payload import StoredDelta, arrive, buckets, delta_head, keep_whole, whole, wire_bytes
from relax_plugin_network_weights.rendezvous import Receiver, Rendezvous, join


class CollectiveOptions(Options):
    """Options of the collective transport. It does not encrypt weights, so use it only between trusted hosts."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Communication library of torch.distributed. `auto`: nccl if sender and receiver use different GPUs, else gloo."""
    host: Host = "127.0.0.1"
    """Address of the sender's host that receivers can reach; the default serves receivers on the same host only."""
    port: NonNegativeInt = Field(0, le=65535)
    """Port at which receivers join the sender; 0: any free port."""
    bucket_mb: PositiveInt = 32
    """Size of a bucket, the unit of sending, in MiB. Each side holds two buckets and one tensor besides its weights."""
    silence_s: PositiveFloat = 30.0
    """Seconds without progress on a bucket before the sender drops the receiver; transfers to the rest continue."""
    patience_s: PositiveFloat = 30.0
    """Seconds that a receiver waits for a transfer to start before it asks for the newest version again."""


class Collective(WeightTransport[CollectiveOptions]):
    """A live transport that sends tensors from memory to memory, bucket by bucket."""

    payloads: ClassVar[frozenset[str]] = frozenset({"full", "delta", "lora"})
    live: ClassVar[bool] = True

    def __init__(self, options: CollectiveOptions | None = None) -> None:
        super().__init__(options)
        self._rendezvous: Rendezvous | None = None
        self._newest: dict[str, Manifest] = {}
        self._bases: dict[str, DeltaBase] = {}
        """Tensors of the last version by model, the base of the next delta; kept once deltas are requested."""
        self._changes: dict[str, StoredDelta | None] = {}
        """Delta of the newest version by model; None if that version is full or an adapter."""

    # -- the sender ---------------------------------------------------------------------------------------------

    def send(self, version: Version, payload: Payload, base: str, tensors: Tensors, location: str) -> Manifest:
        if payload not in self.payloads:
            raise ValueError(f"payload {payload!r}: this transport moves {', '.join(sorted(self.payloads))}")
        before, kept = self._newest.get(version.model), self._bases.get(version.model)
        watch, change = Stopwatch(), None
        if payload != "lora":
            self._bases.pop(version.model, None)  # if this send fails, the next one must be a full version
        if payload == "delta" and kept is not None:
            if str(kept.version) != base:
                self._bases[version.model] = kept
                raise ValueError(f"{version}: a delta on top of {base}, but {kept.version} was sent last; send it full")
            change = StoredDelta(kept.encode_next(version, tensors, watch), location)
            infos = change.infos
        elif payload == "delta" or (payload == "full" and kept is not None):
            # Deltas are requested, but there is no base yet: send this version whole, as the base of the next delta.
            infos, kept = keep_whole(version, tensors, watch, location)
            payload, base = "full", ""
        else:
            infos = [info for info, _ in describe(watch.each("gather", tensors), watch)]
        if not infos:
            raise ValueError(f"{version}: got no tensors; a full version must hold the whole model")
        if kept is not None:
            self._bases[version.model] = kept
        if self._rendezvous is None:
            self._rendezvous = Rendezvous(self.options.host, self.options.port, self.options.silence_s)
        if before is not None:
            self._rendezvous.close(before)
        manifest = Manifest(
            version, payload, tuple(infos), self._rendezvous.address, base, combined_fingerprint(infos),
            unchanged_names(before, infos), seconds=dict(watch.seconds), live=True,
            secret=self._rendezvous.new_secret(),
        )  # fmt: skip
        manifest = replace(manifest, wire_bytes=wire_bytes(manifest, change.lengths if change is not None else {}))
        self._newest[version.model], self._changes[version.model] = manifest, change
        return manifest

    def transfer(self, manifest: Manifest, tensors: Tensors, receivers: int, wait_s: float) -> int:
        newest = self._newest.get(manifest.version.model)
        if newest is None or self._rendezvous is None or newest.secret != manifest.secret:
            have = newest.version if newest else "nothing"
            raise ValueError(f"{manifest.version}: this sender has {have} to transfer; call send before transfer")
        joined = self._rendezvous.admit(manifest, receivers, wait_s)
        if not joined:
            return 0
        pairs = self._connect(self._rendezvous.host, joined)
        try:
            self._send_buckets(pairs, manifest, tensors)
            return self._rendezvous.took(pairs.keys(), self.options.silence_s)
        finally:
            for pair in pairs.values():
                pair.close()

    def _connect(self, host: str, joined: list[Receiver]) -> dict[Receiver, Pair]:
        """Return a pair for each receiver that connects in time."""
        mine, silence_s = on_gpu(), self.options.silence_s

        def connect(receiver: Receiver) -> Pair | None:
            backend: str = self.options.backend
            if backend == "auto":  # nccl can't join two processes on one GPU
                backend = "nccl" if mine and receiver.gpu and mine != receiver.gpu else "gloo"
            receiver.assign({"backend": backend, "bucket_bytes": self._bucket_bytes, "silence_s": silence_s})
            return Pair.connect(receiver.store(), 0, backend, host, silence_s)

        with ThreadPoolExecutor(len(joined), thread_name_prefix="collective") as threads:
            found = zip(joined, threads.map(connect, joined), strict=True)
            return {receiver: pair for receiver, pair in found if pair is not None}

    def _send_buckets(self, pairs: dict[Receiver, Pair], manifest: Manifest, tensors: Tensors) -> None:
        """Send every bucket to all receivers; drop a receiver that stalls on a bucket."""
        in_flight: deque[list[tuple[Receiver, Sending]]] = deque()
        size = min(self._bucket_bytes, manifest.wire_bytes)
        if manifest.payload != "delta":
            arrays = whole(manifest, tensors)
        elif (change := self._changes[manifest.version.model]) is not None:
            arrays = chain([delta_head(manifest, change.lengths)], change.read(self._bucket_bytes))
        else:
            raise ValueError(f"{manifest.version}: this delta was not sent; call send before each transfer")
        for bucket in buckets(arrays, size):
            sendings = [(receiver, pair.send(bucket)) for receiver, pair in pairs.items()]
            in_flight.append([(receiver, sending) for receiver, sending in sendings if sending is not None])
            if len(in_flight) == 2:  # the next bucket reuses the memory of the older bucket
                self._finish(pairs, in_flight.popleft())
            if not pairs:
                return
        while in_flight:
            self._finish(pairs, in_flight.popleft())

    def _finish(self, pairs: dict[Receiver, Pair], sendings: list[tuple[Receiver, Sending]]) -> None:
        deadline = time.monotonic() + self.options.silence_s
        for receiver, sending in sendings:
            if receiver in pairs and not sending.done(max(0.001, deadline - time.monotonic())):
                pairs.pop(receiver).close()

    def release(self, manifest: Manifest) -> None:
        """Stop offering the version to receivers; nothing is stored."""
        newest = self._newest.get(manifest.version.model)
        if self._rendezvous is not None and newest is not None and newest.secret == manifest.secret:
            del self._newest[manifest.version.model]
            self._rendezvous.close(manifest)

    @property
    def _bucket_bytes(self) -> int:
        return self.options.bucket_mb << 20

    # -- a receiver ---------------------------------------------------------------------------------------------

    def receive(self, manifest: Manifest, resident: Resident | None = None) -> Iterator[tuple[TensorInfo, np.ndarray]]:
        check_own_fingerprint(manifest)
        assignment = join(manifest, on_gpu(), self.options.patience_s, self.options.silence_s)
        pair = Pair.connect(assignment.store(), 1, assignment.backend, assignment.host, assignment.silence_s)
        if pair is None:
            raise InfrastructureError(
                f"{manifest.version}: the sender did not connect within {assignment.silence_s:.0f} s; load again"
            )
        incoming = Incoming(pair, manifest, assignment.bucket_bytes, 3 * assignment.silence_s)
        took = False
        try:
            yield from arrive(manifest, incoming, resident)
            took = True
        finally:
            assignment.leave(took)
            pair.close()
