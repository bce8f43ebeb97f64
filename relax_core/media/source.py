# SPDX-License-Identifier: Apache-2.0
"""Where a medium's bytes come from: a path, a URL, a data-URI or a cell of a task file, read up to a limit; and the key of
its content.

For those who write modality processors. It waits for nobody by itself: whoever reads foreign sources does so in a process
that may be killed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import stat
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import unquote_to_bytes
from urllib.request import Request, urlopen

from relax_core.media.embedded import SCHEME, EmbeddedMedia, cell_value, embedded, named

MAX_BYTES = 1 << 28
TIMEOUT_S = 20.0
"""Of silence while a URL is read."""
_KEY_BYTES = 16


def read_source(source: str, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes. ValueError names what is wrong with the source: none there, no regular file, too many."""
    if source.startswith("data:"):
        return _limited(_data_uri(source), max_bytes)
    if source.startswith(SCHEME):
        return _of_cell(EmbeddedMedia.parse(source), max_bytes)
    if source.startswith(("http://", "https://")):
        return _fetched(source, max_bytes)
    scheme = source.partition("://")
    if scheme[1] and scheme[0] != "file":
        raise ValueError(f"a source {shown(source)!r}; give a path, an http(s) URL or a data-URI")
    return _read(Path(scheme[2] if scheme[1] else source), max_bytes)


def shown(source: str) -> str:
    """A source for people: a data-URI by its beginning."""
    if source.startswith(SCHEME):
        return EmbeddedMedia.parse(source).shown
    return source if len(source) <= 200 else f"{source[:60]}... ({len(source)} characters)"


def content_key(data: bytes, *facts: Any) -> str:
    """One key for the same bytes under the same facts (processor, options, what the model says)."""
    digest = hashlib.blake2b(data, digest_size=_KEY_BYTES)
    digest.update(repr(facts).encode())
    return digest.hexdigest()


def _of_cell(cell: EmbeddedMedia, max_bytes: int) -> bytes:
    value = cell_value(cell)
    data = embedded(value)
    if data is not None:
        return _limited(data, max_bytes)
    source = named(value)
    if source is None or source.startswith(SCHEME):
        raise ValueError(f"{cell.shown} holds neither bytes nor a path or URL")
    return read_source(source if ":" in source else str(Path(cell.file).parent / source), max_bytes)


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe or a device may never end
            raise ValueError(f"{path} is not a regular file")
        with path.open("rb") as opened:
            return _limited(opened.read(max_bytes + 1), max_bytes)
    except OSError as error:
        raise ValueError(f"{path} can't be read ({error.strerror or error})") from error


def _fetched(url: str, max_bytes: int) -> bytes:
    try:
        with urlopen(Request(url, headers={"User-Agent": "relax"}), timeout=TIMEOUT_S) as answer:
            return _limited(answer.read(max_bytes + 1), max_bytes)
    except (OSError, URLError) as error:
        raise ValueError(f"{url} can't be fetched ({error}); is there a network? Else name a file") from error


def _data_uri(source: str) -> bytes:
    head, comma, body = source.partition(",")
    if not comma:
        raise ValueError("a data-URI without a comma before its data")
    try:
        return base64.b64decode(body, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)
    except binascii.Error as error:
        raise ValueError(f"a data-URI whose base64 is broken ({error})") from error


def _limited(data: bytes, max_bytes: int) -> bytes:
    if len(data) > max_bytes:
        raise ValueError(f"more than {max_bytes} bytes")
    if not data:
        raise ValueError("no bytes")
    return data
