# SPDX-License-Identifier: Apache-2.0
"""The routers of a Hugging Face mixture of experts: what they choose, and how they are made to choose the same again.

Replay keeps the logits that the model has now, so that its gate keeps its gradient, and takes only the experts from
before (https://arxiv.org/abs/2510.11370): their weights are the softmax of the logits of now over them. It knows routers
of transformers that give (logits, weights, experts); each is tried, and one that weighs in another way is refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from relax_core.api.errors import ConfigError
from relax_core.api.routing import Routing

FIELD = "model.routing_replay"
_KIND = "TopKRouter"
"""How transformers' classes of routers end."""
_TRIED = 5


def routers_of(model: nn.Module) -> list[nn.Module]:
    """In the order in which they compute."""
    return [module for module in model.modules() if type(module).__name__.endswith(_KIND)]


def routing_of(model: nn.Module) -> Routing | None:
    """How a loaded model routes; None where it has no routers that can be watched."""
    found = routers_of(model)
    config = model.config.to_dict()  # type: ignore[operator,union-attr]
    told = Routing.of(config)
    return told if found and told is not None and told.layers == len(found) else None


class RouteRecorder:
    """What routers chose, from one `take` to the next."""

    def __init__(self, model: nn.Module, routing: Routing) -> None:
        self.routing, self.on = routing, False
        self._dtype = torch.uint8 if routing.dtype == "uint8" else torch.int16
        self._chosen: list[Tensor] = []
        for router in routers_of(model):
            router.register_forward_hook(self._see)

    def _see(self, router: nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if self.on:
            self._chosen.append(output[2])

    def take(self) -> np.ndarray:
        """[positions, layers, top_k] of the pass that ended."""
        chosen, self._chosen = self._chosen, []
        return torch.stack(chosen, dim=1).to(self._dtype).cpu().numpy().view(self.routing.dtype)


class RouteReplay:
    """Routers that choose what they are told, from one `tell` to the next: backward and recomputation too."""

    def __init__(self, model: nn.Module) -> None:
        self._routers = routers_of(model)
        routing = routing_of(model)
        if routing is None:
            raise ConfigError(FIELD, "a model", "its routers are none that can be replayed: leave it out")
        self.routing = routing
        for kind in {type(router): router for router in self._routers}.values():
            _try(kind)
        self._planned: Tensor | None = None
        self._known: Tensor | None = None
        self._own: list[Tensor | None] = [None] * len(self._routers)
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(partial(self._route, layer))

    def tell(self, planned: Tensor | None = None, known: Tensor | None = None) -> None:
        """`planned` [positions, layers, top_k], for positions where `known` [positions]; None: all, or nothing planned."""
        self._planned = None if planned is None else planned.transpose(0, 1).long().contiguous()
        self._known = None if known is None or planned is None else known[:, None]
        self._own = [None] * len(self._routers)

    def _route(self, layer: int, router: nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, weights, own = output
        if self._own[layer] is None:  # else it is computed again for the backward pass
            self._own[layer] = own.detach()
        if self._planned is None:
            return None
        chosen = self._planned[layer]
        if self._known is not None:
            chosen = torch.where(self._known, chosen, own)
        return logits, weigh(router, logits, chosen).to(weights.dtype), chosen

    def own(self) -> Tensor:
        """[positions, layers, top_k] what the model of now chose in the pass since `tell`, whatever was planned."""
        return torch.stack([chosen for chosen in self._own if chosen is not None], dim=1)

    def differs(self) -> Tensor:
        """[positions] where in some layer the model of now would have chosen other experts than those planned."""
        if self._planned is None:
            raise ValueError("nothing is replayed")
        planned = self._planned.transpose(0, 1).sort(-1).values
        return (self.own().sort(-1).values != planned).flatten(1).any(1)


def weigh(router: nn.Module, logits: Tensor, chosen: Tensor) -> Tensor:
    """Of chosen experts [positions, top_k], under these logits. Some routers do not say that they normalise, and all do."""
    weights = logits.float().softmax(-1).gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights


@torch.no_grad()
def _try(router: nn.Module) -> None:
    """Its own choice replayed must be its own weights, bit for bit."""
    name = type(router).__name__
    weight = getattr(router, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ConfigError(FIELD, name, "this kind of router can't be replayed: leave it out")
    made = torch.Generator().manual_seed(0)
    hidden = torch.randn(_TRIED, weight.shape[1], generator=made).to(weight.device, weight.dtype)
    try:
        logits, weights, chosen = router.forward(hidden)
        same = torch.equal(weigh(router, logits, chosen).to(weights.dtype), weights)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(FIELD, name, f"this kind of router can't be replayed ({error}): leave it out") from error
    if not same:
        raise ConfigError(FIELD, name, "this kind of router weighs its experts in another way: leave it out")
