# SPDX-License-Identifier: Apache-2.0
"""Dropout before adapters: on only while an update accumulates, so that scoring is of the policy that is published.

The draw depends on the update, the rank and the chunk alone: ranks that get different micro-batches keep the same
global random state, and a continued run draws what the first one did.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from relax_plugin_torch.adapters import Adapters

_PRIME = 1_000_003


class Dropout:
    """The dropout of the adapters in one rank's model."""

    def __init__(self, model: nn.Module, rank: int, device: torch.device, adapters: Adapters | None) -> None:
        wanted = adapters is not None and adapters.table.dropout > 0
        self._layers = [module for module in model.modules() if wanted and hasattr(module, "lora_dropout")]
        self._rank, self._devices = rank, [device] if device.type == "cuda" else []
        self._draw = self._chunk = 0

    def begin(self) -> None:
        """An update begins: the same draw on every rank."""
        if self._layers:
            self._draw, self._chunk = int(torch.randint(2**31, ())), 0

    @contextmanager
    def on(self) -> Iterator[None]:
        """For one chunk."""
        if not self._layers:
            yield
            return
        self._chunk += 1
        with torch.random.fork_rng(devices=self._devices):
            torch.manual_seed(((self._draw * _PRIME + self._rank) * _PRIME + self._chunk) % 2**63)
            self._switch(True)
            try:
                yield
            finally:
                self._switch(False)

    def _switch(self, on: bool) -> None:
        """peft's layers look at their own mode too, not only at their dropout's."""
        for layer in self._layers:
            layer.train(on)
