# SPDX-License-Identifier: Apache-2.0
"""What changed in one tensor, bit for bit: positions as gaps, values as differences of their bits, compressed.

Measured against XOR + zstd in `tests/unit/weights/test_delta.py`. It works block by block, so that a large tensor needs
no large scratch; a damaged delta raises ValueError or gives bytes whose fingerprint differs.

What a sender sent last, as the thing that a delta is made against.

It costs nothing until a delta is made: then a copy of the last full file follows what is sent. On a disk the copy is a
nameless file; of a memory-backed one only the pages that change are copied, which in the end are nearly all.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import zstandard

from relax_core.api.weights import Payload, TensorInfo, Version
from relax_core.weights import safetensors_file
from relax_core.weights.stopwatch import Stopwatch

BLOCK_ELEMENTS = 1 << 22
"""Scratch is about 16 bytes for each of them."""
_LEVEL = 1
"""Higher levels of zstd cost several times the time for a few percent."""
_ESCAPE = 255
_HEAD = struct.Struct("<IIII")
"""Changed elements, long gaps, bytes of the frame, bytes of it when decompressed."""


def encode(old: np.ndarray, new: np.ndarray) -> bytes:
    """What turns `old` into `new`; both of one dtype and size. Empty where nothing changed."""
    before, after = _bits(old), _bits(new)
    if before.dtype != after.dtype or before.size != after.size:
        raise ValueError(f"delta from {old.dtype} {old.shape} to {new.dtype} {new.shape}: they must be alike")
    blocks = [_encode_block(before[part], after[part]) for part in _parts(after.size)]
    return b"".join(blocks) if any(len(block) > _HEAD.size for block in blocks) else b""


def apply(array: np.ndarray, delta: bytes | memoryview) -> None:
    """Turn the old array into the new one, in place; it must be contiguous. ValueError where the delta is damaged."""
    if not array.flags.c_contiguous:
        raise ValueError("a delta is applied in place: the array must be contiguous")
    if len(delta) == 0:
        return
    target, offset = _bits(array), 0
    for part in _parts(target.size):
        if len(delta) < offset + _HEAD.size:
            raise ValueError("the delta ends before the tensor does")
        count, long_gaps, size, raw_size = _HEAD.unpack_from(delta, offset)
        offset += _HEAD.size
        if count:
            _apply_block(target[part], delta[offset : offset + size], count, long_gaps, raw_size)
        offset += size
    if offset != len(delta):
        raise ValueError(f"the delta has {len(delta) - offset} bytes too many")


def _bits(array: np.ndarray) -> np.ndarray:
    """Flat, as unsigned integers of the element's width."""
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")


def _parts(size: int) -> Iterator[slice]:
    return (slice(begin, begin + BLOCK_ELEMENTS) for begin in range(0, size, BLOCK_ELEMENTS))


def _encode_block(before: np.ndarray, after: np.ndarray) -> bytes:
    places = np.flatnonzero(before != after)
    if not len(places):
        return _HEAD.pack(0, 0, 0, 0)
    gaps = np.diff(places, prepend=-1) - 1
    long_gaps = gaps[gaps >= _ESCAPE].astype("<u4")
    short = np.minimum(gaps, _ESCAPE).astype(np.uint8)
    raw = short.tobytes() + long_gaps.tobytes() + _planes(_folded(after[places] - before[places])).tobytes()
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(raw)
    return _HEAD.pack(len(places), len(long_gaps), len(frame), len(raw)) + frame


def _apply_block(target: np.ndarray, frame: bytes | memoryview, count: int, long_gaps: int, raw_size: int) -> None:
    width = target.dtype.itemsize
    if count > target.size or long_gaps > count or raw_size != count * (1 + width) + 4 * long_gaps:
        raise ValueError(f"the delta's header is damaged: {count} changes, {raw_size} bytes for {target.size} elements")
    try:
        if zstandard.get_frame_parameters(frame).content_size != raw_size:
            raise ValueError("the delta is damaged: its frame contradicts its header")
        raw = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame, max_output_size=raw_size), np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"the delta is damaged: {error}") from error
    gaps = raw[:count].astype(np.int64)
    longer = gaps == _ESCAPE
    if int(longer.sum()) != long_gaps:
        raise ValueError("the delta is damaged: its gaps contradict its header")
    gaps[longer] = raw[count : count + 4 * long_gaps].view("<u4")
    places = np.cumsum(gaps + 1) - 1
    if places[-1] >= target.size:
        raise ValueError("the delta is damaged: a change lies behind the tensor's end")
    values = np.ascontiguousarray(raw[count + 4 * long_gaps :].reshape(width, count).T).reshape(-1)
    target[places] += _unfolded(values.view(target.dtype))


