# SPDX-License-Identifier: Apache-2.0
"""Publication of a rank's weights under Hugging Face names, and loading of weights that another trainer published.

A version from storage is read and checked completely before its first tensor is copied. If a live transfer breaks off,
the rank refuses to compute until it has loaded a full version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from relax_core.api import Chosen, Manifest, Version
from relax_core.api.weights import Payload
from relax_core.trainer_kit.model_folder import published_array, published_arrays
from relax_core.trainer_kit.publisher import RankPublisher
from relax_plugin_torch.model import named_tensors, own_tensors, whole_tensors
from relax_plugin_torch.sharding import gathered, share_like, whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from relax_plugin_torch.adapters import Adapters


class Publication(RankPublisher):
    """Sends and loads the weights of one rank. All ranks gather sharded tensors; the first rank sends them."""

    def __init__(
        self, model: PreTrainedModel, dtype: torch.dtype, build: Callable[[Chosen], Any], first: bool,
        adapters: Adapters | None = None,
    ) -> None:  # fmt: skip
        super().__init__(build)
        self._model, self._dtype, self._first, self._adapters = model, dtype, first, adapters

    def send(self, version: Version, transport: Chosen, location: str, payload: Payload, base: str) -> Manifest:
        arrays = self._arrays(payload, base)
        if arrays is None:
            return Manifest(version, payload, (), location, base, "")
        return self._transport(transport).send(version, payload, base, arrays, location)

    def transfer(self, manifest: Manifest, transport: Chosen, receivers: int, wait_s: float) -> int:
        """Send a live version; return the number of receivers that got all of it, 0 on ranks that do not send."""
        arrays = self._arrays(manifest.payload, manifest.base)
        if arrays is None:
            return 0
        return self._transport(transport).transfer(manifest, arrays, receivers, wait_s)

    def _arrays(self, payload: Payload, base: str) -> Iterator[tuple[str, np.ndarray, str]] | None:
        """Return the gathered arrays to send; None on ranks that do not send.

        Payload `lora` contains only the adapters, in float32.
        """
        if payload == "lora":
            adapters = self._own_adapters(base)
            own = gathered(adapters.kept(own_tensors(self._model)), self._first)
            return published_arrays(adapters.alone(own), torch.float32) if self._first else None
        tensors = whole_tensors(self._model, self._first, self._adapters)
        return published_arrays(tensors, self._dtype) if self._first else None

    def _own_adapters(self, base: str) -> Adapters:
        """Return the adapters; raise ValueError if they need the base to be sent, or belong to a different base."""
        adapters = self._adapters
        if adapters is None or not adapters.table.plain:
            raise ValueError("payload lora: this trainer has no adapters of pairs A and B only; send full weights")
        if base != adapters.base:
            raise ValueError(f"payload lora: got base {base or 'none'}; these adapters belong to base {adapters.base}")
        return adapters

    @torch.no_grad()
    def load(self, manifest: Manifest, chosen: Chosen) -> None:
        """Load a version that another trainer published. Raises ValueError if it does not fit or lacks tensors."""
        own, transport = self._own(manifest), self._transport(chosen)
        self._refuse(manifest, {name: tuple(tensor.shape) for name, tensor in own.items()})

        def resident(name: str) -> np.ndarray:
            return published_array(whole(own[name]), torch.float32 if manifest.payload == "lora" else self._dtype)[0]

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
        if self._adapters is not None and manifest.payload != "lora":
            self._adapters.base = ""
        for info, array in arriving:
            value = torch.from_numpy(np.array(array))
            value = value.view(torch.bfloat16) if info.dtype == "BF16" else value
            own[info.name].copy_(share_like(own[info.name], value))
            missing.discard(info.name)
        if missing:
            raise ValueError(f"{manifest.version}: {sorted(missing)[:3]} did not arrive; publish again")
        if self._adapters is not None and manifest.payload != "lora":  # a new base; its adapters start at 0
            self._adapters.clear(self._model)
            self._adapters.base = manifest.fingerprint
        self._torn, self._loaded = "", manifest.version

    def _own(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """Return the tensors to load into: the adapters for payload `lora`, else the model below any adapters."""
        if manifest.payload != "lora":
            return named_tensors(self._model, self._adapters)
        adapters = self._own_adapters(manifest.base)
        return adapters.alone(adapters.kept(own_tensors(self._model)))
