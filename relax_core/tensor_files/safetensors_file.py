# SPDX-License-Identifier: Apache-2.0
"""Safetensors files: written as a stream of numpy arrays or as parts in memory, read as views of the file's bytes.

Relax stores all arrays in this format: weights, processed media, and payloads on one machine. The `safetensors` package
is not used, because it needs all tensors at once, and torch for bf16. Any safetensors reader opens the files. numpy has
no bf16 and fp8, so arrays hold the bits of these types as unsigned integers.
"""

from __future__ import annotations

import json
import struct
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np

from relax_core.api.weights import TensorInfo, Tensors, tensor_fingerprint

NUMPY: Mapping[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "|u1", "F8_E5M2": "|u1",
    "F8_E8M0": "|u1", "F8_E4M3FNUZ": "|u1", "F8_E5M2FNUZ": "|u1", "C64": "<c8",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1",
    "BOOL": "|b1",
}  # fmt: skip
SAFETENSORS = {numpy: name for name, numpy in NUMPY.items()}
"""Safetensors dtypes by numpy dtype. Types that numpy lacks come before integers in `NUMPY`, so the integers win."""
MAX_HEADER_BYTES = 100_000_000
"""Longest header that the format allows, in bytes; a longer header means a broken file."""
QUOTED = 300
"""Most characters of tensor names that an error message shows; a broken name may be as long as the file."""
_ALIGN = 64
"""Alignment in bytes of the first array of `pack`. Arrays follow with the widest elements first, so all are aligned."""
_COPY_BYTES = 1 << 24
T = TypeVar("T")


class TensorFile(NamedTuple):
    """The content of a file: views of its tensors by name, the safetensors names of their dtypes, and its metadata."""

    tensors: dict[str, np.ndarray]
    dtypes: dict[str, str]
    metadata: Mapping[str, str]


