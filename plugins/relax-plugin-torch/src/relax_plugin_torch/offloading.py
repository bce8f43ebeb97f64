# SPDX-License-Identifier: Apache-2.0
"""Offloading of a rank's memory: weights and optimizer state move to pinned host memory, and gradients are dropped.

Optionally the optimizer's state is on the GPU only for steps, saves and loads. A CPU has no second memory: offloading
drops gradients, and returns the free pages that malloc keeps after a step.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from relax_core.api import ConfigError
from relax_plugin_torch.optimizer import parts as plain_parts
from relax_plugin_torch.sharding import local

PARTS = frozenset({"weights", "optimizer", "gradients"})
FIELD = "trainer.offload_optimizer"


class Offloader:
    """The parts of a rank that can be offloaded: weights, optimizer state and gradients.

    Invariants: `need` raises ValueError for an offloaded part, which can't be used; weights and optimizer state
    return with the same bytes.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device, *,
        lower_tier: bool | None = None, apart: bool = False,
    ) -> None:  # fmt: skip
        """Start with all parts loaded.

        `lower_tier`: True if host memory is separate from the device's memory; None: True for a GPU.
        `apart`: keep the optimizer's state in host memory except within `with_optimizer`.
        """
        self._model, self._optimizer, self._device, self._apart = model, optimizer, device, apart
        self._lower_tier = device.type == "cuda" if lower_tier is None else lower_tier
        self.offloaded: set[str] = set()
        self._weights, self._state = Offload(device), Offload(device)

    @property
    def able(self) -> tuple[str, ...]:
        """Names of the parts whose memory offloading frees."""
        return tuple(sorted(PARTS)) if self._lower_tier else ("gradients",)

    def need(self, *parts: str) -> None:
        """Raise ValueError if one of the parts is offloaded."""
        for part in parts:
            if part in self.offloaded:
                raise ValueError(f"{part}: offloaded; onload them first")

    def offload(self, parts: Sequence[str]) -> int:
        """Offload parts; return the measured bytes that this freed. Parts that are already offloaded are skipped."""
        wanted = _known(parts) - self.offloaded
        self.offloaded |= wanted
        before = self._reserved()
        freed = self._drop_gradients() if "gradients" in wanted else 0
        if self._lower_tier and "weights" in wanted:
            freed += self._weights.away(local(one) for one in (*self._model.parameters(), *self._model.buffers()))
        if self._lower_tier and "optimizer" in wanted:
            freed += self._state.away(self._moments())
        if self._device.type != "cuda":
            trim()  # malloc keeps the memory of a step's peak
            return freed
        torch.cuda.empty_cache()
        return before - self._reserved()

    def onload(self, parts: Sequence[str]) -> None:
        wanted = _known(parts) & self.offloaded
        if "weights" in wanted:
            self._weights.back()
        if "optimizer" in wanted and not self._apart:
            self._state.back()
        self.offloaded -= wanted

    @contextmanager
    def with_optimizer(self) -> Iterator[None]:
        """Keep the optimizer's state on the device while the context is open."""
        self.need("optimizer")
        self._state.back()
        try:
            yield
        finally:
            if self._apart:
                self._state.away(self._moments())

    def _moments(self) -> Iterator[Tensor]:
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        for value in (value for state in states for value in state.values() if isinstance(value, Tensor)):
            yield from plain_parts(local(value)).values()

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0

    def _drop_gradients(self) -> int:
        """Drop gradients; return the freed bytes, which exclude gradients that are still referenced elsewhere."""
        held = []
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                storage = local(parameter.grad).untyped_storage()
                held.append((StorageWeakRef(storage), storage.nbytes()))
                del storage
                parameter.grad = None
        return sum(size for storage, size in held if storage.expired())


def check_offload(wanted: bool, device: torch.device) -> None:
    """Raise ConfigError for `offload_optimizer` without a GPU."""
    if wanted and device.type != "cuda":
        fix = "a CPU has no second memory to offload to; leave it out, or set trainer.device=cuda"
        raise ConfigError(FIELD, f"true on {device.type}", fix)


def _known(parts: Sequence[str]) -> set[str]:
    if unknown := sorted(set(parts) - PARTS):
        raise ValueError(f"parts: got {', '.join(unknown)}; this trainer has {', '.join(sorted(PARTS))}")
    return set(parts)


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
        self._host = {key: buffer for key, buffer in self._host.items() if not key.expired()}
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
        key = StorageWeakRef(storage)
        if key not in self._host or self._host[key].nbytes != storage.nbytes():
            self._host[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        return self._host[key]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _bytes(storage: Storage) -> Tensor:
    """Return a view of a storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def trim() -> None:
    """Return malloc's free pages to the system. Does nothing without glibc."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
