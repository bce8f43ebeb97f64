# SPDX-License-Identifier: Apache-2.0
"""What a sender sent last, as the thing that a delta is made against.

It costs nothing until a delta is made: then a copy of the last full file follows what is sent. On a disk the copy is a
nameless file; of a memory-backed one only the pages that change are copied, which in the end are nearly all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from relax_core.api.version import Version
from relax_core.api.weights import Payload, TensorInfo
from relax_core.weights import delta, safetensors_file
from relax_core.weights.stopwatch import Stopwatch

Tensors = Iterable[tuple[str, np.ndarray, str]]


class LastSent:
    """Of one model; a full version begins it, deltas move it on."""

    def __init__(
        self, version: Version, payload: Payload, infos: Iterable[TensorInfo], path: Path, directory: Path,
        in_memory: bool,
    ) -> None:  # fmt: skip
        """`in_memory`: the file is memory, written over once it is released unless it is read."""
        self.version, self._payload, self._path = version, payload, path
        self._directory, self._in_memory = directory, in_memory
        self.infos = {info.name: info for info in infos}
        self._arrays: dict[str, np.ndarray] = {}

    def unchanged(self, infos: Iterable[TensorInfo]) -> tuple[str, ...]:
        """Names whose bytes are those of the last version."""
        return tuple(i.name for i in infos if i.name in self.infos and self.infos[i.name].fingerprint == i.fingerprint)

    def refuse_base(self, version: Version, base: str) -> None:
        """ValueError unless `base` names what was sent last and that was a whole model."""
        if self._payload == "lora" or base != str(self.version):
            raise ValueError(
                f"{version}: a delta on top of {base or 'nothing'}, but {self.version} ({self._payload}) was sent last; "
                "send a full version"
            )

    def changes(self, tensors: Tensors, infos: list[TensorInfo], watch: Stopwatch) -> Iterator[tuple[str, bytes]]:
        """Deltas of the tensors that changed; fills `infos` with what all of them are now."""
        if not self._arrays:
            self._arrays = self._writable()
        for name, array, dtype in watch.each("gather", tensors):
            data = safetensors_file.checked(name, array, dtype)
            with watch.timing("hash"):
                info = safetensors_file.described(name, data, dtype)
            before = self._alike(info)
            infos.append(info)
            if before.fingerprint != info.fingerprint:
                with watch.timing("write"):
                    old = self._arrays[name]
                    encoded = delta.encode(old, data)
                    np.copyto(old, data)
                yield name, encoded

    def _writable(self) -> dict[str, np.ndarray]:
        names, path = list(self.infos), self._path
        held = safetensors_file.private(path) if self._in_memory else safetensors_file.copied(path, self._directory)
        return dict(zip(names, safetensors_file.read(path, names, held), strict=True))

    def _alike(self, info: TensorInfo) -> TensorInfo:
        before = self.infos.get(info.name)
        if before is None or (before.dtype, before.shape) != (info.dtype, info.shape):
            have = "nothing" if before is None else f"{before.dtype} {before.shape}"
            raise ValueError(f"{info.name}: {info.dtype} {info.shape}, but {have} before; send a full version")
        return before

    def move_on(self, version: Version, infos: Iterable[TensorInfo]) -> None:
        """The delta was written: this is what was sent last now."""
        self.version, self._payload = version, "full"
        self.infos = {info.name: info for info in infos}