class Stopwatch:
    """Sums of seconds by activity: a sender's gather, hash and write; a receiver's wire, load and proof."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - began

    def each(self, what: str, items: Iterable[T]) -> Iterator[T]:
        """Yield the items; count the time of making them, not of using them."""
        source, over = iter(items), object()
        while True:
            with self.timing(what):
                item = next(source, over)
            if item is over:
                return
            yield item  # type: ignore[misc]


class SeekableFile(Protocol):
    """The methods of a file that `write` needs."""

    def seek(self, at: int, /) -> int: ...

    def read(self, size: int, /) -> bytes: ...

    def write(self, data: bytes | memoryview, /) -> int: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, failed: type[BaseException] | None, error: BaseException | None, where: TracebackType | None, /
    ) -> None: ...


def write(
    file: SeekableFile, tensors: Tensors, metadata: Mapping[str, str], header_bytes: int, watch: Stopwatch | None = None
) -> tuple[list[TensorInfo], int]:
    """Stream tensors to a file after a header of `header_bytes`; return their descriptions and the needed header size.

    The header is known only at the end. If it needs more bytes than were reserved, all data is moved once.
    """
    watch, infos = watch or Stopwatch(), list[TensorInfo]()
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    file.seek(header_bytes)
    offset = 0
    for info, data in describe(tensors, watch):
        with watch.timing("write"):
            file.write(data.reshape(-1).view(np.uint8).data)
        end = offset + info.size_bytes
        entries[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [offset, end]}
        offset = end
        infos.append(info)
    text = json.dumps(entries, separators=(",", ":")).encode()
    needed = 8 + -(-len(text) // 8) * 8
    if needed > header_bytes:
        for begin in reversed(range(0, offset, _COPY_BYTES)):
            file.seek(header_bytes + begin)
            block = file.read(min(_COPY_BYTES, offset - begin))
            file.seek(needed + begin)
            file.write(block)
        header_bytes = needed
    file.seek(0)
    file.write(struct.pack("<Q", header_bytes - 8) + text.ljust(header_bytes - 8))
    return infos, needed


def pack(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """Return a whole file as parts to write in this order; arrays in C order are not copied."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata), **dict.fromkeys(arrays)}
    parts, offset = list[bytes | memoryview](), 0
    for name, array in sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize):
        end = offset + array.nbytes
        entries[name] = {"dtype": safetensors_dtype(array), "shape": array.shape, "data_offsets": [offset, end]}
        parts.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    size = -(-(8 + len(text)) // _ALIGN) * _ALIGN
    return [struct.pack("<Q", size - 8) + text.ljust(size - 8), *parts]


def safetensors_dtype(array: np.ndarray) -> str:
    """Return the safetensors name of an array's dtype. Raises ValueError for a dtype that is not a plain number."""
    if array.dtype.str not in SAFETENSORS:
        raise ValueError(f"an array of {array.dtype} has no safetensors dtype; use one of {', '.join(NUMPY)}")
    return SAFETENSORS[array.dtype.str]


def describe(tensors: Tensors, watch: Stopwatch) -> Iterator[tuple[TensorInfo, np.ndarray]]:
    """Yield each tensor in C order with its description. Raises ValueError for a wrong dtype or a repeated name."""
    names: set[str] = set()
    for name, array, dtype in tensors:
        if name in names:
            raise ValueError(f"tensor {name!r} was given twice; send each name once")
        if dtype not in NUMPY:
            raise ValueError(f"tensor {name!r}: dtype {dtype!r} is not one of {', '.join(NUMPY)}")
        if np.dtype(array.dtype) != np.dtype(NUMPY[dtype]):
            raise ValueError(f"tensor {name!r}: a {array.dtype} array is not {dtype}; send {np.dtype(NUMPY[dtype])}")
        names.add(name)
        data = np.asarray(array, order="C")
        with watch.timing("hash"):
            info = TensorInfo(name, tuple(map(int, data.shape)), dtype, tensor_fingerprint(data), int(data.nbytes))
        yield info, data


def read(path: Path, mapped: np.ndarray | None = None) -> TensorFile:
    """Return the tensors of a file as views of `mapped`, or of a new mapping. Raises ValueError for an invalid file.

    The mapping lives as long as any of its tensors, and keeps the bytes even if the file is removed.
    """
    try:
        if mapped is None:
            mapped = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
        return parse(np.asarray(mapped))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse(data: np.ndarray) -> TensorFile:
    """Parse the bytes of a file; return its tensors as views of `data`. Raises ValueError for an invalid file."""
    size = len(data)
    length = int(data[:8].view("<u8")[0]) if size >= 8 else size
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise ValueError(f"{size} bytes do not hold a whole header; the file is truncated or not safetensors")
    try:
        table = json.loads(data[8 : 8 + length].tobytes())
        metadata = dict(table.pop("__metadata__", {}))
        places = {name: _place(item) for name, item in table.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"the header is broken ({str(error)[:QUOTED]})") from error
    end = 8 + length + max((end for _, _, end in places.values()), default=0)
    if size != end:
        raise ValueError(f"{size} bytes, but its header says {end}; the file is truncated")
    data = data[8 + length :]
    tensors = {
        name: data[begin:end].view(NUMPY[table[name]["dtype"]]).reshape(shape)
        for name, (shape, begin, end) in places.items()
    }
    return TensorFile(tensors, {name: item["dtype"] for name, item in table.items()}, metadata)


def _place(item: Mapping[str, Any]) -> tuple[tuple[int, ...], int, int]:
    """Return (shape, begin, end) of a tensor from its header entry. Raises ValueError if the values contradict."""
    dtype, shape = item["dtype"], tuple(int(n) for n in item["shape"])
    begin, end = (int(n) for n in item["data_offsets"])
    if not 0 <= begin <= end or end - begin != np.dtype(NUMPY[dtype]).itemsize * int(np.prod(shape, dtype=np.int64)):
        raise ValueError(f"offsets {begin}..{end} do not fit {dtype} {shape}")
    return shape, begin, end
