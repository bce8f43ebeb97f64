# SPDX-License-Identifier: Apache-2.0
"""The media store of a run: processed media by key, in a directory that rollout, engines and trainers share.

A medium is one safetensors file, written once; readers memory-map a large file. Rows and requests carry a medium's key,
never its tensors. Each file holds the fingerprint of its tensors, checked when it is opened, so that trainer and engine
read the same bits. A damaged file is moved to the folder `damaged`, from which no medium is read. The process that
knows the medium's source finds the file there and makes the medium again.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from relax_core.api.errors import InfrastructureError, continuing, disk_error
from relax_core.api.modality import PlaceholderSpan, ProcessedMedia
from relax_core.api.weights import combined_fingerprint
from relax_core.tensor_files.mapped_files import read_or_map, write_whole
from relax_core.tensor_files.safetensors_file import Stopwatch, describe, pack, parse, safetensors_dtype

_KEPT_BYTES = 1 << 28
"""Bytes of media that a reader caches; media beyond this limit are read again from the directory."""
_MAPPED_BYTES = 1 << 20
"""Least size in bytes of a file that is mapped, not read: a mapping holds a file descriptor, and these are limited."""
DAMAGED = "damaged"
"""Folder of the store with one file per medium that must be made again, named by the medium's key."""
RESTORE_S = 15.0
"""Seconds that engines and trainers wait for a medium to be made again. An engine that is silent longer is replaced."""
_LOOK_S = 0.05


class MediaStore:
    """One process's view of the store's directory.

    Life cycle of a file: `absent -> whole -> absent` (evicted), or `whole -> damaged -> whole` (made again).

    Invariants:
    - A file gets its final name only after all its bytes are on the disk.
    - Tensors whose fingerprint differs from the written one are never returned.
    """

    def __init__(self, directory: str | Path, keep_bytes: int = _KEPT_BYTES, restore_s: float = 0.0) -> None:
        """Open a store; `keep_bytes` limits the cache of this process.

        `restore_s`: seconds to wait for a missing or damaged medium, while a `MediaPipeline` makes it again.
        """
        self._directory, self._keep_bytes, self._restore_s = Path(directory), keep_bytes, restore_s
        self._kept: OrderedDict[str, ProcessedMedia] = OrderedDict()
        self._kept_bytes = 0

    def put(self, media: ProcessedMedia) -> None:
        """Write a medium, unless an intact file with its key exists: equal keys mean equal bits.

        Raises InfrastructureError if the file can't be written.
        """
        path = self._path(media.key)
        try:
            os.utime(path)  # mark it as recently used
            self._read(media.key)
            return
        except (OSError, InfrastructureError):  # missing or damaged: write it, which raises if the disk fails
            pass
        facts = {
            "fingerprint": _fingerprint(media.tensors),
            "num_placeholders": str(media.num_placeholders),
            "layout": json.dumps(media.layout),
        }
        write_media_file(path, pack(dict(sorted(media.tensors.items())), facts))

    def __contains__(self, key: str) -> bool:
        return self._path(key).is_file()

    def get(self, key: str) -> ProcessedMedia:
        """Return a medium. Raises InfrastructureError if it is missing or damaged, and not made again in time."""
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        try:
            media = self._read(key)
        except InfrastructureError:
            self.set_aside(key)
            until = time.monotonic() + self._restore_s
            while key not in self:
                if time.monotonic() >= until:
                    raise
                time.sleep(_LOOK_S)
            media = self._read(key)
        self._kept[key] = media
        self._kept_bytes += media.size_bytes
        while self._kept_bytes > self._keep_bytes and len(self._kept) > 1:
            self._kept_bytes -= self._kept.popitem(last=False)[1].size_bytes
        return media

    def size_bytes(self) -> int:
        """Return the size of all files of the store, in bytes."""
        return sum(path.stat().st_size for path in self._directory.glob("*.media"))

    def size_of(self, key: str) -> int | None:
        """Return the size of a medium's file in bytes; None if the file is missing."""
        try:
            return self._path(key).stat().st_size
        except FileNotFoundError:
            return None

    def found(self) -> dict[str, int]:
        """Return file sizes in bytes by key, least recently used first; delete unfinished files of killed processes."""
        import psutil

        if not self._directory.is_dir():
            return {}
        files: list[tuple[float, str, int]] = []
        for path in self._directory.iterdir():
            if path.suffix == ".media":
                stat = path.stat()
                files.append((stat.st_mtime, path.stem, stat.st_size))
            elif path.suffix[1:].isdigit() and not psutil.pid_exists(int(path.suffix[1:])):
                path.unlink(missing_ok=True)
        return {key: size for _, key, size in sorted(files)}

    def set_aside(self, key: str) -> None:
        """Request that a damaged or missing medium is made again; move its file, if any, to the folder `damaged`."""
        path, aside = self._path(key), self._directory / DAMAGED / key
        with contextlib.suppress(OSError):  # in a read-only directory the file stays; it is never returned
            aside.parent.mkdir(exist_ok=True)
            try:
                path.replace(aside)
            except FileNotFoundError:
                aside.touch()

    def damaged(self) -> list[str]:
        """Return the keys of media to be made again."""
        try:
            return [name for name in os.listdir(self._directory / DAMAGED) if name.isalnum()]
        except OSError:
            return []

    def clear_damaged(self, key: str) -> None:
        """Delete the request for a medium that was made again, or that can't be made again here."""
        with contextlib.suppress(OSError):
            (self._directory / DAMAGED / key).unlink()

    def remove(self, key: str) -> None:
        """Delete a medium's file. Processes that have it mapped can still read it."""
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        if not key.isalnum():
            raise ValueError(f"media key {key!r} is not hexadecimal; use a key of `content_key`")
        return self._directory / f"{key}.media"

    def _read(self, key: str) -> ProcessedMedia:
        path = self._path(key)
        try:
            tensors, _, facts = parse(np.frombuffer(read_or_map(path, _MAPPED_BYTES), np.uint8))
            if _fingerprint(tensors) != facts["fingerprint"]:
                raise ValueError("the fingerprint of its tensors does not match")
            layout = tuple(PlaceholderSpan(*span) for span in json.loads(facts["layout"]))
            return ProcessedMedia(key, tensors, int(facts["num_placeholders"]), layout)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InfrastructureError(f"media store: {path} can't be read ({error}); process it again") from error


