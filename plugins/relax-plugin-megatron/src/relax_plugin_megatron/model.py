# SPDX-License-Identifier: Apache-2.0
"""The decoder on one rank: Megatron's GPT model, in one chunk or several, without its head.

`Vocabulary` applies the head, to trained tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from relax_core.learn.huggingface import float32_rounded
from relax_plugin_megatron.architecture import Architecture
from relax_plugin_megatron.layout import Grid
from relax_plugin_megatron.options import MegatronOptions
from relax_plugin_megatron.scoring import NEVER, Vocabulary

if not hasattr(moe_utils, "te_general_gemm"):  # megatron-core 0.16.1 reads the name also without Transformer Engine
    moe_utils.te_general_gemm = None


class Norm(nn.RMSNorm):
    """Root-mean-square norm whose gradient Megatron sums over the tensor-parallel ranks under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class Attention(MegatronModule):
    """Causal attention of torch over whole rows, [tokens, rows, heads, width].

    Context-parallel ranks hold two chunks of each row (`zigzag`) and gather the keys and values of all.
    """

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config)
        self._scale, self._context = softmax_scale, parallel_state.get_context_parallel_group()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        ranks, rank = self._context.size(), self._context.rank()
        if ranks == 1:
            return self._attend(query, key, value)
        gathered = (gather_from_sequence_parallel_region(one.contiguous(), group=self._context) for one in (key, value))
        keys, values = (in_order(one.chunk(ranks)) for one in gathered)
        chunk = len(query) // 2
        parts = [
            self._attend(part, keys[: (place + 1) * chunk], values[: (place + 1) * chunk])
            for place, part in zip((rank, 2 * ranks - 1 - rank), query.split(chunk), strict=True)
        ]
        return torch.cat(parts)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from the last tokens of the keys, as many as there are queries."""
        heads = [one.permute(1, 2, 0, 3) for one in (query, key, value)]
        grouped = query.shape[2] != key.shape[2]
        if len(query) == len(key):
            seen = functional.scaled_dot_product_attention(
                *heads, is_causal=True, scale=self._scale, enable_gqa=grouped
            )
        else:
            if grouped:
                heads[1:] = [one.repeat_interleave(query.shape[2] // key.shape[2], 1) for one in heads[1:]]
            causal = causal_lower_right(len(query), len(key))
            seen = functional.scaled_dot_product_attention(*heads, attn_mask=causal, scale=self._scale)
        return seen.permute(2, 0, 1, 3).flatten(2)


def zigzag(tokens: int, rank: int, ranks: int) -> Tensor:
    """Return the positions that a context-parallel rank holds: one chunk from the front and one from the back."""
    if ranks == 1:
        return torch.arange(tokens)
    chunks = torch.arange(tokens).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def in_order(parts: Sequence[Tensor]) -> Tensor:
    """Join the tokens of all context-parallel ranks, [tokens, ...], in the order of the row."""
    fronts, backs = zip(*(part.chunk(2) for part in parts), strict=True)
    return torch.cat([*fronts, *reversed(backs)])


class DeepLayer(TransformerLayer):
    """A layer that adds features of images and videos to its outputs.

    `context` [layers, tokens, rows, width] holds the features of the first layers; the recomputation of a layer gets it
    again, because Megatron hands it from layer to layer.
    """

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        hidden, context = super().forward(*args, **kwargs)
        if context is not None and self.layer_number <= len(context):
            hidden = hidden + context[self.layer_number - 1]
        return hidden, context


class Rotation(nn.Module):
    """Angles of positions in time, height and width; the frequencies of the three take turns, as in Qwen3-VL."""

    def __init__(self, base: float, width: int, sections: Sequence[int]) -> None:
        super().__init__()
        self._base, self._width, self._sections = base, width, tuple(sections)

    def forward(self, positions: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return angles [tokens, rows, 1, width] of positions [3, rows, tokens]."""
        steps = torch.arange(0, self._width, 2, dtype=torch.float32, device=positions.device)
        angles = positions[..., None].float() * (1.0 / self._base ** (steps / self._width))
        mixed = angles[0].clone()
        for axis in (1, 2):
            own = slice(axis, 3 * self._sections[axis], 3)
            mixed[..., own] = angles[axis][..., own]
        return torch.cat([mixed, mixed], dim=-1).transpose(0, 1)[:, :, None]


