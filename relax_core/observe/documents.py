# SPDX-License-Identifier: Apache-2.0
"""JSON documents of a run: written whole or not at all, read with their `schema`; disk errors said once for all.

Not for files that grow: those are `journal.py`'s.

One writer a run: a record lock that ends with its process, however that dies, and that no child inherits.

`status.json`: what a run said of itself last. Role states and waits as they came, with the clock they are told in.

Readers need no clock of ours: `now` and `written_at` were read together, so ages follow from the wall clock.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from relax_core.api.errors import ConfigError, InfrastructureError
from relax_core.api.status import Heartbeat

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class DiskFull(InfrastructureError):
    """Free space, then resume: a file of the run could not be written."""


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the disk says of `path` into one clear error."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFull(
                f"{path}: no space left to write; free some, then continue with `relax resume`; "
                f"everything written before is readable"
            ) from error
        raise InfrastructureError(f"{path}: {error.strerror or error}; the run can be resumed") from error


def encode(value: Any) -> str:
    """One line of strict JSON: NaN and infinities become null, unknown types their text."""
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError):  # a number, or a key, that JSON has not
        return _ENCODER.encode(plain(value))


def plain(value: Any) -> Any:
    """Only what JSON has."""
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
    """Replace a file with these bytes; `durable` waits until the disk has them."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with disk_errors(path):
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def write_document(path: Path, schema: str, values: Mapping[str, Any], durable: bool = True) -> None:
    """A JSON document with its schema first."""
    body = json.dumps(plain({"schema": schema, **values}), ensure_ascii=False, allow_nan=False, indent=1)
    write_text(path, body + "\n", durable)


def read_document(path: Path) -> dict[str, Any] | None:
    """A document, or None where there is none yet."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        loaded = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(str(path), f"text that is not JSON ({error})", "remove the file or restore it") from error
    if not isinstance(loaded, dict):
        raise ConfigError(str(path), f"a {type(loaded).__name__}", "it must hold one JSON object")
    return loaded


_HELD = {errno.EACCES, errno.EAGAIN}
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class WriterLock:
    """Held from construction to `release`; the file names the holder's process."""

    def __init__(self, path: Path) -> None:
        with disk_errors(path):
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._file: int | None = file
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise self._refusal(file, path) from error
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

    def _refusal(self, file: int, path: Path) -> ConfigError:
        holder = os.pread(file, 32, 0).decode(errors="replace").strip() or "unknown"
        self.release()
        return ConfigError("run", f"{path.parent}, which process {holder} writes", "wait for it, or stop it first")


def status_document(beats: Sequence[Heartbeat], now: float, wall: float, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Beats and the run's own facts (state, step, steps, run_id) as they are at `now`."""
    return {
        **facts,
        "written_at": wall,
        "now": now,
        "pid": os.getpid(),
        "host": host_mark(),
        "roles": [_role(beat) for beat in sorted(beats, key=lambda beat: beat.role)],
    }


def _role(beat: Heartbeat) -> dict[str, Any]:
    """Spans are told once, in the trace."""
    return {key: value for key, value in asdict(replace(beat, spans=())).items() if key not in ("spans", "sent")}


def told(beats: Sequence[Heartbeat]) -> tuple[Any, ...]:
    """What of the beats a reader would notice: a status is written when this changes."""
    return tuple((b.role, b.state, b.doing, b.waits, b.incarnation) for b in sorted(beats, key=lambda b: b.role))


def host_mark() -> str:
    """Tells machines apart without naming them: a process id means something only on its own."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]
