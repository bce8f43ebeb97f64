# SPDX-License-Identifier: Apache-2.0
"""Choice of the linear layers that get low-rank adapters, and sizes of adapters. Needs neither torch nor Megatron.

The layers are those that the `torch` trainer adapts: attention projections and dense MLPs, neither experts nor head.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Self

from relax_core.api import ConfigError, TrainerSpec
from relax_core.trainer_kit.lora import FIELD, LoraTable
from relax_plugin_megatron.architecture import DECODER, Architecture
from relax_plugin_megatron.layout import Grid

HEAD = "lm_head"
ROLES = ("actor", "critic", "actor_fwd")
"""Roles whose model has adapters."""
WITHOUT = ("dropout", "dora", "modules_to_save")
"""Settings of `[model.lora]` that this trainer does not have."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer under its Hugging Face name."""

    module: str
    layer: int
    inputs: int
    outputs: int
    row_parallel: bool
    """True if tensor-parallel ranks split the inputs, and with them matrix A; else they split outputs and matrix B."""

    def size(self, rank: int, tensor_parallel: int) -> int:
        """Return the number of parameters of an adapter of this rank on one of the tensor-parallel ranks."""
        split, whole = (self.inputs, self.outputs) if self.row_parallel else (self.outputs, self.inputs)
        return rank * (split // tensor_parallel + whole)


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapters of a model."""

    table: LoraTable
    layers: tuple[Linear, ...]
    """The layers with adapters, in the order of transformers' modules."""

    @classmethod
    def of(cls, spec: TrainerSpec, shape: Architecture, frozen: Set[str] = frozenset()) -> Self | None:
        """Return the adapters of a role's model, or None if the model gets none.

        Frozen tensors get no adapters. A critic may have another body than the policy, so patterns that match none of
        its layers are skipped. Raises ConfigError for a setting that this trainer does not have, and for a frozen target.
        """
        if not spec.model.get("lora"):
            return None
        table = LoraTable.of(spec.model["lora"])
        for name in WITHOUT:
            if value := getattr(table, name):
                fix = "megatron trains the pairs A and B without dropout; remove it, or use trainer = torch"
                raise ConfigError(f"{FIELD}.{name}", value, fix)
        if spec.role not in ROLES:
            return None
        if shape.family == "qwen3_omni_moe_thinker":  # engines name its layers as transformers does, not as the folder
            raise ConfigError(FIELD, "set", f"megatron has no adapters for {shape.family}; use trainer = torch")
        linears = tuple(_linears(shape))
        patterns = table.targets
        if spec.role == "critic":
            patterns = tuple(pattern for pattern in patterns if _matching(linears, pattern))
        both = [one for one in linears if f"{one.module}.weight" in frozen]
        if not patterns:
            linears = tuple(one for one in linears if one not in both)
            if not linears:
                raise ConfigError(
                    FIELD, "set", "model.freeze freezes every layer that may have an adapter; leave it out"
                )
            return cls(table, linears)
        chosen = _chosen(linears, patterns)
        if both := [one.module for one in both if one in chosen]:
            fix = f"model.freeze freezes {both[0]}; name it in only one of the two"
            raise ConfigError(f"{FIELD}.targets", ", ".join(patterns), fix)
        return cls(table, chosen)

    def size(self, grid: Grid, rank: int, layers: int) -> int:
        """Return the number of parameters that a rank's adapters have, in a model of `layers` layers."""
        held = grid.layers(rank, layers)
        own = (one for one in self.layers if one.layer in held)
        return sum(one.size(self.table.rank, grid.tensor) for one in own)


def _linears(shape: Architecture) -> Iterator[Linear]:
    query, key_value = shape.heads * shape.head_width, shape.key_value_heads * shape.head_width
    decoder = DECODER.get(shape.family, "model.")
    for layer in range(shape.layers):
        attention, mlp = f"{decoder}layers.{layer}.self_attn.", f"{decoder}layers.{layer}.mlp."
        yield Linear(f"{attention}q_proj", layer, shape.hidden, query, False)
        yield Linear(f"{attention}k_proj", layer, shape.hidden, key_value, False)
        yield Linear(f"{attention}v_proj", layer, shape.hidden, key_value, False)
        yield Linear(f"{attention}o_proj", layer, query, shape.hidden, True)
        if not shape.experts or layer in shape.dense_layers:
            yield Linear(f"{mlp}gate_proj", layer, shape.hidden, shape.mlp_width, False)
            yield Linear(f"{mlp}up_proj", layer, shape.hidden, shape.mlp_width, False)
            yield Linear(f"{mlp}down_proj", layer, shape.mlp_width, shape.hidden, True)


def _chosen(linears: tuple[Linear, ...], patterns: tuple[str, ...]) -> tuple[Linear, ...]:
    """Return the layers that patterns match. Raises ConfigError for a pattern that matches none, or the head."""
    meant: set[Linear] = set()
    for pattern in patterns:
        found = _matching(linears, pattern)
        if not found or _matches(HEAD, pattern):
            ends = ", ".join(dict.fromkeys(one.module.rpartition(".")[2] for one in linears))
            fix = f"megatron has adapters in {ends} of each layer; name one of them, or use trainer = torch"
            raise ConfigError(f"{FIELD}.targets", repr(pattern), fix)
        meant.update(found)
    return tuple(one for one in linears if one in meant)


def _matching(linears: tuple[Linear, ...], pattern: str) -> list[Linear]:
    """Return the layers that the pattern matches, or within a module that it matches."""
    return [one for one in linears if matches_within(one.module, pattern)]


def matches_within(name: str, pattern: str) -> bool:
    """Return True if the pattern matches a module or tensor, or a module that holds it."""
    return any(_matches(part, pattern) for part in _within(name))


def _within(module: str) -> list[str]:
    """Return the names of a module and of the modules that hold it."""
    parts = module.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")
