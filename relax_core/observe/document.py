# SPDX-License-Identifier: Apache-2.0
"""JSON documents of a run: written whole or not at all, read with their `schema`; disk errors said once for all.

Not for files that grow: those are `journal.py`'s.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from relax_core.api.errors import ConfigError, InfrastructureError

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
