# SPDX-License-Identifier: Apache-2.0
"""Reading of a medium's bytes from a path, URL, data-URI or cell of a task file, up to a limit; keys of contents.

A medium inside a task file is named by file, row and position in the row, so that its bytes are read only where they
are needed, from tables (`.parquet`, `.arrow`) or JSON lines. Reading takes the memory of one page of the file, however
large a row group is. pyarrow is imported only to read tables. Untrusted sources must be read in a killable process and
inside `restricted`, which limits the files and hosts that they may name.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote, unquote_to_bytes

from relax_core.api.errors import ConfigError, SourceUnavailable
from relax_core.media.access import SourceAccess, path_of, shown_url

if TYPE_CHECKING:
    import pyarrow as pa

SCHEME = "cell:"
ROWS_AT_ONCE = 8
"""Rows of a row group that are read at a time to reach the wanted row."""
MAX_LINE = 1 << 30
SAMPLES = "array"
MAX_BYTES = 1 << 28
_KEY_BYTES = 16
_BASE64 = re.compile(
    r"\s*(?:/9j/|iVBORw0KGgo|R0lGOD|UklGR|SUkqA|TU0AK|AAAA..Z0eXB|GkXfo|T2dnU|ZkxhQ|SUQz)[\w+/\s-]{16,}={0,2}\s*",
    re.ASCII,
)
"""Base64 text that begins as JPEG, PNG, GIF, RIFF (WebP, WAV), TIFF, MP4, WebM, Ogg, FLAC or MP3 does."""


_RESTRICTION: ContextVar[tuple[SourceAccess, int]] = ContextVar("restriction", default=(SourceAccess(), MAX_BYTES))


@contextmanager
def restricted(access: SourceAccess, max_bytes: int) -> Iterator[None]:
    """Limit the sources and bytes that `read_source` may read inside this context, also when a processor calls it."""
    token = _RESTRICTION.set((access, max_bytes))
    try:
        yield
    finally:
        _RESTRICTION.reset(token)


def read_source(source: str, max_bytes: int | None = None) -> bytes:
    """Return the bytes of a source.

    Raises ValueError naming the fault: no bytes, not allowed, not a regular file, or too many bytes. Raises its
    subclass SourceUnavailable if a later attempt may succeed.
    """
    access, most = _RESTRICTION.get()
    try:
        return _read(source, access, most if max_bytes is None else max_bytes)
    except ConfigError as refused:
        raise ValueError(str(refused)) from refused


def check_source(source: str, access: SourceAccess) -> None:
    """Raise ConfigError for a source that is malformed or not allowed, without reading it or resolving a name."""
    try:
        if source.startswith("data:"):
            return
        if source.startswith(SCHEME):
            access.check_file(EmbeddedMedia.parse(source).file)
        elif (path := path_of(source)) is not None:
            access.check_file(path)
        else:
            access.check_url(source)
    except ValueError as error:  # a cell without a row, or a path with a NUL
        got = f"{shown(source)}, which names no medium ({error})"
        raise ConfigError("data.train", got, "give a path, an http(s) URL or a data-URI") from error


def missing_file(source: str) -> bool:
    """Return True if a source names a file, as a path or a `file:` URL, that does not exist."""
    path = None if source.startswith(("data:", SCHEME)) else path_of(source)
    return path is not None and not os.path.isfile(path)


def is_path(source: str) -> bool:
    """Return True if a source is a path, and not a URL, a data-URI or a cell."""
    return "://" not in source and not source.startswith(("data:", SCHEME))


def _read(source: str, access: SourceAccess, max_bytes: int) -> bytes:
    if source.startswith("data:"):
        data = in_uri(source)
    elif source.startswith(SCHEME):
        cell = EmbeddedMedia.parse(source)
        access.check_file(cell.file)
        value = cell_value(cell)
        found = embedded(value)
        if found is None:
            there = named(value)
            if there is None or there.startswith(SCHEME):
                raise ValueError(f"{cell.shown} holds neither bytes nor a path or URL")
            return _read(str(Path(cell.file).parent / there) if is_path(there) else there, access, max_bytes)
        data = found
    elif (path := path_of(source)) is not None:
        data = access.read_file(path, max_bytes)
    else:
        data = access.fetch(source, max_bytes)
    if len(data) > max_bytes:
        raise ValueError(f"more than {max_bytes} bytes")
    if not data:
        raise ValueError("no bytes")
    return data


def in_uri(source: str) -> bytes:
    """Return the bytes of a data-URI. Raises ValueError for a malformed data-URI."""
    head, comma, body = source.partition(",")
    if not comma:
        raise ValueError("a data-URI without a comma before its data")
    try:
        return (
            base64.b64decode("".join(body.split()), validate=True)
            if head.endswith(";base64")
            else unquote_to_bytes(body)
        )
    except ValueError as error:  # also a character beyond ASCII
        raise ValueError(f"a data-URI whose base64 is broken ({error})") from error


def shown(source: str) -> str:
    """Return a source for messages: a long source is cut, and a URL loses user and query, which may be secret."""
    if source.startswith(SCHEME):
        with suppress(ValueError):
            return EmbeddedMedia.parse(source).shown
    if source.startswith(("http://", "https://")):
        return shown_url(source)
    return source if len(source) <= 200 else f"{source[:60]}... ({len(source)} characters)"


def content_key(data: bytes, *facts: Any) -> str:
    """Return a key that depends on the bytes and on facts about their processing (processor, options, model)."""
    digest = hashlib.blake2b(data, digest_size=_KEY_BYTES)
    digest.update(repr(facts).encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class EmbeddedMedia:
    """A medium inside a task file. `row`: index of its row in a table, or byte offset of its line in JSON lines."""

    file: str
    row: int
    at: tuple[str | int, ...]
    """Keys and indices that lead from the row to the medium; the first is the column."""

    def __str__(self) -> str:
        return f"{SCHEME}{quote(self.file)}?row={self.row}&at={quote(json.dumps(self.at))}"

    @classmethod
    def parse(cls, source: str) -> EmbeddedMedia:
        """Parse a cell from its text form. Raises ValueError for text that names no row."""
        path, _, query = source.removeprefix(SCHEME).partition("?")
        try:
            fields = parse_qs(query, strict_parsing=True)
            row, at = int(fields["row"][0]), json.loads(fields["at"][0])
            steps = isinstance(at, list) and bool(at) and all(type(step) in (str, int) for step in at)
            if not steps or not 0 <= row < 1 << 63:
                raise ValueError("no row, or no place in it")
            return cls(unquote(path), row, tuple(at))
        except (LookupError, ValueError, RecursionError) as error:
            raise ValueError(f"a cell {source[:80]!r} that names no row") from error

    @property
    def shown(self) -> str:
        """Description of the medium's location, for messages."""
        place = f"row {self.row + 1}" if _is_table(self.file) else f"the line at byte {self.row}"
        return f"{'.'.join(map(str, self.at))} in {place} of {self.file}"


