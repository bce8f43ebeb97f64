# SPDX-License-Identifier: Apache-2.0
"""Offloading of a rank's memory: weights and optimizer state move to pinned host memory, and gradients are dropped.

Optionally the optimizer's state is on the GPU only for steps, saves and loads. A CPU has no second memory: offloading
drops gradients, and returns the free pages that malloc keeps after a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from relax_core.engine_kit.host_memory import trim
from relax_core.trainer_kit.offload import Offload
from relax_plugin_torch.optimizer import parts as plain_parts
from relax_plugin_torch.sharding import local

PARTS = frozenset({"weights", "optimizer", "gradients"})


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


def _known(parts: Sequence[str]) -> set[str]:
    if unknown := sorted(set(parts) - PARTS):
        raise ValueError(f"parts: got {', '.join(unknown)}; this trainer has {', '.join(sorted(PARTS))}")
    return set(parts)
