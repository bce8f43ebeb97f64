# SPDX-License-Identifier: Apache-2.0
"""Files of a run that no kill and no full disk spoils: JSON documents, files that only grow, the writer's lock, the status.

Documents are written whole or not at all. An append is one write of whole records (JSON lines, plain or in zstd frames);
one that fails half-way is taken back, and a torn end left by a kill is skipped by readers and cut off by the next writer.
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
    """Turn an error of the disk at `path` into one that says what to do."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, error) from error


def encode(value: Any) -> str:
    """Encode one line of strict JSON: NaN and infinities become null, unknown types their text."""
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError):  # a number, or a key, that JSON has not
        return _ENCODER.encode(plain(value))


def plain(value: Any) -> Any:
    """Convert a value to what JSON has."""
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
    """Replace a file: a reader sees the old or the new one, also after a kill."""
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"), durable)


def write_bytes(path: Path, data: bytes, durable: bool = True) -> None:
    """Replace a file with these bytes; `durable` waits until the disk has them under this name, also after a power cut."""
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
    """Wait until the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_document(path: Path, schema: str, values: Mapping[str, Any], durable: bool = True) -> None:
    """Write a JSON document with its schema first."""
    body = json.dumps(plain({"schema": schema, **values}), ensure_ascii=False, allow_nan=False, indent=1)
    write_text(path, body + "\n", durable)


def read_document(path: Path) -> dict[str, Any] | None:
    """Read a document; None where there is none yet."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:  # not UTF-8, no JSON, or nested too deeply
        raise ConfigError(str(path), f"text that is not JSON ({error})", "remove the file or restore it") from error
    except OSError as error:
        raise ConfigError(str(path), error.strerror or "an error", "make it a file that can be read") from error
    if not isinstance(loaded, dict):
        raise ConfigError(str(path), f"a {type(loaded).__name__}", "it must hold one JSON object")
    return loaded


class AppendOnlyFile:
    """An append-only file, opened at the end of its last whole record; `whole` tells the length of the whole ones."""

    def __init__(self, path: Path, whole: Callable[[bytes], int]) -> None:
        self.path = path
        with disk_errors(path):
            if path.exists():
                data = path.read_bytes()
                if (length := whole(data)) < len(data):
                    os.truncate(path, length)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, data: bytes) -> None:
        """Write all of it or nothing."""
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
    """Return the length of the part that ends in a line feed."""
    return data.rfind(b"\n") + 1


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON-lines file; a torn or damaged line is skipped."""
    if path.exists():
        yield from records(path.read_bytes())


def rewrite_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Keep only some records of a JSON-lines file."""
    kept = (record for record in read_lines(path) if keep(record))
    lines = [json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n" for record in kept]
    write_bytes(path, "".join(lines).encode())


def frame(lines: Iterable[str]) -> bytes:
    """Compress lines as one zstd frame, complete in itself."""
    body = "".join(line + "\n" for line in lines).encode("utf-8", errors="backslashreplace")
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(body)


def whole_frames(data: bytes) -> int:
    """Return the length of the part made of complete zstd frames."""
    return sum(size for size, _ in _frames(data))


def read_frames(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of zstd frames; a torn last frame is skipped."""
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
    """Yield the records of JSON lines; a torn or damaged line is skipped."""
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
    """One writer a run: a record lock, held from construction to `release`, whose file names the holder's process.

    It ends with its process, however that dies, and no child inherits it.
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
            # A file system without locks (some network ones) leaves us as safe as the user is.
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
    """Return `status.json`: heartbeats and the run's own facts (state, step, steps, run_id) as they are at `now`.

    Readers need no clock of ours: `now` and `written_at` were read together, so ages follow from the wall clock. Spans
    are left out: the trace has them.
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
    """Return the part of the heartbeats that a reader would notice: a status is written when this changes."""
    in_order = sorted(heartbeats, key=lambda each: each.role)
    return tuple((each.role, each.state, each.doing, each.waits, each.incarnation) for each in in_order)


def host_mark() -> str:
    """Tell machines apart without naming them: a process id means something only on its own."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]
