# SPDX-License-Identifier: Apache-2.0
"""Transports through files: one safetensors file a version, in a directory or in memory-backed files of one host.

A file appears whole or not at all (written beside, then renamed), so a receiver never maps half a version; what
it reads is checked against the manifest's fingerprints, tensor by tensor. Files are never changed once visible.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from relax_core.api.errors import ConfigError, InfrastructureError
from relax_core.api.version import Version
from relax_core.api.weights import (
    Manifest,
    Payload,
    Resident,
    TensorInfo,
    WeightTransport,
    combined_fingerprint,
    tensor_fingerprint,
)
from relax_core.weights import safetensors_file

SHARED_MEMORY = Path("/dev/shm")
_FIRST_HEADER_BYTES = 1 << 14


class FileTransport(WeightTransport):
    """What both share; says nothing about where the directory is."""

    kind: ClassVar[str] = "weight-transport"

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._sent: dict[str, dict[str, str]] = {}
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
        path = directory / f"{version}.safetensors"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            infos = self._write(version, tensors, path)
        except OSError as error:
            raise _unwritable(version, directory, error) from error
        before = self._sent.get(version.model, {})
        self._sent[version.model] = {info.name: info.fingerprint for info in infos}
        unchanged = tuple(info.name for info in infos if before.get(info.name) == info.fingerprint)
        return Manifest(version, payload, tuple(infos), str(path), base, combined_fingerprint(infos), unchanged)

    def _write(self, version: Version, tensors: Iterable[tuple[str, np.ndarray, str]], path: Path) -> list[TensorInfo]:
        self._remove_unfinished(version.model, path.parent)
        unfinished = path.parent / f".{version}.{os.getpid()}.tmp"
        try:
            with unfinished.open("w+b") as file:
                metadata = {"format": "pt", "version": str(version)}
                infos, needed = safetensors_file.write(file, tensors, metadata, self._header_bytes)
            self._header_bytes = max(needed, self._header_bytes)
            if not infos:
                raise ValueError(f"{version}: no tensors were given; a full version holds the whole model")
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)
        return infos

    def _remove_unfinished(self, model: str, directory: Path) -> None:
        """A model has one sender, so what an earlier process left half written is nobody's."""
        for left in directory.glob(f".{model}@*.tmp"):
            left.unlink(missing_ok=True)

    def receive(self, manifest: Manifest, resident: Resident | None = None) -> Iterator[tuple[TensorInfo, np.ndarray]]:
        if manifest.fingerprint != combined_fingerprint(manifest.tensors):
            raise ValueError(f"{manifest.version}: the manifest contradicts its own fingerprint; publish again")
        path = Path(manifest.location)
        if not path.is_file():
            raise InfrastructureError(f"{manifest.version}: {path} is not there; it was released or never written")
        _check_header(manifest, path)
        arrays = safetensors_file.read(path, [info.name for info in manifest.tensors])
        for info, array in zip(manifest.tensors, arrays, strict=True):
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

    def _directory(self, location: str) -> Path:
        directory = super()._directory(location)
        if not SHARED_MEMORY.is_dir():
            raise ConfigError("weights.name", "shared-memory", f"this host has no {SHARED_MEMORY}; use disk")
        if not directory.resolve().is_relative_to(SHARED_MEMORY):
            raise ConfigError("weights.location", location, f"name a directory under {SHARED_MEMORY}, or use disk")
        return directory


def _check_header(manifest: Manifest, path: Path) -> None:
    entries, metadata, _ = safetensors_file.read_header(path)
    if metadata.get("version") != str(manifest.version):
        raise ValueError(f"{path}: holds version {metadata.get('version')}, want {manifest.version}; publish again")
    wanted = {info.name for info in manifest.tensors}
    if wanted != set(entries):
        lacking, extra = sorted(wanted - set(entries)), sorted(set(entries) - wanted)
        raise ValueError(f"{manifest.version}: {path} lacks {lacking} and has {extra} too many; publish again")
    for info in manifest.tensors:
        entry = entries[info.name]
        if (entry.dtype, entry.shape) != (info.dtype, info.shape):
            have, want = f"{entry.dtype} {entry.shape}", f"{info.dtype} {info.shape}"
            raise ValueError(f"{manifest.version} {info.name}: have {have}, want {want}; publish again")


def _unwritable(version: Version, directory: Path, error: OSError) -> InfrastructureError:
    room = " (no space left; free some or name another weights location)" if error.errno == errno.ENOSPC else ""
    return InfrastructureError(f"{version}: can't write to {directory}: {error.strerror}{room}")
