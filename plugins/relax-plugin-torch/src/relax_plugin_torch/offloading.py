# SPDX-License-Identifier: Apache-2.0
"""Tensors whose memory lies in the host's for a while: what they hold is copied away and their storage emptied.

It works on storages, not on tensors: every view and every share of FSDP that reads one stays what it is, tied weights move
once, and an optimizer finds its state again. While a storage is away nobody may read its tensors; who asks is `Rest`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Storage = torch.UntypedStorage


class Offload:
    """Some tensors of one device, here or away."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: dict[StorageWeakRef, Tensor] = {}
        """Buffers of storages that still live, kept: pinning is slow."""
        self._away: list[tuple[Storage, Tensor]] = []

    @torch.no_grad()
    def away(self, tensors: Iterable[Tensor]) -> int:
        """Move what is here; returns its bytes. What is on another device stays there."""
        self._host = {key: buffer for key, buffer in self._host.items() if not key.expired()}
        here = {one._cdata: one for one in map(_storage, filter(self._is_here, tensors)) if one.nbytes()}
        moved = [(storage, self._buffer(storage)) for storage in here.values()]
        for storage, buffer in moved:
            buffer.copy_(_bytes(storage), non_blocking=True)
        self._synchronize()
        for storage, _ in moved:
            storage.resize_(0)
        self._away += moved
        return sum(buffer.nbytes for _, buffer in moved)

    @torch.no_grad()
    def back(self) -> int:
        """Move everything back; returns its bytes."""
        moved, self._away = self._away, []
        for storage, buffer in moved:
            storage.resize_(buffer.nbytes)
            _bytes(storage).copy_(buffer, non_blocking=True)
        self._synchronize()
        return sum(buffer.nbytes for _, buffer in moved)

    def _is_here(self, tensor: Tensor) -> bool:
        """Some optimizers count their steps on the CPU."""
        return tensor.device.type == self._device.type

    def _buffer(self, storage: Storage) -> Tensor:
        key = StorageWeakRef(storage)
        if key not in self._host or self._host[key].nbytes != storage.nbytes():
            self._host[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        return self._host[key]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _storage(tensor: Tensor) -> Storage:
    return tensor.untyped_storage()


def _bytes(storage: Storage) -> Tensor:
    """All of it, whatever tensors read it as."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
