# SPDX-License-Identifier: Apache-2.0
"""One safetensors file: written as a stream of numpy arrays, read through a memory map.

Written here because the `safetensors` package needs all tensors at once and torch for bf16; any safetensors
reader opens the result. bf16 and fp8 travel as their bits.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

import numpy as np

from relax_core.api.weights import TensorInfo, tensor_fingerprint
from relax_core.tensor_files.stopwatch import Stopwatch

Tensors: TypeAlias = Iterable[tuple[str, np.ndarray, str]]
"""(name, array, dtype as safetensors call it)."""
NUMPY: Mapping[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "|u1", "F8_E5M2": "|u1",
    "F8_E8M0": "|u1", "F8_E4M3FNUZ": "|u1", "F8_E5M2FNUZ": "|u1", "C64": "<c8",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1",
    "BOOL": "|b1",
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000
"""What the format allows; a longer one is a broken file."""
_COPY_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor's place in the data part."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SeekableFile(Protocol):
    """As much of a file as writing one needs."""

    def seek(self, at: int, /) -> int: ...

    def read(self, size: int, /) -> bytes: ...

    def write(self, data: bytes | memoryview, /) -> int: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, failed: type[BaseException] | None, error: BaseException | None, where: TracebackType | None, /
    ) -> None: ...


def write(
    file: SeekableFile,
    tensors: Tensors,
    metadata: Mapping[str, str],
    header_bytes: int,
    watch: Stopwatch | None = None,
) -> tuple[list[TensorInfo], int]:
    """Stream tensors behind a header of `header_bytes`; returns them and the header size that was really needed.

    The header is known only at the end: where it outgrows what was reserved, the data moves up once.
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


def describe(tensors: Tensors, watch: Stopwatch) -> Iterator[tuple[TensorInfo, np.ndarray]]:
    """Describe each tensor as a manifest does, and give it in C order; ValueError where it is not of its dtype."""
    names: set[str] = set()
    for name, array, dtype in tensors:
        if name in names:
            raise ValueError(f"tensor {name!r} was given twice; send each name once")
        if dtype not in NUMPY:
            raise ValueError(f"tensor {name!r}: dtype {dtype!r} is not one of {', '.join(NUMPY)}")
        if np.dtype(array.dtype) != np.dtype(NUMPY[dtype]):
            raise ValueError(f"tensor {name!r}: a {array.dtype} array is no {dtype}; send {np.dtype(NUMPY[dtype])}")
        names.add(name)
        data = np.asarray(array, order="C")
        with watch.timing("hash"):
            info = TensorInfo(name, tuple(map(int, data.shape)), dtype, tensor_fingerprint(data), int(data.nbytes))
        yield info, data


def read_header(path: Path) -> tuple[dict[str, Entry], Mapping[str, str], int]:
    """Entries, metadata and where the data begins; ValueError where the file is not whole."""
    size = os.path.getsize(path)
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"{path}: {size} bytes hold no whole header; the file is truncated or not safetensors")
        try:
            table = json.loads(file.read(length))
            metadata = table.pop("__metadata__", {})
            entries = {name: _entry(item) for name, item in table.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}: the header is broken ({error})") from error
    end = max((entry.end for entry in entries.values()), default=0)
    if size != 8 + length + end:
        raise ValueError(f"{path}: {size} bytes, its header promises {8 + length + end}; the file is truncated")
    return entries, metadata, 8 + length


def _entry(item: Mapping[str, Any]) -> Entry:
    dtype, shape = item["dtype"], tuple(int(n) for n in item["shape"])
    begin, end = (int(n) for n in item["data_offsets"])
    if not 0 <= begin <= end or end - begin != np.dtype(NUMPY[dtype]).itemsize * int(np.prod(shape, dtype=np.int64)):
        raise ValueError(f"offsets {begin}..{end} do not fit {dtype} {shape}")
    return Entry(dtype, shape, begin, end)


def read(path: Path, mapped: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Views of all tensors by name, read-only where nothing else was `mapped`; the mapping, and with it the bytes of a file
    that was removed, lives as long as any of them."""
    entries, _, start = read_header(path)
    if mapped is None:
        mapped = np.memmap(path, dtype=np.uint8, mode="r")
    return {
        name: np.frombuffer(mapped[start + entry.begin : start + entry.end], dtype=NUMPY[entry.dtype]).reshape(
            entry.shape
        )
        for name, entry in entries.items()
    }
