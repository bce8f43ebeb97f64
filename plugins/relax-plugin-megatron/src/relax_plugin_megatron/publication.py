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

    def fingerprint(self) -> str:
        """Return the fingerprint of the weights as they would be published; empty on ranks other than the first."""
        arrays = self._arrays()
        infos = [TensorInfo(name, a.shape, kind, tensor_fingerprint(a), a.nbytes) for name, a, kind in arrays]
        return combined_fingerprint(infos) if self._ranks.first else ""

    def send(self, version: Version, transport: Chosen, location: str, payload: Payload, base: str) -> Manifest:
        """Send a version. Raises ValueError for adapters, which this trainer does not train."""
        self._check_payload(payload)
        arrays = self._arrays()
        try:
            if self._ranks.first:
                return self._transport(transport).send(version, payload, base, arrays, location)
            return Manifest(version, payload, (), location, base, "")
        finally:
            _exhaust(arrays)

    def transfer(self, manifest: Manifest, transport: Chosen, receivers: int, wait_s: float) -> int:
        """Send a live version; return the number of receivers that got all of it, 0 on ranks that do not send."""
        self._check_payload(manifest.payload)
        arrays = self._arrays()
        try:
            return self._transport(transport).transfer(manifest, arrays, receivers, wait_s) if self._ranks.first else 0
        finally:
            _exhaust(arrays)

    def _arrays(self) -> Arrays:
        for name, tensor in self._weights.stream(self._dtype):
            yield name, *published_array(tensor, self._dtype)

    @staticmethod
    def _check_payload(payload: Payload) -> None:
        if payload == "lora":
            raise ValueError("payload lora: this trainer has no adapters; send full weights or a delta")

    @torch.no_grad()
    def load(self, manifest: Manifest, chosen: Chosen) -> None:
        """Load a version that another trainer published. Raises ValueError if it does not fit or lacks tensors."""
        self._check_payload(manifest.payload)
        self._refuse(manifest, {name: entry.shape for name, entry in self._weights.entries.items()})
        transport = self._transport(chosen)

        def resident(name: str) -> np.ndarray:
            return published_array(self._weights.whole(name, self._dtype), self._dtype)[0]

        if not transport.live:  # every tensor is checked before the first is copied
            for _ in transport.receive(manifest, resident):
                pass
        missing = {info.name for info in manifest.sent}
        self._torn = f"{manifest.version} broke off while it was loaded"
        for info, array in transport.receive(manifest, resident):
            value = torch.from_numpy(np.array(array))
            self._weights.put(info.name, value.view(torch.bfloat16) if info.dtype == "BF16" else value)
            missing.discard(info.name)
        if missing:
            raise ValueError(f"{manifest.version}: {sorted(missing)[:3]} did not arrive; publish again")
        self._torn, self._loaded = "", manifest.version


def _exhaust(arrays: Arrays) -> None:
    """Take the remaining tensors, so that no other rank waits for a rank that stopped early."""
    for _ in arrays:
        pass
