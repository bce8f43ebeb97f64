# SPDX-License-Identifier: Apache-2.0
"""Publication of weights under Hugging Face names, and loading of weights that another trainer published.

Rank 0 sends; every other rank hands its parts to rank 0 tensor by tensor. A receiving rank keeps its own parts only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from relax_core.api import Chosen, Manifest, TensorInfo, Version
from relax_core.api.weights import Payload, combined_fingerprint, tensor_fingerprint
from relax_core.trainer_kit.lora import peft_name
from relax_core.trainer_kit.model_folder import published_array
from relax_core.trainer_kit.publisher import RankPublisher
from relax_core.trainer_kit.ranks import Ranks
from relax_plugin_megatron.weights import Weights

Arrays = Iterator[tuple[str, np.ndarray, str]]


class Publication(RankPublisher):
    """Sends and loads the weights of one rank. All ranks must call each method."""

    def __init__(self, weights: Weights, dtype: torch.dtype, build: Callable[[Chosen], Any], ranks: Ranks) -> None:
        super().__init__(build)
        self._weights, self._dtype, self._ranks = weights, dtype, ranks
        self.base = ""
        """Fingerprint of the model below the adapters as published; empty without adapters."""
        if weights.adapters:
            self.base = ranks.tell(self.fingerprint())[0]

    def fingerprint(self) -> str:
        """Return the fingerprint of the weights as they would be published; empty on ranks other than the first."""
        arrays = self._arrays()
        infos = [TensorInfo(name, a.shape, kind, tensor_fingerprint(a), a.nbytes) for name, a, kind in arrays]
        return combined_fingerprint(infos) if self._ranks.first else ""

    def send(self, version: Version, transport: Chosen, location: str, payload: Payload, base: str) -> Manifest:
        """Send a version. Raises ValueError for adapters of another base, or of a model that has none."""
        arrays = self._arrays(payload, base)
        try:
            if self._ranks.first:
                return self._transport(transport).send(version, payload, base, arrays, location)
            return Manifest(version, payload, (), location, base, "")
        finally:
            _exhaust(arrays)

    def transfer(self, manifest: Manifest, transport: Chosen, receivers: int, wait_s: float) -> int:
        """Send a live version; return the number of receivers that got all of it, 0 on ranks that do not send."""
        arrays = self._arrays(manifest.payload, manifest.base)
        try:
            return self._transport(transport).transfer(manifest, arrays, receivers, wait_s) if self._ranks.first else 0
        finally:
            _exhaust(arrays)

    def _arrays(self, payload: Payload = "full", base: str = "") -> Arrays:
        """Return the arrays to send: of adapters alone, in float32, or of all weights with adapters folded in."""
        if payload == "lora":
            self._check_adapters(base)
            tensors, dtype = self._weights.stream_trained(), torch.float32
        else:
            tensors, dtype = self._weights.stream(self._dtype), self._dtype
        named = peft_name if payload == "lora" else str
        return ((named(name), *published_array(tensor, dtype)) for name, tensor in tensors)

    def _check_adapters(self, base: str) -> None:
        """Raise ValueError if the adapters need the base to be sent, or belong to a different base."""
        if not self._weights.plain:
            raise ValueError("payload lora: this trainer has no adapters of pairs A and B only; send full weights")
        if base != self.base:
            raise ValueError(f"payload lora: got base {base or 'none'}; these adapters belong to base {self.base}")

    @torch.no_grad()
    def load(self, manifest: Manifest, chosen: Chosen) -> None:
        """Load a version that another trainer published. Raises ValueError if it does not fit or lacks tensors."""
        adapters = manifest.payload == "lora"
        if adapters:
            self._check_adapters(manifest.base)
        dtype = torch.float32 if adapters else self._dtype
        entries = self._weights.adapters if adapters else self._weights.entries
        names = {peft_name(name) if adapters else name: name for name in entries}
        self._refuse(manifest, {sent: entries[name].shape for sent, name in names.items()})
        transport = self._transport(chosen)

        def resident(name: str) -> np.ndarray:
            return published_array(self._weights.whole(names[name], dtype), dtype)[0]

        if not transport.live:  # every tensor is checked before the first is copied
            for _ in transport.receive(manifest, resident):
                pass
        missing = {info.name for info in manifest.sent}
        self._torn = f"{manifest.version} broke off while it was loaded"
        for info, array in transport.receive(manifest, resident):
            value = torch.from_numpy(np.array(array))
            self._weights.put(names[info.name], value.view(torch.bfloat16) if info.dtype == "BF16" else value)
            missing.discard(info.name)
        if missing:
            raise ValueError(f"{manifest.version}: {sorted(missing)[:3]} did not arrive; publish again")
        if self._weights.adapters and not adapters:  # a new base; its adapters start at 0
            self._weights.clear_adapters()
            self.base = manifest.fingerprint
        self._torn, self._loaded = "", manifest.version


def _exhaust(arrays: Arrays) -> None:
    """Take the remaining tensors, so that no other rank waits for a rank that stopped early."""
    for _ in arrays:
        pass
