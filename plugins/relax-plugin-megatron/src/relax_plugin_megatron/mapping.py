# SPDX-License-Identifier: Apache-2.0
"""Names and splits of weights: which tensors of a Hugging Face folder a Megatron tensor holds, and which part of each.

A Megatron tensor holds one or several Hugging Face tensors. Every source is split over the tensor-parallel ranks along
the same axis, and the parts of a rank are joined: the three projections of attention head group by head group, and gate
and up projection one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from relax_core.api import ConfigError
from relax_core.trainer_kit.lora import matrix
from relax_core.trainer_kit.setup import SCALAR_HEAD
from relax_plugin_megatron.architecture import DECODER, ENCODERS

Join = Literal["single", "attention", "concatenated"]


@dataclass(frozen=True, slots=True)
class Rule:
    """Hugging Face names of a Megatron tensor, with `{layer}` and `{expert}`, and the axis of their split."""

    sources: tuple[str, ...]
    axis: int | None = None
    """Axis along which the ranks split every source; None: every rank holds the whole tensor."""
    join: Join = "single"
    vocabulary: bool = False
    """True if axis 0 is the vocabulary, which is padded with zeros to a multiple of the ranks."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A rule for one tensor, with its names filled in."""

    sources: tuple[str, ...]
    rule: Rule
    expert: bool
    """True for a tensor of an expert, which the expert-tensor-parallel ranks split instead."""


