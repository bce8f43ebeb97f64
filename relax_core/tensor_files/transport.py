# SPDX-License-Identifier: Apache-2.0
"""Weight transports through files: one safetensors file per version, on disk or in memory-backed files of one host.

A file appears whole or not at all (it is written under a temporary name), so a receiver never maps half a version. The
receiver checks each tensor against its fingerprint in the manifest. A file never changes while it is visible or read.
In memory, the pages of a released version are reused for a later version. A delta's file holds the encoded changes of
the tensors that changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from relax_core.api.errors import NO_ROOM, ConfigError, InfrastructureError
from relax_core.api.weights import (
    Manifest,
    Payload,
    Resident,
    TensorInfo,
    Tensors,
    Version,
    WeightTransport,
    combined_fingerprint,
)
from relax_core.tensor_files import safetensors_file
from relax_core.tensor_files.delta import DeltaBase, check_own_fingerprint, restore, unchanged_names
from relax_core.tensor_files.mapped_files import MappingCache, Overwritten, copied_mapping, lend, private_mapping
from relax_core.tensor_files.safetensors_file import QUOTED, Stopwatch

SHARED_MEMORY = Path("/dev/shm")
_FIRST_HEADER_BYTES = 1 << 14


class FileTransport(WeightTransport):
    """A transport that stores versions as files. A subclass decides where the files lie and how long they are kept."""

    kind: ClassVar[str] = "weight-transport"
    payloads: ClassVar[frozenset[str]] = frozenset({"full", "delta", "lora"})

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._sent: dict[str, tuple[Manifest, DeltaBase]] = {}
        """The version that was sent last and its tensors, by model; a delta that fails half way deletes the entry."""
        self._header_bytes = _FIRST_HEADER_BYTES

    # -- the sender ---------------------------------------------------------------------------------------------

    def send(self, version: Version, payload: Payload, base: str, tensors: Tensors, location: str) -> Manifest:
        if payload not in self.payloads:
            raise ValueError(f"payload {payload!r}: this transport moves {', '.join(sorted(self.payloads))}")
        directory, watch = self._directory(location), Stopwatch()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if payload == "delta":
                return self._send_delta(version, base, tensors, directory, watch)
            path, before = directory / f"{version}.safetensors", self._sent.get(version.model, (None, None))[0]
            infos = self._write(version, payload, base, watch.each("gather", tensors), path, watch)
            if not infos:
                path.unlink()
                raise ValueError(f"{version}: no tensors were given; pass all tensors of a {payload} version")
            path, same_host = self._placed(path), self.same_host
            manifest = Manifest(
                version, payload, tuple(infos), str(path), base, combined_fingerprint(infos),
                unchanged_names(before, infos), seconds=dict(watch.seconds),
            )  # fmt: skip

            def load() -> dict[str, np.ndarray]:  # a closure over `self` would keep its files until the collector runs
                mapped = private_mapping(path) if same_host else copied_mapping(path, directory)
                return safetensors_file.read(path, mapped).tensors

            self._sent[version.model] = manifest, DeltaBase(version, load, infos)
            return manifest
        except OSError as error:
            room = " (no space left; free some or name another weights location)" if error.errno in NO_ROOM else ""
            raise InfrastructureError(f"{version}: can't write to {directory}: {error.strerror}{room}") from error

    def _send_delta(
        self, version: Version, base: str, tensors: Tensors, directory: Path, watch: Stopwatch
    ) -> Manifest:  # fmt: skip
        before, tensors_before = self._sent.pop(version.model, (None, None))
        if before is None or tensors_before is None or before.payload == "lora" or base != str(before.version):
            kind = "lora" if before is not None and before.payload == "lora" else "full"
            have = "nothing was sent" if before is None else f"{before.version} ({kind}) was sent last"
            raise ValueError(f"{version}: a delta on top of {base or 'nothing'}, but {have}; send a full version")
        path, infos = directory / f"{version}.delta.safetensors", list[TensorInfo]()

        def encoded() -> Iterator[tuple[str, np.ndarray, str]]:
            for info, change in tensors_before.encode_next(version, tensors, watch):
                infos.append(info)
                if change:
                    yield info.name, np.frombuffer(change, np.uint8), "U8"

        written = self._write(version, "delta", base, encoded(), path, watch)
        path = self._placed(path)
        manifest = Manifest(
            version, "delta", tuple(infos), str(path), base, combined_fingerprint(infos), unchanged_names(before, infos),
            wire_bytes=sum(info.size_bytes for info in written), seconds=dict(watch.seconds),
        )  # fmt: skip
        self._sent[version.model] = manifest, tensors_before
        return manifest

    def _write(
        self, version: Version, payload: Payload, base: str, tensors: Tensors, path: Path, watch: Stopwatch
    ) -> list[TensorInfo]:
        # A model has one sender, so unfinished files of an earlier process are not in use.
        for left in path.parent.glob(f".{version.model}@*.tmp"):
            left.unlink(missing_ok=True)
        unfinished = path.parent / f".{version}.{os.getpid()}.tmp"
        metadata = {"format": "pt", "version": str(version), "payload": payload, "base": base}
        try:
            with self._opened(unfinished, payload) as file:
                infos, needed = safetensors_file.write(file, tensors, metadata, self._header_bytes, watch)
            self._header_bytes = max(needed, self._header_bytes)
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)
        return infos

    def _opened(self, unfinished: Path, payload: Payload) -> safetensors_file.SeekableFile:
        """Open the unfinished file of a version for writing."""
        return unfinished.open("w+b")

    def _placed(self, path: Path) -> Path:
        """Move a written version to its final path and return that path; by default, leave the file where it is."""
        return path

    def _directory(self, location: str) -> Path:
        if not location:
            raise ConfigError("weights.location", "nothing", "name a directory that sender and receivers see")
        return Path(location)

    # -- a receiver ---------------------------------------------------------------------------------------------

    def receive(self, manifest: Manifest, resident: Resident | None = None) -> Iterator[tuple[TensorInfo, np.ndarray]]:
        check_own_fingerprint(manifest)
        path = Path(manifest.location)
        if not path.is_file():
            raise _not_there(path)
        file = safetensors_file.read(path, self._mapped(path))
        held = [file.metadata.get(key) for key in ("version", "payload", "base")]
        if held != (wants := [str(manifest.version), manifest.payload, manifest.base]):
            raise ValueError(
                f"{path}: holds version, payload, base {_quoted(held)}, want {_quoted(wants)}; publish again"
            )
        wanted = {info.name for info in manifest.sent}
        if wanted != file.tensors.keys():
            lacking, extra = sorted(wanted - file.tensors.keys()), sorted(file.tensors.keys() - wanted)
            differ = f"lacks {_quoted(lacking)} and has {_quoted(extra)} too many"
            raise ValueError(f"{manifest.version}: {path} {differ}; publish again")
        for info in manifest.tensors if manifest.payload != "delta" else ():  # a delta's result is checked instead
            dtype, shape = file.dtypes[info.name], file.tensors[info.name].shape
            if (dtype, shape) != (info.dtype, info.shape):
                have, want = f"{dtype} {shape}", f"{info.dtype} {info.shape}"
                raise ValueError(f"{manifest.version} {info.name}: have {have}, want {want}; publish again")
        for info in manifest.sent:
            yield info, restore(manifest, info, file.tensors[info.name], resident)

    def _mapped(self, path: Path) -> np.ndarray | None:
        """Map a version's file so that it is not overwritten while mapped; return None if a plain mapping is enough."""
        return None

    def release(self, manifest: Manifest) -> None:
        Path(manifest.location).unlink(missing_ok=True)


