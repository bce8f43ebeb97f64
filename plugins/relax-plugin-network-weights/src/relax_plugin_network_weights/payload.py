# SPDX-License-Identifier: Apache-2.0
"""Tensors as one stream of bytes, in manifest order, which a sender cuts into buckets and a receiver turns back.

Each side holds at most its buckets and one tensor. A sender of deltas keeps the last version and the newest delta in
files without names, which the system deletes when the process ends. This module does no communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import numpy as np

from relax_core.api.weights import Manifest, Resident, TensorInfo, Tensors, Version
from relax_core.tensor_files import safetensors_file
from relax_core.tensor_files.delta import DeltaBase, restore
from relax_core.tensor_files.mapped_files import anonymous_file
from relax_core.tensor_files.safetensors_file import NUMPY, Stopwatch

_HEADER_BYTES = 1 << 14


class PayloadSource(Protocol):
    """A receiver's source of bytes, in order."""

    def read_into(self, target: np.ndarray) -> None:
        """Fill all of `target` [bytes]."""
        ...


def keep_whole(
    version: Version, tensors: Tensors, watch: Stopwatch, location: str
) -> tuple[list[TensorInfo], DeltaBase]:
    """Write a full version to a file without a name; return descriptions of its tensors and the next delta's base."""
    file = anonymous_file(location)
    infos, _ = safetensors_file.write(file, watch.each("gather", tensors), {}, _HEADER_BYTES, watch)
    file.flush()

    def load() -> dict[str, np.ndarray]:
        return safetensors_file.parse(np.memmap(file, np.uint8, "r+")).tensors

    return infos, DeltaBase(version, load, infos)


class StoredDelta:
    """The newest delta of one model, tensor by tensor, in a file without a name."""

    def __init__(self, changes: Iterable[tuple[TensorInfo, bytes]], location: str) -> None:
        self.infos: list[TensorInfo] = []
        self.lengths: dict[str, int] = {}
        """Size in bytes of each tensor's part of the delta, by tensor name; 0 for an unchanged tensor."""
        self._file = anonymous_file(location)
        for info, change in changes:
            self.infos.append(info)
            self.lengths[info.name] = self._file.write(change)
        self._file.flush()

    def read(self, chunk_bytes: int) -> Iterator[np.ndarray]:
        """Yield the delta's bytes in order."""
        self._file.seek(0)
        while chunk := self._file.read(chunk_bytes):
            yield np.frombuffer(chunk, np.uint8)


def whole(manifest: Manifest, tensors: Tensors) -> Iterator[np.ndarray]:
    """Yield the bytes of a full version or an adapter. Raises ValueError if the tensors are not the manifest's."""
    given = iter(tensors)
    for info in manifest.tensors:
        name, array, dtype = next(given, ("nothing", np.empty(0, np.uint8), ""))
        if (name, dtype, tuple(array.shape)) != (info.name, info.dtype, info.shape):
            raise ValueError(f"{manifest.version}: got {name}, want {info.name}; call send before each transfer")
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def buckets(arrays: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Yield buckets in two alternating buffers, so that one can be sent while the next is filled."""
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
    """Yield whole, checked tensors. In a full version all use one buffer: each tensor overwrites the previous."""
    is_delta = manifest.payload == "delta"
    lengths = [info.size_bytes for info in manifest.sent]
    if is_delta:
        head = np.empty(len(manifest.sent), "<u8")
        source.read_into(head.view(np.uint8))
        lengths = [int(length) for length in head]
        if head.nbytes + sum(lengths) != manifest.wire_bytes:
            raise ValueError(f"{manifest.version}: the delta's lengths contradict the manifest; publish again")
    memory = np.empty(max(lengths, default=0), np.uint8)
    for info, length in zip(manifest.sent, lengths, strict=True):
        source.read_into(memory[:length])
        arrived = memory[:length] if is_delta else memory[:length].view(NUMPY[info.dtype]).reshape(info.shape)
        yield info, restore(manifest, info, arrived, resident)


def wire_bytes(manifest: Manifest, lengths: Mapping[str, int]) -> int:
    """Return the number of bytes to send; `lengths` are the byte lengths of a delta's parts by tensor name."""
    if manifest.payload != "delta":
        return manifest.size_bytes
    return sum(8 + lengths[info.name] for info in manifest.sent)


def delta_head(manifest: Manifest, lengths: Mapping[str, int]) -> np.ndarray:
    """Return the head of a delta's bytes: the length of each tensor's part as uint64."""
    if unknown := sorted({info.name for info in manifest.sent} - lengths.keys()):
        raise ValueError(f"{manifest.version}: {unknown} are not in the delta; call send before each transfer")
    return np.array([lengths[info.name] for info in manifest.sent], "<u8").view(np.uint8)
