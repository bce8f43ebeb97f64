# SPDX-License-Identifier: Apache-2.0
"""Files that are replaced as a whole or not at all: text, bytes and JSON documents with a schema."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from relax_core.api.errors import ConfigError, disk_error


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError about `path` into an InfrastructureError that names the fix."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, error) from error


def check_new_folder(out: Path) -> None:
    """Raise ConfigError if the folder of the option `--out` exists and is not empty."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError("--out", f"{out}, which exists", "name a folder that is new or empty")


def encode(value: Any) -> str:
    """Encode one line of strict JSON; NaN and infinities become null, values of unknown types become strings."""
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError):  # a number or key that JSON cannot represent
        return _ENCODER.encode(plain(value))


def plain(value: Any) -> object:
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


def write_bytes(path: Path, data: bytes, durable: bool = True, mode: int = 0o666) -> None:
    """Replace a file atomically; if `durable`, wait until the content would survive a power failure.

    `mode`: permissions of the file, of which the process's umask takes some away.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with disk_errors(path):
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode), "wb") as file:
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