def cell_value(cell: EmbeddedMedia) -> object:
    """Return the value of a cell as Python data. Raises ValueError if it can't be read."""
    try:
        if not _is_table(cell.file):
            with Path(cell.file).open("rb") as file:
                file.seek(cell.row)
                try:
                    line = json.loads(file.readline(MAX_LINE))
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{cell.file} was changed: no row begins at byte {cell.row}") from error
            return _inside(line, cell.at)
        import pyarrow as pa

        try:
            column = _table_cell(cell, str(cell.at[0]))
        except (pa.ArrowException, LookupError, UnicodeError) as error:
            raise ValueError(f"{cell.file} can't be read ({error})") from error
        return _inside(column, cell.at[1:])
    except OSError as error:
        raise SourceUnavailable(f"{cell.file} can't be read ({error.strerror or error})") from error
    except ImportError as error:
        raise ValueError(f"{cell.file} needs pyarrow: pip install relax-core[tables]") from error


def embedded(value: Any) -> bytes | None:
    """Return the bytes of a medium inside a row; None if the row only names the medium. Raises ValueError for broken bytes."""
    if isinstance(value, bytes | bytearray):
        is_text = _BASE64.match(value[:32].decode("latin-1")) or value.startswith(b"data:")
        return in_uri(_named(value.decode("latin-1"))) if is_text else bytes(value)
    if not isinstance(value, Mapping):
        return None
    if value.get(SAMPLES) is not None:
        return wave(value[SAMPLES], value.get("sampling_rate"))
    held = value.get("bytes")
    if isinstance(held, str):
        return in_uri(held if held.startswith("data:") else f"data:;base64,{held}")
    return embedded(held) if isinstance(held, bytes | bytearray) else None


