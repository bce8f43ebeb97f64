# SPDX-License-Identifier: Apache-2.0
"""A rank's memory while others have its GPU: weights and optimizer lie in pinned host memory, gradients are gone.

The optimizer's state may lie there for good but for the moments it is stepped or saved. A CPU has no lower tier: there
only gradients are freed, and what malloc kept of a step. It moves memory and looks at none of its contents.
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
    """The parts of a rank that sleep: weights and optimizer in pinned host memory, gradients gone.

    Invariants: while a part sleeps nobody may use it, and `need` refuses who asks; the bytes come back as they were.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device, *,
        lower_tier: bool | None = None, apart: bool = False,
    ) -> None:  # fmt: skip
        """`lower_tier`: whether the host has memory that is not the device's own; a GPU's has. `apart`: the optimizer's
        state lies there while nobody needs it."""
        self._model, self._optimizer, self._device, self._apart = model, optimizer, device, apart
        self._lower_tier = device.type == "cuda" if lower_tier is None else lower_tier
        self.asleep: set[str] = set()
        self._weights, self._state = Offload(device), Offload(device)

    @property
    def able(self) -> tuple[str, ...]:
        """Name the parts whose sleep gives memory to others."""
        return tuple(sorted(PARTS)) if self._lower_tier else ("gradients",)

    def need(self, *parts: str) -> None:
        """Raise ValueError where one of them sleeps."""
        for part in parts:
            if part in self.asleep:
                raise ValueError(f"{part}: asleep; wake them first")

    def sleep(self, parts: Sequence[str]) -> int:
        """Free these parts; return the bytes really freed. Twice is once."""
        wanted = _known(parts) - self.asleep
        self.asleep |= wanted
        before = self._reserved()
        freed = self._drop_gradients() if "gradients" in wanted else 0
        if self._lower_tier and "weights" in wanted:
            freed += self._weights.away(local(one) for one in (*self._model.parameters(), *self._model.buffers()))
        if self._lower_tier and "optimizer" in wanted:
            freed += self._state.away(self._moments())
        if self._device.type != "cuda":
            trim()  # malloc keeps what a step had at its peak
            return freed
        torch.cuda.empty_cache()
        return before - self._reserved()

    def wake(self, parts: Sequence[str]) -> None:
        wanted = _known(parts) & self.asleep
        if "weights" in wanted:
            self._weights.back()
        if "optimizer" in wanted and not self._apart:
            self._state.back()
        self.asleep -= wanted

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
        """Drop gradients; return the bytes of those that nobody else holds."""
        held = []
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                storage = local(parameter.grad).untyped_storage()
                held.append((StorageWeakRef(storage), storage.nbytes()))
                del storage
                parameter.grad = None
        return sum(size for storage, size in held if storage.expired())


def check_offload(wanted: bool, device: torch.device) -> None:
    """Raise ConfigError where there is nowhere to."""
    if wanted and device.type != "cuda":
        fix = "only a GPU has memory below its own; leave it out, or set trainer.device=cuda"
        raise ConfigError(FIELD, f"true on {device.type}", fix)


def _known(parts: Sequence[str]) -> set[str]:
    if unknown := sorted(set(parts) - PARTS):
        raise ValueError(f"parts: got {', '.join(unknown)}; this trainer has {', '.join(sorted(PARTS))}")
    return set(parts)


Storage = torch.UntypedStorage


class Offload:
    """Some tensors of one device, here or away: they are copied to host memory and their storage is emptied.

    It works on storages, not on tensors: every view and every share of FSDP that reads one stays what it is, tied weights
    move once, and an optimizer finds its state again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: dict[StorageWeakRef, Tensor] = {}
        """Buffers of storages that still live, kept: pinning is slow."""
        self._away: list[tuple[Storage, Tensor]] = []

    @torch.no_grad()
    def away(self, tensors: Iterable[Tensor]) -> int:
        """Move what is here; return its bytes. What is on another device stays: some optimizers count steps on the CPU."""
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
        """Move everything back; return its bytes."""
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
    """View all of it, whatever tensors read it as."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def trim() -> None:
    """Give free pages that malloc keeps back to the system; elsewhere than on glibc nothing happens."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
