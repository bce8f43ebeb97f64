# SPDX-License-Identifier: Apache-2.0
"""The architecture of a Hugging Face folder as fields of Megatron's configuration, read from config.json without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_core.api import ConfigError
from relax_plugin_megatron.layout import Grid

FIELD = "model.path"
DENSE, MIXTURES = ("llama", "qwen2", "qwen3", "qwen3_vl"), ("qwen3_moe", "mixtral", "qwen3_omni_moe_thinker")
ENCODERS: Mapping[str, tuple[str, ...]] = {
    "qwen3_vl": ("model.visual.",), "qwen3_omni_moe_thinker": ("visual.", "audio_tower."),
}  # fmt: skip
"""Prefixes of the tensors of vision and audio encoders in a folder, by family."""
DECODER: Mapping[str, str] = {"qwen3_vl": "model.language_model."}
"""Prefix of the decoder's tensors in a folder, by family. Families that are missing here have `model.`."""
_SECTIONS = (24, 20, 20)
"""Sections of Qwen3-VL's positions if config.json names none."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes and switches of a decoder."""

    family: str
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_width: int
    mlp_width: int
    vocabulary: int
    context: int
    norm_eps: float
    rope_base: float
    rope_factor: float
    """Factor of Llama 3's stretched positions; 1: plain positions."""
    tied: bool
    """True if the head's weight is the embedding's."""
    attention_bias: bool
    """True if query, key and value projections have a bias."""
    head_norms: bool
    """True if queries and keys are normalised head by head."""
    experts: int = 0
    """Experts of a layer; 0: every layer is dense."""
    experts_per_token: int = 0
    expert_width: int = 0
    renormalised: bool = True
    """True if the weights of a token's experts are scaled to a sum of 1."""
    dense_layers: tuple[int, ...] = ()
    """Layers without experts in a mixture of experts."""
    encoders: tuple[tuple[str, int], ...] = ()
    """Tensors of vision and audio encoders: names in the folder, and numbers of values."""
    sections: tuple[int, ...] = ()
    """Frequencies that rotate by time, height and width; empty: positions are token indices."""
    deep_layers: int = 0
    """Number of first layers after each of which features of images and videos are added."""

    @classmethod
    def of(cls, config: Mapping[str, Any], path: str) -> Architecture:
        """Read a config.json. Raises ConfigError for a family or a switch that the mapping does not know."""
        family = str(config.get("model_type"))
        if family not in (*DENSE, *MIXTURES):
            known = ", ".join((*DENSE, *MIXTURES))
            raise ConfigError(FIELD, f"{path} of the family {family}", f"megatron trains {known}; use trainer = torch")
        sees, whole = family in ENCODERS, config
        config = whole["text_config"] if sees else whole
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        base, factor = _rope(config, path)
        moe = family in MIXTURES
        layers = int(config["num_hidden_layers"])
        _refuse(config, family, path)
        return cls(
            family=family, layers=layers, hidden=hidden, heads=heads,
            key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_width=int(config.get("head_dim") or hidden // heads),
            mlp_width=int(config["intermediate_size"]), vocabulary=int(config["vocab_size"]),
            context=int(config.get("max_position_embeddings", 0)), norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_base=base, rope_factor=factor, tied=bool(whole.get("tie_word_embeddings", False)),
            attention_bias=family == "qwen2", head_norms=family.startswith("qwen3"),
            experts=int(config.get("num_experts") or config.get("num_local_experts") or 0) if moe else 0,
            experts_per_token=int(config.get("num_experts_per_tok", 0)) if moe else 0,
            expert_width=int(config.get("moe_intermediate_size") or config["intermediate_size"]) if moe else 0,
            renormalised=family == "mixtral" or bool(config.get("norm_topk_prob", False)),
            dense_layers=_dense_layers(config, layers) if moe else (),
            encoders=_encoders(path, ENCODERS[family]) if sees else (), sections=_sections(config) if sees else (),
            deep_layers=len(whole["vision_config"].get("deepstack_visual_indexes") or ()) if sees else 0,
        )  # fmt: skip

    def check(self, grid: Grid, sequence_parallel: bool) -> None:
        """Raise ConfigError for sizes that the grid's groups do not divide, or switches that do not go together."""
        for key, size, count, what in (
            ("tensor_parallel", grid.tensor, self.heads, "attention heads"),
            ("tensor_parallel", grid.tensor, self.key_value_heads, "key-value heads"),
            ("pipeline_parallel", grid.pipeline, self.layers, "layers"),
            ("virtual_pipeline", grid.virtual, self.layers // grid.pipeline, "layers of each stage"),
            ("expert_parallel", grid.expert, self.experts, "experts"),
        ):
            if count % size or (size > 1 and not count):
                raise ConfigError(f"trainer.{key}", size, f"it must divide the {count} {what} of the model")
        if self.deep_layers > self.layers // (grid.pipeline * grid.virtual):
            key = "pipeline_parallel" if grid.virtual == 1 else "virtual_pipeline"
            fix = f"the first chunk of layers must hold the first {self.deep_layers}, which get features of images; lower it"
            raise ConfigError(f"trainer.{key}", grid.pipeline if grid.virtual == 1 else grid.virtual, fix)
        if sequence_parallel and grid.tensor == 1:
            fix = "it splits rows over tensor-parallel ranks; set trainer.tensor_parallel to 2 or more"
            raise ConfigError("trainer.sequence_parallel", True, fix)
        if self.experts and grid.tensor > 1 and not sequence_parallel:
            fix = "with tensor_parallel, Megatron trains mixtures of experts only so; set trainer.sequence_parallel = true"
            raise ConfigError("trainer.sequence_parallel", False, fix)

    # -- size -----------------------------------------------------------------------------------------------------------

    def sizes(self, grid: Grid, rank: int, scalar: bool = False) -> Sizes:
        """Return the numbers of parameters that a rank holds; `scalar`: with a scalar head."""
        stage, held = grid.stage(rank), grid.layers(rank, self.layers)
        layers = len(held)
        mixtures = sum(bool(self.experts) and layer not in self.dense_layers for layer in held)
        matrices = self._attention(grid) * layers + 3 * self.hidden * self.mlp_width // grid.tensor * (
            layers - mixtures
        )
        matrices += self.experts * self.hidden * mixtures  # routers
        one = 3 * self.hidden * self.expert_width
        experts = self.experts // grid.expert * one // grid.expert_tensor * mixtures
        vocabulary = -(-self.vocabulary // grid.tensor) * self.hidden
        first, last = stage == 0, stage == grid.pipeline - 1
        shared = self.tied and first and not scalar
        head = (self.hidden if scalar else vocabulary) * last
        dense = matrices + (2 * self.hidden + 2 * self.head_width * self.head_norms) * layers
        dense += vocabulary * first + (0 if shared else head) + self.hidden * last
        dense += sum(size for _, size in self.encoders) * first
        return Sizes(dense, experts, matrices + one * self.experts_per_token // grid.tensor * mixtures + head, mixtures)

    def _attention(self, grid: Grid) -> int:
        """Return the number of parameters of a layer's attention on one rank, without norms."""
        wide = (self.heads + 2 * self.key_value_heads) * self.head_width // grid.tensor
        return wide * (self.hidden + self.attention_bias) + self.heads * self.head_width * self.hidden // grid.tensor


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of parameters of one rank."""

    dense: int
    """Parameters that only tensor and pipeline parallelism split."""
    experts: int
    """Parameters of experts."""
    multiplied: int
    """Parameters with which each token of the rank's rows is multiplied; experts are balanced, and the tensor-parallel
    ranks share the tokens' experts."""
    mixtures: int
    """Layers with experts."""

    @property
    def all(self) -> int:
        return self.dense + self.experts


def _rope(config: Mapping[str, Any], path: str) -> tuple[float, float]:
    """Return the base and the factor of the positions' rotation."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    base = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    if kind == "default":
        return base, 1.0
    llama = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind == "llama3" and all(rope.get(name) == value for name, value in llama.items()):
        return base, float(rope["factor"])
    raise ConfigError(
        FIELD, f"{path} with positions of the type {kind}", "megatron has default and llama3 positions only"
    )


def _sections(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return how many frequencies rotate by time, height and width."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return tuple(int(size) for size in rope.get("mrope_section") or _SECTIONS)


def _encoders(path: str, prefixes: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """Return the names of a folder's tensors with these prefixes, and their numbers of values."""
    from relax_plugin_megatron.folder import FolderReader

    with FolderReader(path) as folder:
        names = sorted(name for name in folder.names if name.startswith(prefixes))
        return tuple((name, math.prod(folder.shape(name))) for name in names)


def _refuse(config: Mapping[str, Any], family: str, path: str) -> None:
    """Raise ConfigError for a switch that changes the computation and has no counterpart here."""
    switches = ("use_sliding_window", "mlp_bias", *(("attention_bias",) if family != "qwen2" else ()))
    for name in switches:
        if config.get(name):
            raise ConfigError(FIELD, f"{path} with {name}", "megatron's mapping has no such layer; use trainer = torch")
    if family == "mixtral" and config.get("sliding_window"):
        raise ConfigError(FIELD, f"{path} with sliding_window", "megatron attends to all tokens; use trainer = torch")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(FIELD, f"{path} with hidden_act {config['hidden_act']}", "megatron's mapping knows silu only")


def _dense_layers(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    step, dense = int(config.get("decoder_sparse_step", 1)), set(config.get("mlp_only_layers") or ())
    return tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % step)