LAYER = "model.layers.{layer}."
DENSE_MLP = {
    "mlp.linear_fc1.weight": Rule((LAYER + "mlp.gate_proj.weight", LAYER + "mlp.up_proj.weight"), 0, "concatenated"),
    "mlp.linear_fc2.weight": Rule((LAYER + "mlp.down_proj.weight",), 1),
}
ATTENTION = tuple(LAYER + f"self_attn.{part}_proj" for part in "qkv")
BLOCK = {
    "input_layernorm.weight": Rule((LAYER + "input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": Rule(tuple(f"{name}.weight" for name in ATTENTION), 0, "attention"),
    "self_attention.linear_qkv.bias": Rule(tuple(f"{name}.bias" for name in ATTENTION), 0, "attention"),
    "self_attention.q_layernorm.weight": Rule((LAYER + "self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": Rule((LAYER + "self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": Rule((LAYER + "self_attn.o_proj.weight",), 1),
    "pre_mlp_layernorm.weight": Rule((LAYER + "post_attention_layernorm.weight",)),
}
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
ENDS = {
    EMBEDDING: Rule(("model.embed_tokens.weight",), 0, vocabulary=True),
    "decoder.final_layernorm.weight": Rule(("model.norm.weight",)),
    HEAD: Rule(("lm_head.weight",), 0, vocabulary=True),
    SCALAR_HEAD: Rule((SCALAR_HEAD,)),
}


def _experts(block: str, gate: str, up: str, down: str) -> dict[str, Rule]:
    """Return the rules of a mixture of experts whose layer is named `block` in the folder."""
    expert = LAYER + block + ".experts.{expert}."
    return {
        "mlp.router.weight": Rule((LAYER + block + ".gate.weight",)),
        "mlp.experts.linear_fc1.weight": Rule((f"{expert}{gate}.weight", f"{expert}{up}.weight"), 0, "concatenated"),
        "mlp.experts.linear_fc2.weight": Rule((f"{expert}{down}.weight",), 1),
    }


def _below(decoder: str, rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return rules for a folder in which the names of the decoder begin with `decoder` instead of `model.`."""
    return {
        key: replace(rule, sources=tuple(re.sub(r"^model\.", decoder, one) for one in rule.sources))
        for key, rule in rules.items()
    }


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
DENSE = {**ENDS, **BLOCK, **DENSE_MLP}
FAMILIES: Mapping[str, Mapping[str, Rule]] = {
    "llama": DENSE,
    "qwen2": DENSE,
    "qwen3": DENSE,
    "qwen3_vl": _below(DECODER["qwen3_vl"], DENSE),
    "qwen3_moe": {**DENSE, **_experts("mlp", *PROJECTIONS)},
    "qwen3_omni_moe_thinker": {**DENSE, **_experts("mlp", *PROJECTIONS)},
    "mixtral": {**ENDS, **BLOCK, **_experts("block_sparse_moe", "w1", "w3", "w2")},
}
"""Rules of the decoder's tensors by the `model_type` of config.json."""


def mapped(family: str, name: str, first_layer: int, first_expert: int) -> Mapped:
    """Return the rule of a rank's Megatron tensor. The rank's layers and experts begin at `first_layer`, `first_expert`.

    Raises ConfigError for a tensor without a rule.
    """
    if name.startswith("encoders."):  # every tensor-parallel rank holds the whole encoders
        own, _, rest = name.removeprefix("encoders.").partition(".")
        source = (next(one for one in ENCODERS[family] if one.endswith(f"{own}.")) + rest,)
        return Mapped(source, Rule(source), False)
    if name in ENDS:
        return Mapped(FAMILIES[family][name].sources, FAMILIES[family][name], False)
    if adapter := re.fullmatch(r"(.+)\.adapter\.([AB])\.(\w+)", name):
        return _adapter(mapped(family, f"{adapter[1]}.weight", first_layer, first_expert), adapter[2], adapter[3])
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    inside = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(.+)", match[2]) if match else None
    key = f"mlp.experts.{inside[2]}" if inside else match[2] if match else name
    rule = FAMILIES[family].get(key)
    if match is None or rule is None:
        raise ConfigError(
            "model.path", f"{family} with the tensor {name}", "the mapping of this family has no such tensor"
        )
    layer, expert = first_layer + int(match[1]), first_expert + int(inside[1]) if inside else 0
    return Mapped(tuple(one.format(layer=layer, expert=expert) for one in rule.sources), rule, inside is not None)


def _adapter(layer: Mapped, side: str, module: str) -> Mapped:
    """Return the rule of matrix A or B of the adapter of one source, the Hugging Face layer whose name ends in `module`."""
    source = next(one.removesuffix(".weight") for one in layer.sources if one.endswith(f".{module}.weight"))
    axis = layer.rule.axis if (layer.rule.axis == 1) == (side == "A") else None
    return Mapped((matrix(source, side),), Rule((matrix(source, side),), axis), False)


def part(rule: Rule, shape: Sequence[int], rank: int, size: int) -> tuple[slice, ...]:
    """Return the part of a source of this shape that a rank of `size` ranks holds.

    Raises ConfigError for an axis that the ranks do not divide. The last ranks' part of a vocabulary may be shorter.
    """
    index = [slice(0, length) for length in shape]
    if rule.axis is None or size == 1:
        return tuple(index)
    length = shape[rule.axis]
    if length % size and not rule.vocabulary:
        raise ConfigError(
            "trainer.tensor_parallel", f"{size} for {rule.sources[0]} of shape {tuple(shape)}",
            f"it must divide {length}; choose another size",
        )  # fmt: skip
    each = -(-length // size)
    index[rule.axis] = slice(min(rank * each, length), min((rank + 1) * each, length))
    return tuple(index)


def join(rule: Rule, parts: Sequence[Tensor], head_groups: int, axis: int = 0) -> Tensor:
    """Join a rank's parts of the sources to its Megatron tensor, along the axis of outputs.

    `head_groups`: key-value heads of the rank.
    """
    if rule.join == "single":
        return parts[0]
    if rule.join == "concatenated":
        return torch.cat(list(parts), dim=axis)
    grouped = [one.unflatten(axis, (head_groups, -1)) for one in parts]
    return torch.cat(grouped, dim=axis + 1).flatten(axis, axis + 1)


def apart(rule: Rule, tensor: Tensor, head_groups: int, heads_per_group: int) -> list[Tensor]:
    """Undo `join`: return a rank's parts of the sources. `heads_per_group`: query heads per key-value head."""
    if rule.join == "single":
        return [tensor]
    if rule.join == "concatenated":
        return list(tensor.chunk(2))
    grouped = tensor.reshape(head_groups, heads_per_group + 2, -1, *tensor.shape[1:])
    query, key, value = grouped.split([heads_per_group, 1, 1], dim=1)
    return [one.reshape(-1, *tensor.shape[1:]) for one in (query, key, value)]
