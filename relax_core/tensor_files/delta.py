# SPDX-License-Identifier: Apache-2.0
"""Deltas of tensors, exact in every bit: positions as gaps, values as differences of their bits, compressed.

Measured against XOR + zstd in `tests/unit/weights/test_delta.py`. Encoding works block by block, so that a large tensor needs
no large scratch; a damaged delta raises ValueError or gives bytes whose fingerprint differs. `DeltaBase` holds the version that
a sender makes the next delta against, or that a receiver puts it on.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property

import numpy as np
import zstandard

from relax_core.api.weights import (
    Manifest,
    Resident,
    TensorInfo,
    Tensors,
    Version,
    combined_fingerprint,
    tensor_fingerprint,
)
from relax_core.tensor_files.safetensors_file import NUMPY, Stopwatch, describe

BLOCK_ELEMENTS = 1 << 22
"""Scratch is about 16 bytes for each of them."""
_LEVEL = 1
"""Higher levels of zstd cost several times the time for a few percent."""
_ESCAPE = 255
_HEAD = struct.Struct("<IIII")
"""Changed elements, long gaps, bytes of the frame, bytes of it when decompressed."""


def encode(old: np.ndarray, new: np.ndarray) -> bytes:
    """Encode the change from `old` to `new`, of one dtype and size; empty where nothing changed."""
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
    """View an array flat, as unsigned integers of the element's width."""
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
    """Make small numbers of small steps up and down: 0, -1, 1, -2, ... -> 0, 1, 2, 3, ..."""
    signed = difference.view(f"i{difference.dtype.itemsize}")
    sign = (signed >> (8 * difference.dtype.itemsize - 1)).view(difference.dtype)
    folded: np.ndarray = (difference << 1) ^ sign
    return folded


def _unfolded(folded: np.ndarray) -> np.ndarray:
    one = folded.dtype.type(1)
    difference: np.ndarray = (folded >> one) ^ (~(folded & one) + one)
    return difference


def _planes(values: np.ndarray) -> np.ndarray:
    """Put all low bytes first, then all next ones: high bytes are mostly zero, and zstd sees it."""
    return np.ascontiguousarray(values.view(np.uint8).reshape(len(values), -1).T)


def check_own_fingerprint(manifest: Manifest) -> None:
    """Raise ValueError where a manifest's fingerprint is not that of its tensors."""
    if manifest.fingerprint != combined_fingerprint(manifest.tensors):
        raise ValueError(f"{manifest.version}: the manifest contradicts its own fingerprint; publish again")


def restore(manifest: Manifest, info: TensorInfo, arrived: np.ndarray, resident: Resident | None) -> np.ndarray:
    """Return a tensor of the manifest, checked: what arrived, or of a delta what that makes of the receiver's own tensor."""
    array, version = arrived, manifest.version
    if manifest.payload == "delta":
        if resident is None:
            raise ValueError(f"{version}: a delta on top of {manifest.base}, and nothing to put it on; take a full one")
        array = np.array(resident(info.name), order="C")
        if (array.dtype, array.shape) != (np.dtype(NUMPY[info.dtype]), info.shape):
            raise ValueError(f"{version} {info.name}: have {array.dtype} {array.shape}, want {info.dtype} {info.shape}")
        try:
            apply(array, arrived.data)
        except ValueError as error:
            raise ValueError(f"{version} {info.name}: {error}; publish again") from error
    if (got := tensor_fingerprint(array)) != info.fingerprint:
        raise ValueError(f"{version} {info.name}: have {got}, want {info.fingerprint}; publish again")
    return array


class DeltaBase:
    """One model's tensors as of one version, which the next delta is made against or put on.

    Invariants:
    - `version` is the one whose bytes all tensors have. It is None from the first tensor of the next version to the last, and
      stays None where that does not come to its end.
    - A delta changes no tensor's name, dtype or shape.

    Life: `created -> read into memory by the first delta -> moved on by each version`.
    """

    def __init__(
        self, version: Version, load: Callable[[], Mapping[str, np.ndarray]], infos: Iterable[TensorInfo] = ()
    ) -> None:
        """`load` gives the tensors by name when the first delta needs them; a sender says in `infos` what they are."""
        self.version: Version | None = version
        self._load = load
        self._infos = {info.name: info for info in infos}

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        return dict(self._load())

    def value(self, name: str) -> np.ndarray:
        """Return the tensor as of now."""
        return self._arrays[name]

    def encode_next(self, version: Version, tensors: Tensors, watch: Stopwatch) -> Iterator[tuple[TensorInfo, bytes]]:
        """Describe each tensor of the next version and encode how it changed, empty where it did not; a sender's side."""
        self.version, infos = None, dict[str, TensorInfo]()
        for info, array in describe(watch.each("gather", tensors), watch):
            before, encoded = self._infos.get(info.name), b""
            if before is None or (before.dtype, before.shape) != (info.dtype, info.shape):
                have = "nothing" if before is None else f"{before.dtype} {before.shape}"
                raise ValueError(f"{info.name}: {info.dtype} {info.shape}, but {have} before; send a full version")
            if before.fingerprint != info.fingerprint:
                with watch.timing("write"):
                    encoded = encode(self._arrays[info.name], array)
                    np.copyto(self._arrays[info.name], array)
            infos[info.name] = info
            yield info, encoded
        if lacking := sorted(self._infos.keys() - infos.keys()):
            raise ValueError(f"{version}: {lacking} were sent before and are not now; send a full version")
        self.version, self._infos = version, infos

    def follow(
        self, manifest: Manifest, arriving: Iterable[tuple[TensorInfo, np.ndarray]]
    ) -> Iterator[tuple[TensorInfo, np.ndarray, bool]]:
        """Keep what arrives of a version and give all of its tensors, with whether each arrived; a receiver's side."""
        self.version = None
        for info, array in arriving:
            have = self._arrays[info.name]
            if have.flags.writeable and (have.dtype, have.shape) == (array.dtype, array.shape):
                np.copyto(have, array)
            else:
                self._arrays[info.name] = np.array(array)
            yield info, self._arrays[info.name], True
        sent = {info.name for info in manifest.sent}
        for info in manifest.tensors:
            if info.name not in sent:
                yield info, self._arrays[info.name], False
        self.version = manifest.version


def unchanged_names(before: Manifest | None, after: Iterable[TensorInfo]) -> tuple[str, ...]:
    """Return the names of tensors whose bytes are those of the manifest before."""
    old = {info.name: info.fingerprint for info in before.tensors} if before is not None else {}
    return tuple(info.name for info in after if old.get(info.name) == info.fingerprint)
