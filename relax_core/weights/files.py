# SPDX-License-Identifier: Apache-2.0
"""Transports through files: one safetensors file a version, in a directory or in memory-backed files of one host.

A file appears whole or not at all (written beside, then renamed), so a receiver never maps half a version; what
it reads is checked against the manifest's fingerprints, tensor by tensor. Nothing changes while it is visible or read;
in memory, the pages of a released version are used for a later one (`pages.py`).
A delta's file holds the encoded changes of the tensors that changed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from relax_core.api.errors import ConfigError, InfrastructureError
from relax_core.api.weights import (
    Manifest,
    Payload,
    Resident,
    TensorInfo,
    Version,
    WeightTransport,
    combined_fingerprint,
    tensor_fingerprint,
)
from relax_core.weights import delta, safetensors_file
from relax_core.weights.delta import LastSent, Tensors
from relax_core.weights.mapped_files import Maps, Overwritten, lend
from relax_core.weights.stopwatch import Stopwatch

SHARED_MEMORY = Path("/dev/shm")
_FIRST_HEADER_BYTES = 1 << 14


class FileTransport(WeightTransport):
    """What both share; says nothing about where the directory is."""

    kind: ClassVar[str] = "weight-transport"
    payloads: ClassVar[frozenset[str]] = frozenset({"full", "delta", "lora"})

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._last: dict[str, LastSent] = {}
        self._header_bytes = _FIRST_HEADER_BYTES

    def send(
        self,
        version: Version,
        payload: Payload,
        base: str,
        tensors: Iterable[tuple[str, np.ndarray, str]],
        location: str,
    ) -> Manifest:
        if payload not in self.payloads:
            raise ValueError(f"payload {payload!r}: this transport moves {', '.join(sorted(self.payloads))}")
        directory = self._directory(location)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if payload == "delta":
                return self._send_delta(version, base, tensors, directory)
            return self._send_whole(version, payload, base, tensors, directory)
        except OSError as error:
            raise _unwritable(version, directory, error) from error

    def _send_whole(self, version: Version, payload: Payload, base: str, tensors: Tensors, directory: Path) -> Manifest:
        path, watch = directory / f"{version}.safetensors", Stopwatch()
        infos = self._write(version, payload, base, watch.each("gather", tensors), path, watch)
        if not infos:
            path.unlink()
            raise ValueError(f"{version}: no tensors were given; a {payload} version holds all of them")
        path = self._placed(path)
        last = self._last.get(version.model)
        unchanged = last.unchanged(infos) if last is not None else ()
        self._last[version.model] = LastSent(version, payload, infos, path, directory, in_memory=self.same_host)
        return Manifest(
            version, payload, tuple(infos), str(path), base, combined_fingerprint(infos), unchanged,
            seconds=watch.seconds,
        )  # fmt: skip

    def _send_delta(self, version: Version, base: str, tensors: Tensors, directory: Path) -> Manifest:
        last = self._last.pop(version.model, None)  # gone where this fails half way: then only a full one can follow
        if last is None:
            raise ValueError(
                f"{version}: a delta on top of {base or 'nothing'}, but nothing was sent; send a full version"
            )
        last.refuse_base(version, base)
        path, watch, infos = directory / f"{version}.delta.safetensors", Stopwatch(), list[TensorInfo]()
        encoded = ((name, np.frombuffer(d, np.uint8), "U8") for name, d in last.changes(tensors, infos, watch))
        written = self._write(version, "delta", base, encoded, path, watch)
        if lacking := sorted(last.infos.keys() - {info.name for info in infos}):
            path.unlink()
            raise ValueError(f"{version}: {lacking} were sent before and are not now; send a full version")
        path = self._placed(path)
        unchanged = last.unchanged(infos)
        last.move_on(version, infos)
        self._last[version.model] = last
        return Manifest(
            version, "delta", tuple(infos), str(path), base, combined_fingerprint(infos), unchanged,
            wire_bytes=sum(info.size_bytes for info in written), seconds=watch.seconds,
        )  # fmt: skip

    def _write(
        self, version: Version, payload: Payload, base: str, tensors: Tensors, path: Path, watch: Stopwatch
    ) -> list[TensorInfo]:
        self._remove_unfinished(version.model, path.parent)
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

    def _opened(self, unfinished: Path, payload: Payload) -> safetensors_file.Seekable:
        """Where a version is written."""
        return unfinished.open("w+b")

    def _held(self, path: Path) -> np.ndarray | None:
        """All bytes of a version's file, where they must be kept from being written over."""
        return None

    def _placed(self, path: Path) -> Path:
        """Where a version that was written is to be found from now on."""
        return path

    def _remove_unfinished(self, model: str, directory: Path) -> None:
        """A model has one sender, so what an earlier process left half written is nobody's."""
        for left in directory.glob(f".{model}@*.tmp"):
            left.unlink(missing_ok=True)

    def receive(self, manifest: Manifest, resident: Resident | None = None) -> Iterator[tuple[TensorInfo, np.ndarray]]:
        if manifest.fingerprint != combined_fingerprint(manifest.tensors):
            raise ValueError(f"{manifest.version}: the manifest contradicts its own fingerprint; publish again")
        path = Path(manifest.location)
        if not path.is_file():
            raise _not_there(path)
        held = self._held(path)
        _check_header(manifest, path)
        arrays = safetensors_file.read(path, [info.name for info in manifest.sent], held)
        if manifest.payload == "delta":
            arrays = _applied(manifest, arrays, resident)
        for info, array in zip(manifest.sent, arrays, strict=True):
            got = tensor_fingerprint(array)
            if got != info.fingerprint:
                raise ValueError(f"{manifest.version} {info.name}: have {got}, want {info.fingerprint}; publish again")
            yield info, array

    def release(self, manifest: Manifest) -> None:
        Path(manifest.location).unlink(missing_ok=True)

    def _directory(self, location: str) -> Path:
        if not location:
            raise ConfigError("weights.location", "nothing", "name a directory that sender and receivers see")
        return Path(location)