def named(value: Any, kind: str = "") -> str | None:
    """Return the path, URL or data-URI that a medium's entry in a row names; else None."""
    if isinstance(value, str):
        return _named(value) or None
    if not isinstance(value, Mapping):
        return None
    for key in ("path", "url", kind, "image", "video", "audio", "base64"):
        found = value.get(key) if key else None
        if isinstance(found, str) and found:
            return f"data:;base64,{found}" if key == "base64" and not found.startswith("data:") else _named(found)
        if isinstance(found, Mapping) and (inner := named(found)):
            return inner
    return None


def _named(text: str) -> str:
    """Return base64 text that begins like a medium as a data-URI, and any other text unchanged."""
    return f"data:;base64,{text}" if _BASE64.fullmatch(text) else text


def wave(samples: Any, rate: Any) -> bytes:
    """Make a WAV file from samples in [-1, 1] of shape [samples] or [channels, samples]. Raises ValueError."""
    import numpy as np

    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < 1 << 31:
        raise ValueError(f"an array of sound whose sampling_rate is {rate!r}; give it in samples per second")
    try:
        values = np.asarray(samples, np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError("an array of sound with values that are not numbers") from error
    if values.ndim not in (1, 2) or not values.size:
        raise ValueError(f"an array of sound of shape {values.shape}; give [samples] or [channels, samples]")
    frames = values.T if values.ndim == 2 else values[:, None]
    body, channels = np.ascontiguousarray(frames).astype("<f4").tobytes(), frames.shape[1]
    if channels > 64:
        raise ValueError(f"an array of sound of {channels} channels; the last axis is time")
    if max(int(rate) * 4 * channels, len(body) + 64) >= 1 << 32:
        raise ValueError(f"an array of sound of {len(frames)} samples at {rate:g} per second, too many for a WAV file")
    form = struct.pack("<HHIIHH", 3, channels, int(rate), int(rate) * 4 * channels, 4 * channels, 32)
    head = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(body))
    return b"RIFF" + struct.pack("<I", len(head) + len(body)) + head + body


def _is_table(file: str) -> bool:
    return Path(file).suffix in (".parquet", ".arrow")


def _inside(value: Any, at: tuple[str | int, ...]) -> object:
    for step in at:
        try:
            value = value[step]
        except (LookupError, TypeError) as error:
            raise ValueError(f"nothing at {step!r}; the file was changed") from error
    return value


def _table_cell(cell: EmbeddedMedia, column: str) -> object:
    first = 0
    if cell.file.endswith(".arrow"):
        for batch in arrow_batches(cell.file):
            if cell.row < first + batch.num_rows:
                found = batch.column(column).slice(cell.row - first, 1)
                found.validate(full=True)  # a wrong offset would crash this process
                return found[0].as_py()
            first += batch.num_rows
        raise ValueError(f"{cell.file} was changed: it has {first} rows")
    from pyarrow import parquet

    with parquet.ParquetFile(cell.file, pre_buffer=False, buffer_size=1 << 20) as file:
        for group in range(file.metadata.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if cell.row < first + size:
                break
            first += size
        else:
            raise ValueError(f"{cell.file} was changed: it has {first} rows")
        for batch in file.iter_batches(ROWS_AT_ONCE, [group], [column], use_threads=False):
            if cell.row < first + batch.num_rows:
                return batch.column(0)[cell.row - first].as_py()
            first += batch.num_rows
    raise ValueError(f"{cell.file} was changed: it has no row {cell.row + 1}")


def arrow_batches(file: str) -> list[pa.RecordBatch]:
    """Return the record batches of an `.arrow` file (stream or file format), memory-mapped, not read."""
    import pyarrow as pa

    with pa.memory_map(file) as source:
        try:
            return list(pa.ipc.open_stream(source))
        except pa.ArrowInvalid:
            source.seek(0)
            reader = pa.ipc.open_file(source)
            return [reader.get_batch(number) for number in range(reader.num_record_batches)]