class Decoder(GPTModel):
    """Megatron's model that returns the last hidden states, [tokens, rows, width], instead of logits."""

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def transformer_config(
    shape: Architecture, grid: Grid, options: MegatronOptions, dtype: torch.dtype, replay: bool = False
) -> TransformerConfig:
    """Return Megatron's configuration of a rank."""
    recompute: dict[str, Any] = {}
    if options.recompute == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif options.recompute == "selective":
        recompute = {"recompute_granularity": "selective"}
    experts: dict[str, Any] = {}
    if shape.experts:
        experts = {
            "num_moe_experts": shape.experts, "moe_router_topk": shape.experts_per_token,
            "moe_ffn_hidden_size": shape.expert_width, "moe_router_pre_softmax": not shape.renormalised,
            "moe_router_load_balancing_type": "none", "moe_router_dtype": "fp32", "moe_grouped_gemm": False,
            "moe_enable_routing_replay": replay,
            "moe_layer_freq": [int(layer not in shape.dense_layers) for layer in range(shape.layers)],
        }  # fmt: skip
    return TransformerConfig(
        num_layers=shape.layers, hidden_size=shape.hidden, ffn_hidden_size=shape.mlp_width,
        num_attention_heads=shape.heads, num_query_groups=shape.key_value_heads, kv_channels=shape.head_width,
        normalization="RMSNorm", layernorm_epsilon=shape.norm_eps, gated_linear_unit=True,
        activation_func=functional.silu, add_bias_linear=False, add_qkv_bias=shape.attention_bias,
        qk_layernorm=shape.head_norms, attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True,
        params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16,
        tensor_model_parallel_size=grid.tensor, pipeline_model_parallel_size=grid.pipeline,
        virtual_pipeline_model_parallel_size=grid.virtual if grid.virtual > 1 else None,
        context_parallel_size=grid.context,
        expert_model_parallel_size=grid.expert, expert_tensor_parallel_size=grid.expert_tensor,
        sequence_parallel=options.sequence_parallel, variable_seq_lengths=grid.pipeline > 1,
        # With two stages, both neighbours of a rank are the same rank, and Megatron's batched messages then mix up
        # activations and gradients without an error. Sent one by one, they are right in every schedule.
        batch_p2p_comm=False, overlap_p2p_comm=grid.virtual > 1,
        moe_token_dispatcher_type="alltoall", gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False,
        persist_layer_norm=False, apply_rope_fusion=False,
        calculate_per_token_loss=True, perform_initialization=False, mrope_section=list(shape.sections) or None,
        **experts, **recompute,
    )  # fmt: skip


def make_chunk(config: TransformerConfig, shape: Architecture, grid: Grid, chunk: int, scalar: bool) -> Decoder:
    """Make one chunk of the layers that this rank holds, with weights that still have to be loaded.

    `scalar`: with a scalar head, `score`, in place of the output layer.
    """
    virtual = chunk if grid.virtual > 1 else None
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=virtual)
    for layer in spec.layer_specs:
        _replace(layer, config.qk_layernorm)
        if shape.deep_layers:
            layer.module = DeepLayer
    spec.layer_norm = Norm
    padded = -(-shape.vocabulary // grid.tensor) * grid.tensor
    first = chunk == 0 and parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    last = chunk == grid.virtual - 1 and parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    decoder = Decoder(
        config, spec, vocab_size=padded, max_sequence_length=shape.context or 2**20, pre_process=first,
        post_process=last, parallel_output=True, share_embeddings_and_output_weights=shape.tied and not scalar,
        position_embedding_type="mrope" if shape.sections else "rope", rotary_base=int(shape.rope_base),
        rope_scaling=shape.rope_factor != 1.0, rope_scaling_factor=shape.rope_factor, vp_stage=virtual,
        scatter_embedding_sequence_parallel=not shape.encoders,
    )  # fmt: skip
    if shape.sections:
        decoder.rotary_pos_emb = Rotation(shape.rope_base, shape.head_width, shape.sections)
    if scalar and last:
        decoder.output_layer = None
        decoder.score = nn.Linear(shape.hidden, 1, bias=False, dtype=config.params_dtype)
    return decoder


def _replace(layer: ModuleSpec, head_norms: bool) -> None:
    """Put our norm and our attention into the specification of a layer."""
    inside = layer.submodules
    inside.input_layernorm = inside.pre_mlp_layernorm = Norm
    attention = inside.self_attention.submodules
    attention.core_attention = Attention
    if head_norms:
        attention.q_layernorm = attention.k_layernorm = Norm


class Head:
    """The output layer on this rank: from last hidden states to the logits of its range of token ids."""

    def __init__(
        self, decoder: Decoder, shape: Architecture, suppress: tuple[int, ...], *, float32: torch.dtype | None = None
    ) -> None:
        """`float32`: compute logits in float32, from weights rounded to this format; None: in the decoder's format."""
        self._decoder, self._float32 = decoder, float32
        group = parallel_state.get_tensor_model_parallel_group()
        each = -(-shape.vocabulary // group.size())
        first = group.rank() * each
        self.vocabulary = Vocabulary(shape.vocabulary, first, group)
        never = [token - first for token in suppress if first <= token < first + each]
        never += range(max(0, min(each, shape.vocabulary - first)), each)
        self._never = torch.tensor(never, dtype=torch.long)

    def logits(self, features: Tensor) -> Tensor:
        """Return logits [tokens, range] of features [tokens, width]."""
        shared = self._decoder.share_embeddings_and_output_weights
        weight = self._decoder.shared_embedding_or_output_weight() if shared else self._decoder.output_layer.weight
        if self._float32 is None:
            logits = functional.linear(features, weight)
        else:
            logits = functional.linear(features.float(), float32_rounded(weight, self._float32))
        return logits.index_fill(-1, self._never.to(logits.device), NEVER) if len(self._never) else logits


def features(hidden: Tensor, sequence_parallel: bool, *, split_head: bool) -> Tensor:
    """Return whole last hidden states, [rows * tokens, width], of hidden states [tokens, rows, width].

    `split_head`: the ranks compute parts of the head, so the gradient is their sum; else all compute the same.
    """
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=split_head)
    flat = hidden.transpose(0, 1).flatten(0, 1)
    # Megatron sums a gradient in place, which needs a contiguous one
    return copy_to_tensor_model_parallel_region(flat) if split_head and not sequence_parallel else flat
