# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters on Megatron's linear layers, split over the tensor-parallel ranks like the layers themselves.

A Megatron layer holds one or several Hugging Face layers, and each of these has an adapter of its own. Next to a
column-parallel layer, every rank has all of A and its rows of B; next to a row-parallel layer, its columns of A and all
of B. Only the low-rank activations, [tokens, rows, rank], travel between ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from relax_core.trainer_kit.lora import peft_name, short_names
from relax_plugin_megatron.architecture import Architecture
from relax_plugin_megatron.layout import Grid
from relax_plugin_megatron.lora import Linear, Lora
from relax_plugin_megatron.mapping import FAMILIES, Rule, join
from relax_plugin_megatron.model import Decoder


class Adapter(nn.Module):
    """The adapters of one Megatron layer: `matrices` A and B in float32 for each adapted Hugging Face layer."""

    def __init__(
        self, linears: Sequence[Linear | None], widths: Sequence[int], rule: Rule, head_groups: int, lora: Lora,
        config: TransformerConfig,
    ) -> None:  # fmt: skip
        """`linears`: sources of the layer, None for a source without an adapter; `widths`: their outputs on this rank."""
        super().__init__()
        self._rule, self._head_groups, self._widths = rule, head_groups, tuple(widths)
        self._rank, self._scale = lora.table.rank, lora.table.scale
        self._rows, self._sequence = rule.axis == 1, config.sequence_parallel
        self._names = ["" if one is None else one.module.rpartition(".")[2] for one in linears]
        self.A, self.B = nn.ParameterDict(), nn.ParameterDict()
        for name, linear, width in zip(self._names, linears, widths, strict=True):
            if linear is not None:
                inputs = linear.inputs // (config.tensor_model_parallel_size if self._rows else 1)
                self.A[name] = nn.Parameter(torch.zeros(self._rank, inputs))
                self.B[name] = nn.Parameter(torch.zeros(width, self._rank))
        for whole in (self.B if self._rows else self.A).values():
            # each rank has only the gradient of its tokens; Megatron sums the gradients of marked parameters
            whole.sequence_parallel = config.sequence_parallel

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the adapters add to the layer's outputs, from the layer's inputs."""
        low = functional.linear(inputs, torch.cat(list(self.A.values())).to(inputs.dtype))
        low = self._between_ranks(low)
        parts, start = [], 0
        for name, width in zip(self._names, self._widths, strict=True):
            if not name:
                parts.append(low.new_zeros(*low.shape[:-1], width))
            else:
                parts.append(functional.linear(low[..., start : start + self._rank], self.B[name].to(low.dtype)))
                start += self._rank
        return self._scale * join(self._rule, parts, self._head_groups, axis=low.dim() - 1)

    def _between_ranks(self, low: Tensor) -> Tensor:
        """Sum the ranks' parts of A x after split inputs; else give every rank the gradients of all ranks' outputs."""
        if self._rows:
            reduce = (
                reduce_scatter_to_sequence_parallel_region
                if self._sequence
                else reduce_from_tensor_model_parallel_region
            )
            summed: Tensor = reduce(low)
            return summed
        if self._sequence:
            whole: Tensor = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
            return whole
        copied: Tensor = copy_to_tensor_model_parallel_region(low)
        return copied


def attach(decoder: Decoder, shape: Architecture, grid: Grid, lora: Lora, config: TransformerConfig) -> None:
    """Add adapters, which add 0 until their weights are set, to the layers of this rank."""
    wanted, rules = {linear.module: linear for linear in lora.layers}, FAMILIES[shape.family]
    head = shape.head_width // grid.tensor
    widths = {
        "q_proj": shape.heads * head,
        "k_proj": shape.key_value_heads * head,
        "v_proj": shape.key_value_heads * head,
    }
    for layer in decoder.decoder.layers:
        for name, module in list(layer.named_modules()):
            rule = rules.get(f"{name}.weight")
            if rule is None:
                continue
            modules = [
                one.format(layer=layer.layer_number - 1, expert=0).removesuffix(".weight") for one in rule.sources
            ]
            linears = [wanted.get(one) for one in modules]
            if any(linears):
                own = [widths.get(one.rpartition(".")[2], module.weight.shape[0] // len(modules)) for one in modules]
                module.adapter = Adapter(linears, own, rule, shape.key_value_heads // grid.tensor, lora, config)
                module.register_forward_hook(_add)


def keep_gradient(decoder: Decoder) -> None:
    """Let gradients pass the first layers, though their parameters are frozen.

    Recomputation skips layers whose inputs need no gradient, and a pipeline's first stage has to give its outputs one.
    """
    if decoder.pre_process:
        decoder.embedding.word_embeddings.register_forward_hook(_with_gradient)


def _add(module: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
    value, bias = output
    return value + module.adapter(inputs[0]), bias


def _with_gradient(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def initial(lora: Lora, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (module, matrix A) of each adapter, drawn in peft's order, so that the torch trainer starts from the same.

    Every matrix B starts at 0.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        for linear in lora.layers:
            weight = nn.Linear(linear.inputs, lora.table.rank, bias=False).weight
            nn.Linear(lora.table.rank, linear.outputs, bias=False)
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
            yield linear.module, weight.detach()


def write(
    lora: Lora, tensors: Mapping[str, Tensor], modules: tuple[str, ...], base_path: str, scalar: bool, directory: Path
) -> None:
    """Write the adapters to a folder that `PeftModel.from_pretrained` loads on top of the base model.

    `tensors`: whole tensors under their own names. `modules`: names of all modules of the model that have a weight.
    """
    directory.mkdir()
    found = {peft_name(name): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(found, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    table, alpha = lora.table, lora.table.alpha
    config = {
        "peft_type": "LORA", "task_type": "SEQ_CLS" if scalar else "CAUSAL_LM", "base_model_name_or_path": base_path,
        "r": table.rank, "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha, "lora_dropout": 0.0,
        "use_rslora": table.rslora, "bias": "none", "inference_mode": True,
        "target_modules": sorted(short_names(tuple(one.module for one in lora.layers), modules)),
        "modules_to_save": ["score"] if scalar else None,
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