class Disk(FileTransport):
    """A directory that every host sees."""


class SharedMemory(FileTransport):
    """A directory under /dev/shm: pages are shared by sender and receivers of one host and never reach a disk."""

    same_host: ClassVar[bool] = True

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._read, self._written = Maps(writable=False), Maps(writable=True)

    def _opened(self, unfinished: Path, payload: Payload) -> safetensors_file.Seekable:
        """A full version goes into the pages of one that was released, where nobody reads that any more."""
        if payload == "full":
            model = unfinished.name.partition("@")[0].removeprefix(".")
            with suppress(FileNotFoundError, BlockingIOError):
                _spare(unfinished.parent, model).rename(unfinished)
                return Overwritten(unfinished, self._written)
            unfinished.unlink(missing_ok=True)
        return super()._opened(unfinished, payload)

    def _held(self, path: Path) -> np.ndarray:
        try:
            return lend(path, self._read)
        except FileNotFoundError as error:
            raise _not_there(path) from error

    def release(self, manifest: Manifest) -> None:
        """A full version's pages stay for the next one; those of the one released before it go."""
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


def _applied(manifest: Manifest, changes: Iterator[np.ndarray], resident: Resident | None) -> Iterator[np.ndarray]:
    """What the receiver's own tensors become; one at a time, so that it needs room for one."""
    if resident is None:
        raise ValueError(
            f"{manifest.version}: a delta on top of {manifest.base}, and nothing to put it on; take a full one"
        )
    for info, change in zip(manifest.sent, changes, strict=True):
        array = np.array(resident(info.name), order="C")
        if (array.dtype, array.shape) != (np.dtype(safetensors_file.NUMPY[info.dtype]), info.shape):
            raise ValueError(
                f"{manifest.version} {info.name}: have {array.dtype} {array.shape}, want {info.dtype} {info.shape}"
            )
        try:
            delta.apply(array, change.data)
        except ValueError as error:
            raise ValueError(f"{manifest.version} {info.name}: {error}; publish again") from error
        yield array


def _check_header(manifest: Manifest, path: Path) -> None:
    entries, metadata, _ = safetensors_file.read_header(path)
    held = [metadata.get(key) for key in ("version", "payload", "base")]
    wants = [str(manifest.version), manifest.payload, manifest.base]
    if held != wants:
        raise ValueError(f"{path}: holds version, payload, base {held}, want {wants}; publish again")
    wanted = {info.name for info in manifest.sent}
    if wanted != set(entries):
        lacking, extra = sorted(wanted - set(entries)), sorted(set(entries) - wanted)
        raise ValueError(f"{manifest.version}: {path} lacks {lacking} and has {extra} too many; publish again")
    if manifest.payload == "delta":
        return  # encoded: what comes of them is checked
    for info in manifest.tensors:
        entry = entries[info.name]
        if (entry.dtype, entry.shape) != (info.dtype, info.shape):
            have, want = f"{entry.dtype} {entry.shape}", f"{info.dtype} {info.shape}"
            raise ValueError(f"{manifest.version} {info.name}: have {have}, want {want}; publish again")


def _spare(directory: Path, model: str) -> Path:
    return directory / f".{model}.spare"


def _not_there(path: Path) -> InfrastructureError:
    return InfrastructureError(f"{path} is not there; it was released or never written")


def _unwritable(version: Version, directory: Path, error: OSError) -> InfrastructureError:
    room = " (no space left; free some or name another weights location)" if error.errno == errno.ENOSPC else ""
    return InfrastructureError(f"{version}: can't write to {directory}: {error.strerror}{room}")
