# SPDX-License-Identifier: Apache-2.0
"""Parts of the model that `model.freeze` keeps from training, under their Hugging Face names.

Megatron joins several Hugging Face tensors to one and trains the joined tensor whole, so they are frozen together.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from functools import cache

from relax_core.api import ConfigError, TrainerSpec
from relax_core.trainer_kit.setup import SCALAR_HEAD
from relax_plugin_megatron.architecture import Architecture, Sizes
from relax_plugin_megatron.layout import Grid
from relax_plugin_megatron.lora import ROLES, matches_within
from relax_plugin_megatron.mapping import DENSE_MLP, EMBEDDING, ENDS, FAMILIES, HEAD, Rule

FIELD = "model.freeze"
ENCODER = "encoder"
"""Key of all tensors of vision and audio encoders."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the model as Megatron holds it: its key in the mapping, its layer, and its Hugging Face names."""

    key: str
    layer: int
    """-1 outside of layers."""
    sources: tuple[str, ...]
    rule: Rule


@cache
def parts(shape: Architecture, scalar: bool) -> tuple[Part, ...]:
    """Return the tensors of the whole model; `scalar`: with a scalar head."""
    return tuple(_parts(shape, scalar))


def _parts(shape: Architecture, scalar: bool) -> Iterator[Part]:
    rules = FAMILIES[shape.family]
    head = (SCALAR_HEAD,) if scalar else () if shape.tied else (HEAD,)
    for key in (EMBEDDING, "decoder.final_layernorm.weight", *head):
        yield Part(key, -1, rules[key].sources, rules[key])
    for name, _ in shape.encoders:
        yield Part(ENCODER, -1, (name,), Rule((name,)))
    switches = {"self_attention.linear_qkv.bias": shape.attention_bias}
    switches |= {f"self_attention.{one}_layernorm.weight": shape.head_norms for one in "qk"}
    for layer in range(shape.layers):
        mixture = bool(shape.experts) and layer not in shape.dense_layers
        for key, rule in ((key, rule) for key, rule in rules.items() if key not in ENDS):
            inside = switches.get(key, not mixture if key in DENSE_MLP else mixture or not key.startswith("mlp."))
            for expert in range(shape.experts if "experts" in key else 1) if inside else ():
                yield Part(key, layer, tuple(one.format(layer=layer, expert=expert) for one in rule.sources), rule)


def frozen(spec: TrainerSpec, shape: Architecture, scalar: bool) -> frozenset[str]:
    """Return the names of the tensors that are frozen; empty for a role without training or adapters.

    A pattern matches a tensor, or a module that holds it, by its name or the end of its name. A critic may have another
    body than the policy, so patterns that match none of its tensors are skipped. Raises ConfigError for a pattern
    without a match, for a part of a joined tensor, and if no tensor is left to train.
    """
    patterns = tuple(spec.model.get("freeze") or ())
    if not patterns or spec.role not in ROLES:
        return frozenset()
    names = [source for part in parts(shape, scalar) for source in part.sources]
    found: set[str] = set()
    for pattern in patterns:
        meant = _matching(shape, scalar, pattern)
        if not meant and spec.role != "critic":
            ends = ", ".join(dict.fromkeys(name.split(".")[-2] for name in names if name.count(".") > 1))
            raise ConfigError(FIELD, repr(pattern), f"this model has no such part; it has {ends}")
        found |= meant
    if len(found) == len(names):
        raise ConfigError(FIELD, ", ".join(patterns), "this freezes the whole model; leave a part to train")
    for part in parts(shape, scalar) if not spec.model.get("lora") else ():
        own = [source for source in part.sources if source in found]
        if own and len(own) < len(part.sources):
            rest = next(source for source in part.sources if source not in found)
            fix = f"megatron trains it as one with {rest}; freeze both or none, or use trainer = torch"
            raise ConfigError(FIELD, own[0], fix)
    return frozenset(found)


@cache
def _matching(shape: Architecture, scalar: bool, pattern: str) -> frozenset[str]:
    names = (source for part in parts(shape, scalar) for source in part.sources)
    return frozenset(name for name in names if any(matches_within(one, pattern) for one in _known(shape, scalar, name)))


def _known(shape: Architecture, scalar: bool, name: str) -> tuple[str, ...]:
    """Return the names of a folder's tensor that patterns may match: also those of transformers' model, if they differ."""
    embedding = FAMILIES[shape.family][EMBEDDING].sources[0]
    if name == embedding and shape.tied and not scalar:
        return (name, "lm_head.weight")
    if shape.family == "qwen3_omni_moe_thinker":
        within = name.removeprefix("model.")
        return (name, f"model.{name}" if within == name else f"model.language_model.{within}")
    return (name,)


def trained(shape: Architecture, grid: Grid, rank: int, sizes: Sizes, scalar: bool, frozen: Set[str]) -> Sizes:
    """Return the sizes of a rank's parts without those that are frozen; experts are frozen evenly on all ranks."""
    if not frozen:
        return sizes
    held, elements, dense, experts, multiplied = grid.layers(rank, shape.layers), _elements(shape, grid), 0, 0, 0
    first, last, encoders = grid.stage(rank) == 0, grid.stage(rank) == grid.pipeline - 1, dict(shape.encoders)
    for part in parts(shape, scalar):
        if part.sources[0] not in frozen:
            continue
        if part.key == ENCODER:
            dense += encoders[part.sources[0]] if first else 0
            continue
        head = last and (part.key in (HEAD, SCALAR_HEAD) or (part.key == EMBEDDING and shape.tied and not scalar))
        own = elements[part.key] // (grid.tensor if part.rule.axis is not None else 1)
        if part.key == EMBEDDING:
            dense += own if first or head else 0
            multiplied += own if head else 0
        elif part.layer < 0:
            dense += own if last else 0
            multiplied += own if head else 0
        elif part.layer not in held:
            continue
        elif "experts" in part.key:
            experts += elements[part.key] // grid.expert_tensor
            multiplied += own * shape.experts_per_token // shape.experts
        else:
            dense += own
            multiplied += 0 if "layernorm" in part.key else own
    return replace(
        sizes, dense=sizes.dense - dense, experts=sizes.experts - experts // grid.expert,
        multiplied=sizes.multiplied - multiplied,
    )  # fmt: skip


def _elements(shape: Architecture, grid: Grid) -> dict[str, int]:
    """Return the number of values of each tensor by its key in the mapping, with the padding of the vocabulary."""
    hidden, query = shape.hidden, shape.heads * shape.head_width
    wide = query + 2 * shape.key_value_heads * shape.head_width
    vocabulary = -(-shape.vocabulary // grid.tensor) * grid.tensor
    return {
        EMBEDDING: vocabulary * hidden, HEAD: vocabulary * hidden, SCALAR_HEAD: hidden,
        "decoder.final_layernorm.weight": hidden, "input_layernorm.weight": hidden, "pre_mlp_layernorm.weight": hidden,
        "self_attention.linear_qkv.weight": wide * hidden, "self_attention.linear_qkv.bias": wide,
        "self_attention.q_layernorm.weight": shape.head_width, "self_attention.k_layernorm.weight": shape.head_width,
        "self_attention.linear_proj.weight": query * hidden,
        "mlp.linear_fc1.weight": 2 * hidden * shape.mlp_width, "mlp.linear_fc2.weight": hidden * shape.mlp_width,
        "mlp.router.weight": shape.experts * hidden,
        "mlp.experts.linear_fc1.weight": 2 * hidden * shape.expert_width,
        "mlp.experts.linear_fc2.weight": hidden * shape.expert_width,
    }  # fmt: skip