def _folded(difference: np.ndarray) -> np.ndarray:
    """Small steps up and down become small numbers: 0, -1, 1, -2, ... -> 0, 1, 2, 3, ..."""
    signed = difference.view(f"i{difference.dtype.itemsize}")
    sign = (signed >> (8 * difference.dtype.itemsize - 1)).view(difference.dtype)
    folded: np.ndarray = (difference << 1) ^ sign
    return folded


def _unfolded(folded: np.ndarray) -> np.ndarray:
    one = folded.dtype.type(1)
    difference: np.ndarray = (folded >> one) ^ (~(folded & one) + one)
    return difference


def _planes(values: np.ndarray) -> np.ndarray:
    """All low bytes, then all next ones: high bytes are mostly zero, and zstd sees it."""
    return np.ascontiguousarray(values.view(np.uint8).reshape(len(values), -1).T)


Tensors = Iterable[tuple[str, np.ndarray, str]]


class LastSent:
    """Of one model; a full version begins it, deltas move it on."""

    def __init__(
        self, version: Version, payload: Payload, infos: Iterable[TensorInfo], path: Path, directory: Path,
        in_memory: bool,
    ) -> None:  # fmt: skip
        """`in_memory`: the file is memory, written over once it is released unless it is read."""
        self.version, self._payload, self._path = version, payload, path
        self._directory, self._in_memory = directory, in_memory
        self.infos = {info.name: info for info in infos}
        self._arrays: dict[str, np.ndarray] = {}

    def unchanged(self, infos: Iterable[TensorInfo]) -> tuple[str, ...]:
        """Names whose bytes are those of the last version."""
        return tuple(i.name for i in infos if i.name in self.infos and self.infos[i.name].fingerprint == i.fingerprint)

    def refuse_base(self, version: Version, base: str) -> None:
        """ValueError unless `base` names what was sent last and that was a whole model."""
        if self._payload == "lora" or base != str(self.version):
            raise ValueError(
                f"{version}: a delta on top of {base or 'nothing'}, but {self.version} ({self._payload}) was sent last; "
                "send a full version"
            )

    def changes(self, tensors: Tensors, infos: list[TensorInfo], watch: Stopwatch) -> Iterator[tuple[str, bytes]]:
        """Deltas of the tensors that changed; fills `infos` with what all of them are now."""
        if not self._arrays:
            self._arrays = self._writable()
        for name, array, dtype in watch.each("gather", tensors):
            data = safetensors_file.checked(name, array, dtype)
            with watch.timing("hash"):
                info = safetensors_file.described(name, data, dtype)
            before = self._alike(info)
            infos.append(info)
            if before.fingerprint != info.fingerprint:
                with watch.timing("write"):
                    old = self._arrays[name]
                    encoded = encode(old, data)
                    np.copyto(old, data)
                yield name, encoded

    def _writable(self) -> dict[str, np.ndarray]:
        names, path = list(self.infos), self._path
        held = safetensors_file.private(path) if self._in_memory else safetensors_file.copied(path, self._directory)
        return dict(zip(names, safetensors_file.read(path, names, held), strict=True))

    def _alike(self, info: TensorInfo) -> TensorInfo:
        before = self.infos.get(info.name)
        if before is None or (before.dtype, before.shape) != (info.dtype, info.shape):
            have = "nothing" if before is None else f"{before.dtype} {before.shape}"
            raise ValueError(f"{info.name}: {info.dtype} {info.shape}, but {have} before; send a full version")
        return before

    def move_on(self, version: Version, infos: Iterable[TensorInfo]) -> None:
        """The delta was written: this is what was sent last now."""
        self.version, self._payload = version, "full"
        self.infos = {info.name: info for info in infos}
