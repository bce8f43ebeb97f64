# SPDX-License-Identifier: Apache-2.0
"""Bit-exact deltas of tensors: gaps between changed positions, and differences of the changed bits, compressed.

`tests/unit/weights/test_delta.py` compares the size of deltas with XOR + zstd. Tensors are encoded in blocks, so that a
large tensor needs little scratch memory. A damaged delta raises ValueError or yields bytes with another fingerprint.
`DeltaBase` holds the version against which a sender makes the next delta, or to which a receiver applies it.
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
"""Number of elements that are encoded at a time; each takes about 16 bytes of scratch memory."""
_LEVEL = 1
"""Level of zstd; higher levels take several times the time and save a few percent."""
_ESCAPE = 255
"""Value of an 8-bit gap that marks a long gap, which is stored in 32 bits."""
_HEAD = struct.Struct("<IIII")
"""A block's header: changed elements, long gaps, bytes of the compressed frame, bytes of the decompressed frame."""


def encode(old: np.ndarray, new: np.ndarray) -> bytes:
    """Encode the change from `old` to `new`; return empty bytes if nothing changed.

    Raises ValueError if the arrays differ in size or in the width of their elements.
    """
    before, after = _bits(old), _bits(new)
    if before.dtype != after.dtype or before.size != after.size:
        raise ValueError(f"delta from {old.dtype} {old.shape} to {new.dtype} {new.shape}: size or width differs")
    blocks = [_encode_block(before[part], after[part]) for part in _parts(after.size)]
    return b"".join(blocks) if any(len(block) > _HEAD.size for block in blocks) else b""


def apply(array: np.ndarray, delta: bytes | memoryview) -> None:
    """Apply a delta to the old array in place. The array must be contiguous.

    Raises ValueError for a damaged delta.
    """
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
    """View an array as flat unsigned integers of the element's width."""
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
    # Map small differences of either sign to small numbers: 0, -1, 1, -2, ... -> 0, 1, 2, 3, ... (zigzag).
    difference = after[places] - before[places]
    width = difference.dtype.itemsize
    folded = (difference << 1) ^ (difference.view(f"i{width}") >> (8 * width - 1)).view(difference.dtype)
    # Order bytes by significance, the lowest bytes of all changes first: most high bytes are zero, and zstd compresses
    # their runs.
    planes = np.ascontiguousarray(folded.view(np.uint8).reshape(len(places), -1).T)
    raw = short.tobytes() + long_gaps.tobytes() + planes.tobytes()
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
        raise ValueError("the delta is damaged: a change lies beyond the tensor's end")
    values = np.ascontiguousarray(raw[count + 4 * long_gaps :].reshape(width, count).T).reshape(-1)
    folded, unit = values.view(target.dtype), target.dtype.type(1)
    target[places] += (folded >> unit) ^ (~(folded & unit) + unit)  # the inverse of the zigzag


def check_own_fingerprint(manifest: Manifest) -> None:
    """Raise ValueError if a manifest's fingerprint differs from that of its tensors."""
    if manifest.fingerprint != combined_fingerprint(manifest.tensors):
        raise ValueError(f"{manifest.version}: the manifest contradicts its own fingerprint; publish again")


def restore(manifest: Manifest, info: TensorInfo, arrived: np.ndarray, resident: Resident | None) -> np.ndarray:
    """Return a tensor of the manifest: the arrived tensor, or the receiver's own tensor with the delta applied.

    Raises ValueError if the tensor does not have the manifest's fingerprint.
    """
    array, version = arrived, manifest.version
    if manifest.payload == "delta":
        if resident is None:
            raise ValueError(
                f"{version}: a delta against {manifest.base}, but no base to apply it to; take a full version"
            )
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
    """The tensors of one model at one version, against which the next delta is made, or to which it is applied.

    Invariants:
    - All tensors have the bytes of `version`. It is None while the tensors are moved to the next version, and stays
      None if that fails.
    - A delta changes no tensor's name, dtype or shape.

    Life cycle: `created -> read into memory by the first delta -> moved to each next version`.
    """

    def __init__(
        self, version: Version, load: Callable[[], Mapping[str, np.ndarray]], infos: Iterable[TensorInfo] = ()
    ) -> None:
        """Create the base; `load` returns the tensors by name and is called when the first delta needs them.

        `infos` describe the tensors; only a sender needs them.
        """
        self.version: Version | None = version
        self._load = load
        self._infos = {info.name: info for info in infos}

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        return dict(self._load())

    def value(self, name: str) -> np.ndarray:
        """Return the current value of a tensor."""
        return self._arrays[name]

    def encode_next(self, version: Version, tensors: Tensors, watch: Stopwatch) -> Iterator[tuple[TensorInfo, bytes]]:
        """Yield the description and the encoded change (empty: unchanged) of each tensor of a sender's next version.

        Raises ValueError if names, dtypes or shapes differ from the version before.
        """
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
            raise ValueError(f"{version}: {lacking} are missing, but the version before had them; send a full version")
        self.version, self._infos = version, infos

    def follow(
        self, manifest: Manifest, arriving: Iterable[tuple[TensorInfo, np.ndarray]]
    ) -> Iterator[tuple[TensorInfo, np.ndarray, bool]]:
        """Store the tensors that arrive at a receiver; yield (description, tensor, True if it arrived) for each."""
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
    """Return the names of the tensors of `after` that have the same bytes in the manifest `before`."""
    old = {info.name: info.fingerprint for info in before.tensors} if before is not None else {}
    return tuple(info.name for info in after if old.get(info.name) == info.fingerprint)
