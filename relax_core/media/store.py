# SPDX-License-Identifier: Apache-2.0
"""The media store of a run: processed media by key, in a directory that rollout, engines and trainers share.

A medium is one file, written once and whole, that readers map into memory where it is large: rows and requests carry its
key, never its tensors. Each file holds the hash of its payload, checked when it is opened, so that trainer and engine read
the same bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.api.errors import InfrastructureError
from relax_core.api.modality import PlaceholderSpan, ProcessedMedia

if TYPE_CHECKING:
    import numpy as np

_ALIGN = 64
_KEPT_BYTES = 1 << 28
"""Of media that a reader keeps; what is dropped is read again from the directory."""
_MAPPED_BYTES = 1 << 20
"""Smaller files are read: each that is mapped holds a descriptor, and a process may have few of them."""


class MediaStore:
    """One process's view of the directory."""

    def __init__(self, directory: str | Path, keep_bytes: int = _KEPT_BYTES) -> None:
        self._directory, self._keep_bytes = Path(directory), keep_bytes
        self._kept: OrderedDict[str, ProcessedMedia] = OrderedDict()
        self._kept_bytes = 0

    def put(self, media: ProcessedMedia) -> None:
        """Keep a medium, unless its key is there: the same key is the same bits. InfrastructureError where it can't be
        written."""
        path = self._path(media.key)
        try:
            os.utime(path)  # it is used again
            return
        except OSError:  # it is not there, and writing tells if it can't be
            pass
        write_whole(path, _packed(media))

    def __contains__(self, key: str) -> bool:
        return self._path(key).is_file()

    def get(self, key: str) -> ProcessedMedia:
        """InfrastructureError where it is not there or damaged."""
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        media = self._read(key)
        self._kept[key] = media
        self._kept_bytes += _size(media)
        while self._kept_bytes > self._keep_bytes and len(self._kept) > 1:
            self._kept_bytes -= _size(self._kept.popitem(last=False)[1])
        return media

    def size_bytes(self) -> int:
        """Return the size of all files of the store."""
        return sum(path.stat().st_size for path in self._directory.glob("*.media"))

    def size_of(self, key: str) -> int | None:
        """Bytes of its file; None: it is not there."""
        try:
            return self._path(key).stat().st_size
        except FileNotFoundError:
            return None

    def found(self) -> dict[str, int]:
        """Sizes of all files, the least recently used first. What a killed process left half written is deleted."""
        import psutil

        if not self._directory.is_dir():
            return {}
        files: list[tuple[float, str, int]] = []
        for path in self._directory.iterdir():
            if path.suffix == ".media":
                told = path.stat()
                files.append((told.st_mtime, path.stem, told.st_size))
            elif path.suffix[1:].isdigit() and not psutil.pid_exists(int(path.suffix[1:])):
                path.unlink(missing_ok=True)
        return {key: size for _, key, size in sorted(files)}

    def remove(self, key: str) -> None:
        """Delete its file: who has it mapped can read on, nobody else can open it."""
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        if not key.isalnum():
            raise ValueError(f"media key {key!r}; keys are hexadecimal")
        return self._directory / f"{key}.media"

    def _read(self, key: str) -> ProcessedMedia:
        import numpy as np

        path = self._path(key)
        try:
            large = path.stat().st_size >= _MAPPED_BYTES
            whole = np.memmap(path, np.uint8, "r") if large else np.fromfile(path, np.uint8)
            length = int.from_bytes(whole[:8].tobytes(), "little")
            head = json.loads(whole[8 : 8 + length].tobytes())
            payload = whole[_aligned(8 + length) :]
            if hashlib.blake2b(payload.data, digest_size=16).hexdigest() != head["hash"]:
                raise ValueError("its payload is not what was written")
            tensors = {name: _tensor(payload, *entry) for name, entry in head["tensors"].items()}
            layout = tuple(PlaceholderSpan(*span) for span in head["layout"])
            return ProcessedMedia(key, tensors, int(head["num_placeholders"]), layout)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InfrastructureError(f"media store: {path} can't be read ({error}); process it again") from error


def write_whole(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """A file of these parts, or none. InfrastructureError where it can't be written, with nothing half left behind."""
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.writelines(parts)
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            partial.unlink(missing_ok=True)
        fix = "free space there (rollout.media_store_mb bounds the store), then `relax resume` the run"
        raise InfrastructureError(f"media store: {path} can't be written ({error.strerror or error}); {fix}") from error


def key_bytes(keys: Sequence[str]) -> np.ndarray:
    """uint8 [keys, 16]: as the column `media` holds them."""
    import numpy as np

    return np.frombuffer(bytes.fromhex("".join(keys)), np.uint8).reshape(len(keys), 16)


def key_texts(values: np.ndarray) -> list[str]:
    """Keys of a part of the column `media`."""
    return [value.tobytes().hex() for value in values]


def _packed(media: ProcessedMedia) -> list[bytes | memoryview]:
    """A file's parts in order; tensors are not copied."""
    import numpy as np

    entries: dict[str, tuple[str, tuple[int, ...], int]] = {}
    payload: list[bytes | memoryview] = []
    length, digest = 0, hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(media.tensors.items()):
        flat = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
        padding = bytes(_aligned(length) - length)
        entries[name] = (tensor.dtype.str, tensor.shape, length + len(padding))
        for piece in (padding, flat.data):
            digest.update(piece)
            payload.append(piece)
        length += len(padding) + flat.nbytes
    head = {
        "hash": digest.hexdigest(), "num_placeholders": media.num_placeholders, "layout": media.layout, "tensors": entries,
    }  # fmt: skip
    text = json.dumps(head).encode()
    start = 8 + len(text)
    return [len(text).to_bytes(8, "little"), text, bytes(_aligned(start) - start), *payload]


def _tensor(payload: np.ndarray, dtype: str, shape: Sequence[int], start: int) -> np.ndarray:
    import numpy as np

    kind = np.dtype(dtype)
    if kind.hasobject:
        raise ValueError(f"dtype {dtype}")
    size = int(np.prod(shape)) * kind.itemsize
    return np.asarray(payload[start : start + size]).view(kind).reshape(tuple(shape))


def _size(media: ProcessedMedia) -> int:
    return sum(tensor.nbytes for tensor in media.tensors.values())


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def tensors_of(media: Sequence[ProcessedMedia]) -> Mapping[str, Any]:
    """By name, the tensors of several media one after another along the first axis, as models take them packed. Where their
    last axes differ (sounds of unequal length) the shorter are filled up with 0, as their masks are."""
    import numpy as np

    out: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(name for one in media for name in one.tensors):
        parts = [one.tensors[name] for one in media if name in one.tensors]
        longest = max(part.shape[-1] for part in parts)
        out[name] = np.concatenate([_filled(part, longest) for part in parts])
    return out


def _filled(part: np.ndarray, longest: int) -> np.ndarray:
    import numpy as np

    missing = longest - part.shape[-1]
    return np.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, missing)]) if missing and part.ndim > 1 else part