class Disk(FileTransport):
    """A transport through a directory that every host sees."""


class SharedMemory(FileTransport):
    """A transport through a directory under /dev/shm, whose pages the processes of one host share without a disk."""

    same_host: ClassVar[bool] = True

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._read, self._written = MappingCache(writable=False), MappingCache(writable=True)

    def _opened(self, unfinished: Path, payload: Payload) -> safetensors_file.SeekableFile:
        """Open a full version for writing over the pages of a released version, unless a process still reads them."""
        if payload == "full":
            model = unfinished.name.partition("@")[0].removeprefix(".")
            with suppress(FileNotFoundError, BlockingIOError):
                _spare(unfinished.parent, model).rename(unfinished)
                return Overwritten(unfinished, self._written)
            unfinished.unlink(missing_ok=True)
        return super()._opened(unfinished, payload)

    def _mapped(self, path: Path) -> np.ndarray:
        try:
            return lend(path, self._read)
        except FileNotFoundError as error:
            raise _not_there(path) from error

    def release(self, manifest: Manifest) -> None:
        """Keep a full version's pages for the next version, and free the pages that were kept before."""
        if manifest.payload != "full":
            return super().release(manifest)
        path = Path(manifest.location)
        with suppress(FileNotFoundError):
            path.replace(_spare(path.parent, manifest.version.model))
        return None

    def _directory(self, location: str) -> Path:
        directory = super()._directory(location)
        if not SHARED_MEMORY.is_dir():
            raise ConfigError("weights.name", "shared-memory", f"this host has no {SHARED_MEMORY}; use disk")
        if not directory.resolve().is_relative_to(SHARED_MEMORY):
            raise ConfigError("weights.location", location, f"name a directory under {SHARED_MEMORY}, or use disk")
        return directory


def _spare(directory: Path, model: str) -> Path:
    return directory / f".{model}.spare"


def _quoted(values: list[Any]) -> str:
    """Return values as text for a message, shortened if they are many or long."""
    text = repr(values)
    return text if len(text) <= QUOTED else f"{text[:QUOTED]}... ({len(values)} in all)"


def _not_there(path: Path) -> InfrastructureError:
    return InfrastructureError(f"{path} does not exist; the version was released or never written")
