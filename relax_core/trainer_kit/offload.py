# SPDX-License-Identifier: Apache-2.0
"""Tensors of a trainer that wait in pinned host memory, such as the state of an optimizer between updates."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from relax_core.api import ConfigError

FIELD = "trainer.offload_optimizer"


def check_offload(wanted: bool, device: torch.device) -> None:
    """Raise ConfigError for `offload_optimizer` without a GPU."""
    if wanted and device.type != "cuda":
        fix = "a CPU has no second memory to offload to; leave it out"
        raise ConfigError(FIELD, f"true on {device.type}", fix)


Storage = torch.UntypedStorage


class Offload:
    """Tensors that move from a device to host memory and back: values are copied, and device storages are emptied.

    Storages move, and tensor objects stay. So views and FSDP shards of a storage stay valid, tied weights move once,
    and an optimizer keeps its state.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: dict[StorageWeakRef, Tensor] = {}
        """Host buffers by storage, kept for reuse while the storage exists, since pinning memory is slow."""
        self._away: list[tuple[Storage, Tensor]] = []

    @torch.no_grad()
    def away(self, tensors: Iterable[Tensor]) -> int:
        """Move tensors to host memory; return their bytes.

        Tensors on a different device are skipped, such as an optimizer's step count on the CPU.
        """
        gone = [key for key in self._host if key.expired()]  # type: ignore[no-untyped-call]
        for key in gone:
            del self._host[key]
        own = (one.untyped_storage() for one in tensors if one.device.type == self._device.type)
        here = {storage._cdata: storage for storage in own if storage.nbytes()}
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
        """Move everything back to the device; return the bytes moved."""
        moved, self._away = self._away, []
        for storage, buffer in moved:
            storage.resize_(buffer.nbytes)
            _bytes(storage).copy_(buffer, non_blocking=True)
        self._synchronize()
        return sum(buffer.nbytes for _, buffer in moved)

    def _buffer(self, storage: Storage) -> Tensor:
        key = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        if key not in self._host or self._host[key].nbytes != storage.nbytes():
            self._host[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        return self._host[key]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _bytes(storage: Storage) -> Tensor:
    """Return a view of a storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
