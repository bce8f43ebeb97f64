# SPDX-License-Identifier: Apache-2.0
"""Crash-safe files of a run: JSON documents, append-only files, the writer's lock, and the content of `status.json`.

A document is replaced as a whole or not at all. An append writes whole records (JSON lines, plain or in zstd frames).
A failed append is undone. A torn end that a kill left is skipped by readers and cut off by the next writer.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import zstandard

from relax_core.api.errors import ConfigError, disk_error
from relax_core.api.role import Heartbeat


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError about `path` into an InfrastructureError that names the fix."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, error) from error


def encode(value: Any) -> str:
    """Encode one line of strict JSON; NaN and infinities become null, values of unknown types become strings."""
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError):  # a number or key that JSON cannot represent
        return _ENCODER.encode(plain(value))


def plain(value: Any) -> Any:
    """Convert a value to the types of JSON, as `encode` does."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(inner) for inner in value]
    item = getattr(value, "item", None)
    return plain(item()) if callable(item) and getattr(value, "ndim", None) == 0 else str(value)


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=plain)


def write_text(path: Path, text: str, durable: bool = True) -> None:
    """Replace a file atomically: readers see the old or the new content, also after a kill."""
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"), durable)


def write_bytes(path: Path, data: bytes, durable: bool = True) -> None:
    """Replace a file atomically; if `durable`, wait until the content would survive a power failure."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with disk_errors(path):
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            draft.replace(path)
            if durable:
                sync_to_disk(path.parent)
        finally:
            draft.unlink(missing_ok=True)


def sync_to_disk(path: Path) -> None:
    """Wait until the disk stores a file's content, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_document(path: Path, schema: str, values: Mapping[str, Any], durable: bool = True) -> None:
    """Write a JSON document whose first key is its schema."""
    body = json.dumps(plain({"schema": schema, **values}), ensure_ascii=False, allow_nan=False, indent=1)
    write_text(path, body + "\n", durable)


def read_document(path: Path) -> dict[str, Any] | None:
    """Read a JSON document; return None if the file does not exist. Raises ConfigError for an unreadable file."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise ConfigError(str(path), f"text that is not JSON ({error})", "remove the file or restore it") from error
    except OSError as error:
        raise ConfigError(str(path), error.strerror or "an error", "make the path a readable file") from error
    if not isinstance(loaded, dict):
        raise ConfigError(str(path), f"a {type(loaded).__name__}", "the file must contain one JSON object")
    return loaded


class AppendOnlyFile:
    """An append-only file of records.

    Opening the file cuts off a torn last record: `whole` takes the file's bytes and returns the length of its whole
    records.
    """

    def __init__(self, path: Path, whole: Callable[[bytes], int]) -> None:
        self.path = path
        with disk_errors(path):
            if path.exists():
                data = path.read_bytes()
                if (length := whole(data)) < len(data):
                    os.truncate(path, length)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, data: bytes) -> None:
        """Append all of `data`, or nothing if that fails."""
        with disk_errors(self.path):
            start = os.fstat(self._file).st_size
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._file, view) :]
            except OSError:
                os.ftruncate(self._file, start)
                raise

    def close(self) -> None:
        os.close(self._file)


def whole_lines(data: bytes) -> int:
    """Return the length of `data` up to and including its last line feed."""
    return data.rfind(b"\n") + 1


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON-lines file; skip torn or damaged lines."""
    if path.exists():
        yield from records(path.read_bytes())


def rewrite_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Remove the records of a JSON-lines file for which `keep` returns False."""
    kept = (record for record in read_lines(path) if keep(record))
    lines = [json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n" for record in kept]
    write_bytes(path, "".join(lines).encode())


def frame(lines: Iterable[str]) -> bytes:
    """Compress lines as one self-contained zstd frame."""
    body = "".join(line + "\n" for line in lines).encode("utf-8", errors="backslashreplace")
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(body)


def whole_frames(data: bytes) -> int:
    """Return the length of the complete zstd frames at the start of `data`."""
    return sum(size for size, _ in _frames(data))


def read_frames(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of zstd frames; skip a torn last frame."""
    if path.exists():
        for _, body in _frames(path.read_bytes()):
            yield from records(body)


def _frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    rest = data
    while rest:
        reader = zstandard.ZstdDecompressor().decompressobj()
        try:
            body = reader.decompress(rest)
        except zstandard.ZstdError:
            return
        if not reader.eof:
            return
        yield len(rest) - len(reader.unused_data), body
        rest = reader.unused_data


def records(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the records of JSON lines; skip torn or damaged lines."""
    for line in data.split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


_HELD = {errno.EACCES, errno.EAGAIN}
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class WriterLock:
    """An exclusive lock on a run for its one writer, held from construction to `release`.

    The lock file contains the holder's process id. The lock ends with the process, and children do not inherit it.
    Raises ConfigError naming the holder if another process has the lock.
    """

    def __init__(self, path: Path) -> None:
        with disk_errors(path):
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._file: int | None = file
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                holder = os.pread(file, 32, 0).decode(errors="replace").strip() or "unknown"
                self.release()
                raise ConfigError(
                    "run", f"{path.parent}, which process {holder} writes", "wait for it, or stop it first"
                ) from error
            # Some network file systems have no locks: on these the user must not start two writers.
            if error.errno not in _UNSUPPORTED:
                raise
        with disk_errors(path):
            os.ftruncate(file, 0)
            os.pwrite(file, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def status_document(
    heartbeats: Sequence[Heartbeat], now: float, wall: float, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of `status.json`: heartbeats, and facts of the run (state, step, steps, run_id).

    `now` (the clock of the heartbeats) and `written_at` (wall clock) are read together, so readers can compute ages
    from the wall clock alone. Spans are left out, since the trace contains them.
    """
    roles = [asdict(replace(each, spans=())) for each in sorted(heartbeats, key=lambda each: each.role)]
    return {
        **facts,
        "written_at": wall,
        "now": now,
        "pid": os.getpid(),
        "host": host_mark(),
        "roles": [{key: value for key, value in role.items() if key not in ("spans", "sent")} for role in roles],
    }


def status_key(heartbeats: Sequence[Heartbeat]) -> tuple[Any, ...]:
    """Return the visible part of the heartbeats; the recorder writes a new status when this key changes."""
    in_order = sorted(heartbeats, key=lambda each: each.role)
    return tuple((each.role, each.state, each.doing, each.waits, each.incarnation) for each in in_order)


def host_mark() -> str:
    """Return a hash of this machine's name, by which readers know whether a process id is of their machine."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]
