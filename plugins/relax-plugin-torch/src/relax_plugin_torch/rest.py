# SPDX-License-Identifier: Apache-2.0
"""A rank's memory while others have its GPU: weights and optimizer lie in pinned host memory, gradients are gone.

A CPU has no lower tier, and weights that are shared out over ranks stay where they are: there only gradients are freed.
It moves memory and looks at none of its contents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from relax_plugin_torch.sharding import local

PARTS = frozenset({"weights", "optimizer", "gradients"})


class Rest:
    """Which parts of a rank sleep."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        sharded: bool = False,
    ) -> None:
        self._model, self._optimizer, self._device, self._sharded = model, optimizer, device, sharded
        self.asleep: set[str] = set()
        self._host: dict[tuple[int, str], Tensor] = {}
        """Pinned buffers, kept: pinning is slow."""

    @property
    def able(self) -> tuple[str, ...]:
        """Parts whose sleep gives memory to others."""
        return tuple(sorted(PARTS)) if self._device.type == "cuda" and not self._sharded else ("gradients",)

    def need(self, part: str) -> None:
        """Raises ValueError where the part sleeps."""
        if part in self.asleep:
            raise ValueError(f"{part}: asleep; wake them first")

    def sleep(self, parts: Sequence[str]) -> int:
        """Free these; returns bytes really freed. Twice is once."""
        wanted = _known(parts) - self.asleep
        self.asleep |= wanted
        before = self._reserved()
        freed = self._drop_gradients() if "gradients" in wanted else 0
        if self._device.type != "cuda":
            return freed
        if "weights" in wanted and "weights" in self.able:
            self._move_weights(to_host=True)
        if "optimizer" in wanted and "optimizer" in self.able:
            self._move_optimizer(to_host=True)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return before - self._reserved()

    def wake(self, parts: Sequence[str]) -> None:
        wanted = _known(parts) & self.asleep
        if self._device.type == "cuda":
            if "weights" in wanted and "weights" in self.able:
                self._move_weights(to_host=False)
            if "optimizer" in wanted and "optimizer" in self.able:
                self._move_optimizer(to_host=False)
            torch.cuda.synchronize(self._device)
        self.asleep -= wanted

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0

    def _drop_gradients(self) -> int:
        """The bytes of gradients that nobody else holds."""
        held = []
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                storage = local(parameter.grad).untyped_storage()
                held.append((StorageWeakRef(storage), storage.nbytes()))
                del storage
                parameter.grad = None
        return sum(size for storage, size in held if storage.expired())

    def _move_weights(self, to_host: bool) -> None:
        for tensor in self._weights():
            tensor.data = self._moved(tensor.data, (id(tensor), ""), to_host)

    def _weights(self) -> Iterator[Tensor]:
        """Parameters and buffers; tied ones once."""
        yield from self._model.parameters()
        yield from self._model.buffers()

    def _move_optimizer(self, to_host: bool) -> None:
        if self._optimizer is None:
            return
        for parameter, state in self._optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = self._moved(value, (id(parameter), name), to_host)

    def _moved(self, tensor: Tensor, key: tuple[int, str], to_host: bool) -> Tensor:
        if tensor.is_cuda is not to_host:
            return tensor  # it was never there: some optimizers count their steps on the CPU
        if not to_host:
            return tensor.to(self._device, non_blocking=True) if key in self._host else tensor
        if key not in self._host:
            self._host[key] = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return self._host[key].copy_(tensor, non_blocking=True)


def _known(parts: Sequence[str]) -> set[str]:
    if unknown := sorted(set(parts) - PARTS):
        raise ValueError(f"parts: got {', '.join(unknown)}; this trainer has {', '.join(sorted(PARTS))}")
    return set(parts)