def write_media_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write parts to a file on disk atomically. Raises InfrastructureError if the file can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, path.with_suffix(f".{os.getpid()}"), parts, durable=True)
    except OSError as error:
        then = f"{continuing(path) or '`relax resume` the run'} (rollout.media_store_mb bounds the store)"
        raise disk_error(path, error, "media store", then) from error


def _fingerprint(tensors: Mapping[str, np.ndarray]) -> str:
    named = [(name, tensor, safetensors_dtype(tensor)) for name, tensor in tensors.items()]
    return combined_fingerprint(info for info, _ in describe(named, Stopwatch()))


def key_bytes(keys: Sequence[str]) -> np.ndarray:
    """Return keys in the form of the column `media`: uint8 [keys, 16]."""
    return np.frombuffer(bytes.fromhex("".join(keys)), np.uint8).reshape(len(keys), 16)


def key_texts(values: np.ndarray) -> list[str]:
    """Return the keys, as hexadecimal texts, of values of the column `media`: uint8 [keys, 16]."""
    return [value.tobytes().hex() for value in values]


def tensors_of(media: Sequence[ProcessedMedia]) -> dict[str, np.ndarray]:
    """Concatenate the tensors of several media by name along the first axis, the packed form that models take.

    If the last axes differ (sounds of unequal length), shorter tensors and their masks are padded with 0.
    """
    out: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(name for one in media for name in one.tensors):
        parts = [one.tensors[name] for one in media if name in one.tensors]
        longest = max(part.shape[-1] for part in parts)
        missing = [longest - part.shape[-1] if part.ndim > 1 else 0 for part in parts]
        out[name] = np.concatenate(
            [
                np.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, lacks)]) if lacks else part
                for part, lacks in zip(parts, missing, strict=True)
            ]
        )
    return out
