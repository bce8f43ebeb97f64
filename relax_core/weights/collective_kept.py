# SPDX-License-Identifier: Apache-2.0
"""What a sender of deltas keeps: the last version's bytes and the newest delta, in two nameless files.

In files, because a second model in memory is what nobody has room for; nameless, so that they end with the process.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from relax_core.api.version import Version
from relax_core.weights import delta
from relax_core.weights.collective_payload import Tensors
from relax_core.weights.nameless import nameless
from relax_core.weights.safetensors_file import NUMPY


class Kept:
    """Of one model."""

    def __init__(self, location: str) -> None:
        self.version: Version | None = None
        """None while it is being replaced: what failed half way is no base."""
        self.lengths: dict[str, int] = {}
        """By name: bytes of the newest delta; 0 where nothing changed."""
        self._places: dict[str, tuple[int, str, tuple[int, ...]]] = {}
        self._size = 0
        self._base, self._delta = nameless(location), nameless(location)

    def replace(self, version: Version, tensors: Tensors, *, whole: bool) -> Iterator[tuple[str, np.ndarray, str]]:
        """Pass tensors on, keep them as the base of the next delta, and (not `whole`) what changed since the last."""
        self.version, self.lengths = None, {}
        self._delta.seek(0)
        self._delta.truncate()
        if whole:
            self._places, self._size = {}, 0
        for name, array, dtype in tensors:
            self._keep(name, array, dtype, whole)
            yield name, array, dtype
        self._delta.flush()
        self.version = version

    def _keep(self, name: str, array: np.ndarray, dtype: str, whole: bool) -> None:
        if whole:
            self._places[name] = (self._size, dtype, tuple(array.shape))
            self._size += array.nbytes
        else:
            piece = delta.encode(self._old(name, array, dtype), array)
            self.lengths[name] = len(piece)
            self._delta.write(piece)
            if not piece:
                return
        self._base.seek(self._places[name][0])
        self._base.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def _old(self, name: str, array: np.ndarray, dtype: str) -> np.ndarray:
        place, *known = self._places.get(name, (0, "nothing", ()))
        if tuple(known) != (dtype, tuple(array.shape)):
            raise ValueError(f"{name}: {dtype} {array.shape} has no base of this kind: {known}; send a full version")
        old = np.empty(array.shape, NUMPY[dtype])
        self._base.seek(place)
        self._base.readinto(old.reshape(-1).view(np.uint8).data)  # type: ignore[attr-defined]
        return old

    def read_delta(self, chunk_bytes: int) -> Iterator[np.ndarray]:
        """The newest delta's bytes in order."""
        self._delta.seek(0)
        while chunk := self._delta.read(chunk_bytes):
            yield np.frombuffer(chunk, np.uint8)
