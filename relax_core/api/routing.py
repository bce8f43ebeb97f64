# SPDX-License-Identifier: Apache-2.0
"""How a mixture of experts routes, read from its `config.json`: how many layers choose, among how many experts, how many.

Choices travel as bytes: of consecutive positions, [positions, layers, top_k] of uint8, or of uint16 (little-endian) where
there are more than 256 experts. Layers are those that have a router, in the order in which they compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

RoutingReplay = Literal["off", "rollout", "recompute"]
ROUTES = ("routed_experts", "routed_valid")
"""Columns of the bus: the choices of every token, and for which tokens they are known."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
_PARTS = ("thinker_config", "text_config", "llm_config")


@dataclass(frozen=True, slots=True)
class Routing:
    """The shape of one model's routing of tokens to experts."""

    layers: int
    """Those that have a router."""
    top_k: int
    """Experts that a token visits in each."""
    experts: int

    @property
    def dtype(self) -> Literal["uint8", "uint16"]:
        return "uint8" if self.experts <= 256 else "uint16"

    @property
    def width(self) -> int:
        """Bytes of one position."""
        return self.layers * self.top_k * (1 if self.dtype == "uint8" else 2)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self | None:
        """From `config.json` as plain data; None of a model without routers."""
        for part in _PARTS:
            if isinstance(config.get(part), Mapping):
                return cls.of(config[part])
        experts, top_k = _first(config, _EXPERTS), _first(config, _TOP_K)
        total = config.get("num_hidden_layers")
        if experts < 2 or top_k < 1 or not isinstance(total, int):
            return None
        layers = len(routed_layers(config))
        return cls(layers, top_k, experts) if layers else None


def routed_layers(config: Mapping[str, Any]) -> list[int]:
    """Numbers of the layers that have a router, of a model that `Routing.of` knows."""
    for part in _PARTS:
        if isinstance(config.get(part), Mapping):
            return routed_layers(config[part])
    return [layer for layer in range(config["num_hidden_layers"]) if _routes(config, layer)]


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((config[name] for name in names if isinstance(config.get(name), int)), 0)


def _routes(config: Mapping[str, Any], layer: int) -> bool:
    """Whether this layer has experts: families say so in one of three ways, and else all have."""
    if layer in (config.get("mlp_only_layers") or ()) or layer < (config.get("first_k_dense_replace") or 0):
        return False
    kinds = config.get("mlp_layer_types")
    if kinds:
        return bool(kinds[layer] == "sparse")
    return (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
