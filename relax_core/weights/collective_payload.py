# SPDX-License-Identifier: Apache-2.0
"""Tensors as one stream of bytes in manifest order, cut into buckets at the sender and made whole at a receiver.

Neither side holds more than its buckets and one tensor. Nothing here knows how bytes travel.

What a sender of deltas keeps: the last version's bytes and the newest delta, in two nameless files.

In files, because a second model in memory is what nobody has room for; nameless, so that they end with the process.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import numpy as np

from relax_core.api.weights import Manifest, Resident, TensorInfo, Version, tensor_fingerprint
from relax_core.weights import delta
from relax_core.weights.mapped_files import anonymous_file
from relax_core.weights.safetensors_file import NUMPY

Tensors = Iterable[tuple[str, np.ndarray, str]]


class PayloadSource(Protocol):
    """Where a receiver's bytes come from."""

    def read_into(self, target: np.ndarray) -> None:
        """Fill all of `target` [bytes]."""
        ...


def describe(version: Version, tensors: Tensors) -> tuple[tuple[TensorInfo, ...], dict[str, float]]:
    """What a manifest says of tensors, and the seconds that gathering and hashing took."""
    infos: dict[str, TensorInfo] = {}
    began, hashing = time.monotonic(), 0.0
    for name, array, dtype in tensors:
        if name in infos:
            raise ValueError(f"tensor {name!r} was given twice; send each name once")
        _check_dtype(name, array, dtype)
        start = time.monotonic()
        shape = tuple(int(n) for n in array.shape)
        infos[name] = TensorInfo(name, shape, dtype, tensor_fingerprint(array), int(array.nbytes))
        hashing += time.monotonic() - start
    if not infos:
        raise ValueError(f"{version}: no tensors were given; a full version holds the whole model")
    return tuple(infos.values()), {"gather": time.monotonic() - began - hashing, "hash": hashing}


def _check_dtype(name: str, array: np.ndarray, dtype: str) -> None:
    if dtype not in NUMPY:
        raise ValueError(f"tensor {name!r}: dtype {dtype!r} is not one of {', '.join(NUMPY)}")
    if np.dtype(array.dtype) != np.dtype(NUMPY[dtype]):
        raise ValueError(f"tensor {name!r}: a {array.dtype} array is no {dtype}; send {np.dtype(NUMPY[dtype])}")


