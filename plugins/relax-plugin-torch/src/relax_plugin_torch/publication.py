# SPDX-License-Identifier: Apache-2.0
"""A rank's weights on their way out and in: published under Hugging Face names, taken over from another trainer.

Whole or not at all: what is stored is checked before the first tensor is copied; where a live version breaks off in the
middle, the rank computes nothing until a whole one came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from relax_core.api import Chosen, InfrastructureError, Manifest, Version, WeightTransport
from relax_core.api.weights import Payload
from relax_plugin_torch.model import named_tensors, published_array, published_arrays, whole_tensors
from relax_plugin_torch.sharding import share_like, whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Publication:
    """Of one rank; `build` makes transports. All ranks gather what is shared out, the first one sends."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, build: Callable[[Chosen], Any], first: bool) -> None:
        self._model, self._dtype, self._build, self._first = model, dtype, build, first
        self._transports: dict[str, WeightTransport] = {}
        self._loaded: Version | None = None
        self._torn = ""

    def send(self, version: Version, transport: Chosen, location: str, payload: Payload, base: str) -> Manifest:
        tensors = whole_tensors(self._model, self._first)
        if not self._first:
            return Manifest(version, payload, (), location, base, "")
        arrays = published_arrays(tensors, self._dtype)
        return self._transport(transport).send(version, payload, base, arrays, location)

    def transfer(self, manifest: Manifest, transport: Chosen, receivers: int, wait_s: float) -> int:
        """How many receivers took all of it; 0 on ranks that do not send."""
        tensors = whole_tensors(self._model, self._first)
        if not self._first:
            return 0
        arrays = published_arrays(tensors, self._dtype)
        return self._transport(transport).transfer(manifest, arrays, receivers, wait_s)

    def check_whole(self) -> None:
        """Raises where half of two versions lies in memory."""
        if self._torn:
            raise InfrastructureError(f"{self._torn}; the weights are of no version until a full one is loaded")

    @torch.no_grad()
    def load(self, manifest: Manifest, chosen: Chosen) -> None:
        """Take a version of another trainer."""
        own, transport = named_tensors(self._model), self._transport(chosen)
        self._refuse(manifest, own)

        def resident(name: str) -> np.ndarray:
            return published_array(whole(own[name]), self._dtype)[0]

        arriving = transport.receive(manifest, resident)
        if not transport.live:
            if manifest.payload == "delta":
                for _ in arriving:
                    pass
                arriving = transport.receive(manifest, resident)
            else:
                arriving = iter(list(arriving))
        missing = {info.name for info in manifest.sent}
        self._torn = f"{manifest.version} broke off while it was loaded"
        for info, array in arriving:
            value = torch.from_numpy(np.array(array))
            value = value.view(torch.bfloat16) if info.dtype == "BF16" else value
            own[info.name].copy_(share_like(own[info.name], value))
            missing.discard(info.name)
        if missing:
            raise ValueError(f"{manifest.version}: {sorted(missing)[:3]} did not arrive; publish again")
        self._torn, self._loaded = "", manifest.version

    def _refuse(self, manifest: Manifest, own: Mapping[str, torch.Tensor]) -> None:
        """ValueError where it is not for this model, or on top of what this rank has not."""
        if manifest.payload not in ("full", "delta"):
            raise ValueError(f"{manifest.version}: payload {manifest.payload}; this trainer takes full and delta")
        if manifest.payload == "delta" and (self._torn or manifest.base != str(self._loaded)):
            raise ValueError(f"{manifest.version}: a delta on top of {manifest.base}; this trainer has {self._loaded}")
        shapes = {info.name: info.shape for info in manifest.tensors}
        differing = sorted(
            name for name in own.keys() | shapes.keys()
            if name not in own or name not in shapes or tuple(own[name].shape) != shapes[name]
        )  # fmt: skip
        if differing:
            names = ", ".join(differing[:3])
            raise ValueError(f"{manifest.version}: {names} differ from this model; publish from the same architecture")

    def _transport(self, chosen: Chosen) -> WeightTransport:
        """Kept between publishes: a transport tells what has not changed since its last one."""
        key = f"{chosen.name} {sorted(chosen.options.items())}"
        if key not in self._transports:
            self._transports[key] = self._build(chosen)
        return self._transports[key]
