# SPDX-License-Identifier: Apache-2.0
"""Opening of files of JSON, compressed or not. The format is known by the first bytes of a file, not by its name."""

from __future__ import annotations

import shutil
import tempfile
import zlib
from importlib import import_module
from pathlib import Path
from typing import IO

from relax_core.api.errors import ConfigError
from relax_core.api.files import open_regular

PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ": "lzma"}
"""Python's module for a compressed file, by the first bytes of the file. Some builds of Python lack a module."""
PACKED_SUFFIXES = (".gz", ".bz2", ".xz")
JSON_SUFFIXES = (".jsonl", ".json", *PACKED_SUFFIXES)
OTHER_FORMATS = {
    b"PAR1": ("a Parquet file", "give it a name that ends in .parquet"),
    b"ARROW1": ("an Arrow file", "give it a name that ends in .arrow"),
    b"(\xb5/\xfd": ("compressed by zstd", "unpack it (zstd -d), or compress it by gzip"),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
}
"""Description and fix for a file that does not hold JSON, by its first bytes."""
OTHER_SUFFIXES = (".csv", ".tsv", ".tar", ".tgz", ".zip", ".xlsx")


def unpacked(path: Path) -> tuple[IO[bytes], bool]:
    """Open a file; return it with False, or the content of a compressed file in a temporary file with True.

    Raises OSError, or ConfigError for a damaged file or one of another format.
    """
    suffix = Path(path.stem).suffix if path.suffix in PACKED_SUFFIXES else path.suffix
    if suffix in OTHER_SUFFIXES and path.is_file():
        raise ConfigError("data", f"{path}, which is not JSON", "convert it to JSON lines (.jsonl) or Parquet")
    file: IO[bytes] = open_regular(path)
    packer = next((module for first, module in PACKED.items() if _start(file).startswith(first)), "")
    if packer:
        # Rows are read by their place, which a compressed file does not have.
        content = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            module = import_module(packer)
            with file, module.open(file) as unpacking:
                shutil.copyfileobj(unpacking, content)
        except ImportError as error:
            raise ConfigError("data", f"{path}, but this Python lacks {packer}", "unpack the file") from error
        except (OSError, EOFError, zlib.error, getattr(module, "LZMAError", OSError)) as error:
            raise ConfigError(
                "data", f"{path}, which can't be unpacked ({error})", "write it again, or unpack it"
            ) from error
        file = content
    for first, (what, fix) in OTHER_FORMATS.items():
        if _start(file).startswith(first):
            file.close()
            raise ConfigError("data", f"{path}, which is {what}", fix)
    return file, bool(packer)


def _start(file: IO[bytes]) -> bytes:
    """Return the first bytes of a file; the next read starts at the first byte."""
    file.seek(0)
    start = file.read(8)
    file.seek(0)
    return start