def whole(manifest: Manifest, tensors: Tensors) -> Iterator[np.ndarray]:
    """The sender's bytes of a full version or an adapter: exactly what the manifest says."""
    given = iter(tensors)
    for info in manifest.tensors:
        name, array, dtype = next(given, ("nothing", np.empty(0, np.uint8), ""))
        if (name, dtype, tuple(array.shape)) != (info.name, info.dtype, info.shape):
            raise ValueError(f"{manifest.version}: got {name}, want {info.name}; send before each transfer")
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def buckets(arrays: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Views of two alternating buffers: one may be on its way while the other is filled."""
    filling, resting = np.empty(size, np.uint8), np.empty(size, np.uint8)
    used = 0
    for data in arrays:
        while len(data):
            part = data[: size - used]
            filling[used : used + len(part)] = part
            used, data = used + len(part), data[len(part) :]
            if used == size:
                yield filling
                filling, resting, used = resting, filling, 0
    if used:
        yield filling[:used]


def arrive(
    manifest: Manifest, source: PayloadSource, resident: Resident | None
) -> Iterator[tuple[TensorInfo, np.ndarray]]:
    """Whole tensors, each checked; all in the same memory, which the next one overwrites."""
    if manifest.payload == "delta" and resident is None:
        raise ValueError(
            f"{manifest.version}: a delta on top of {manifest.base}, and no base; load a full version first"
        )
    lengths = _lengths(manifest, source) if manifest.payload == "delta" else []
    memory = np.empty(max((info.size_bytes for info in manifest.sent), default=0), np.uint8)
    for at, info in enumerate(manifest.sent):
        array = memory[: info.size_bytes].view(NUMPY[info.dtype]).reshape(info.shape)
        if resident is None or manifest.payload != "delta":
            source.read_into(memory[: info.size_bytes])
        else:
            _apply(manifest, info, array, source, lengths[at], resident)
        if (got := tensor_fingerprint(array)) != info.fingerprint:
            raise ValueError(f"{manifest.version} {info.name}: have {got}, want {info.fingerprint}; publish again")
        yield info, array


def wire_bytes(manifest: Manifest, lengths: Mapping[str, int]) -> int:
    """What travels; `lengths` of a delta's parts."""
    if manifest.payload != "delta":
        return manifest.size_bytes
    return sum(8 + lengths[info.name] for info in manifest.sent)


def delta_head(manifest: Manifest, lengths: Mapping[str, int]) -> np.ndarray:
    """What a delta begins with: how long each tensor's part is."""
    if unknown := sorted({info.name for info in manifest.sent} - lengths.keys()):
        raise ValueError(f"{manifest.version}: {unknown} are not in the delta that was sent; send before each transfer")
    return np.array([lengths[info.name] for info in manifest.sent], "<u8").view(np.uint8)


def _lengths(manifest: Manifest, source: PayloadSource) -> list[int]:
    head = np.empty(len(manifest.sent), "<u8")
    source.read_into(head.view(np.uint8))
    lengths = [int(length) for length in head]
    if head.nbytes + sum(lengths) != manifest.wire_bytes:
        raise ValueError(f"{manifest.version}: its delta contradicts its manifest; publish again")
    return lengths


def _apply(
    manifest: Manifest, info: TensorInfo, array: np.ndarray, source: PayloadSource, length: int, resident: Resident
) -> None:
    """Make the new tensor of the old one."""
    old = resident(info.name)
    if (old.dtype, tuple(old.shape)) != (array.dtype, info.shape):
        raise ValueError(
            f"{manifest.version} {info.name}: have {old.dtype} {old.shape}, want {info.dtype} {info.shape}"
        )
    np.copyto(array, old)
    piece = np.empty(length, np.uint8)
    source.read_into(piece)
    delta.apply(array, piece.data)


class CollectiveDeltaBase:
    """Of one model."""

    def __init__(self, location: str) -> None:
        self.version: Version | None = None
        """None while it is being replaced: what failed half way is no base."""
        self.lengths: dict[str, int] = {}
        """By name: bytes of the newest delta; 0 where nothing changed."""
        self._places: dict[str, tuple[int, str, tuple[int, ...]]] = {}
        self._size = 0
        self._base, self._delta = anonymous_file(location), anonymous_file(location)

    def replace(self, version: Version, tensors: Tensors, *, whole: bool) -> Iterator[tuple[str, np.ndarray, str]]:
        """Pass tensors on, keep them as the base of the next delta, and (not `whole`) what changed since the last."""
        self.version, self.lengths = None, {}
        self._delta.seek(0)
        self._delta.truncate()
        if whole:
            self._places, self._size = {}, 0
        for name, array, dtype in tensors:
            self._keep(name, array, dtype, whole)
            yield name, array, dtype
        self._delta.flush()
        self.version = version

    def _keep(self, name: str, array: np.ndarray, dtype: str, whole: bool) -> None:
        if whole:
            self._places[name] = (self._size, dtype, tuple(array.shape))
            self._size += array.nbytes
        else:
            piece = delta.encode(self._old(name, array, dtype), array)
            self.lengths[name] = len(piece)
            self._delta.write(piece)
            if not piece:
                return
        self._base.seek(self._places[name][0])
        self._base.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def _old(self, name: str, array: np.ndarray, dtype: str) -> np.ndarray:
        place, *known = self._places.get(name, (0, "nothing", ()))
        if tuple(known) != (dtype, tuple(array.shape)):
            raise ValueError(f"{name}: {dtype} {array.shape} has no base of this kind: {known}; send a full version")
        old = np.empty(array.shape, NUMPY[dtype])
        self._base.seek(place)
        self._base.readinto(old.reshape(-1).view(np.uint8).data)  # type: ignore[attr-defined]
        return old

    def read_delta(self, chunk_bytes: int) -> Iterator[np.ndarray]:
        """The newest delta's bytes in order."""
        self._delta.seek(0)
        while chunk := self._delta.read(chunk_bytes):
            yield np.frombuffer(chunk, np.uint8)
