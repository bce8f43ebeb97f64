# SPDX-License-Identifier: Apache-2.0
"""Counts of the floating-point operations that a model needs for the tokens of its layouts.

The count has matrix products and attention, with 2 operations per multiplication. As is usual for the utilization of
devices (PaLM, arXiv 2204.02311, appendix B), attention counts all pairs of a row's tokens, and work that is done twice,
such as recomputed blocks, counts once. Padding does not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch

from relax_core.api import Routing, TrainerWork
from relax_core.trainer_kit.model_folder import has_towers
from relax_plugin_torch.layout import Layout
from relax_plugin_torch.options import TorchOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL, WINDOW = ("full_attention",), ("sliding_attention", "chunked_attention")
"""Names of layers in which a token sees all earlier tokens, and in which it sees only the last ones."""

PEAK_TFLOPS: Mapping[str, float] = {
    "B200": 2250.0, "GH200": 989.0, "H200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "H800": 989.0,
    "H20": 148.0, "A100": 312.0, "A800": 312.0, "L40S": 362.0, "L40": 181.0, "L4": 121.0, "A10G": 70.0, "A10": 125.0,
    "A40": 149.7, "A30": 165.0, "MI300X": 1307.0, "MI325X": 1307.0, "MI250X": 191.5,
}  # fmt: skip
"""Dense 16-bit TFLOP/s of GPUs, from the data sheets of their makers. The first name that has all its words in the name
of the device counts."""


@dataclass(frozen=True, slots=True)
class Products:
    """Multiplications of a forward pass, and of the gradients of its inputs and of its weights."""

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0

    def flops(self, trains: bool) -> float:
        return 2.0 * (self.forward + (self.inputs + self.weights if trains else 0.0))


class FlopCounter:
    """The work of a rank since the last `take`.

    A weight's own gradient is counted only if the weight is trained, and the gradient of its inputs only if something
    before it in the model is trained.
    """

    def __init__(self, model: PreTrainedModel, peak: float = 0.0) -> None:
        """Read the shapes of a whole model, before ranks split it. `peak`: operations per second of the device."""
        self._known, self._peak, self._done = not has_towers(model.config.to_dict()), peak, TrainerWork()
        self._body, self._head = _products(model)
        text = model.config.get_text_config()
        layers, heads = int(getattr(text, "num_hidden_layers", 0)), int(getattr(text, "num_attention_heads", 0))
        width = int(getattr(text, "head_dim", None) or (getattr(text, "hidden_size", 0) // max(heads, 1)))
        self._window = int(getattr(text, "sliding_window", None) or 0)
        kinds = getattr(text, "layer_types", None) or [WINDOW[0] if self._window else ALL[0]] * layers
        self._layers = sum(kind in ALL for kind in kinds)
        self._windowed = sum(kind in WINDOW for kind in kinds)
        scores = 2.0 * heads * width  # queries with keys, and the result with values
        self._pair = Products(scores, 2.0 * scores * self._body.inputs / max(self._body.forward, 1.0))

    def add(self, layout: Layout, scored: int, trains: bool) -> None:
        """Count a pass over a layout whose head scored this many tokens. `trains`: a backward pass follows."""
        if not self._known:
            return
        spans = np.asarray(layout.spans, np.float64)
        tokens, pairs = float(spans.sum()), self._layers * float((spans**2).sum())
        if self._windowed:
            pairs += self._windowed * float((spans * np.minimum(spans, self._window or np.inf)).sum())
        flops = tokens * self._body.flops(trains) + scored * self._head.flops(trains) + pairs * self._pair.flops(trains)
        every = float(layout.ids.numel())
        done = TrainerWork(flops if trains else 0.0, 0.0 if trains else flops, every, every - tokens)
        self._done = self._done.plus(done)

    def take(self) -> TrainerWork:
        """Return the work since the last call, with the device's peak."""
        done, self._done = self._done, TrainerWork()
        return done.plus(TrainerWork(peak_flops_per_s=self._peak))


def _products(model: PreTrainedModel) -> tuple[Products, Products]:
    """Return the multiplications per token in the model's body, and per scored token in its head.

    Blocks come in the order of computation. Of a layer's experts, only the share counts that a token visits.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    head = model.get_output_embeddings()
    routing = Routing.of(model.config.to_dict())
    visited = 1.0 if routing is None else routing.top_k / routing.experts
    body, reaches = Products(), False
    for name, parameter in _in_order(model):
        if parameter.dim() > 1 and id(parameter) not in embeddings and (head is None or parameter is not head.weight):
            size = parameter.numel() * (visited if ".experts." in name else 1.0)
            own = size * reaches, size * parameter.requires_grad
            body = Products(body.forward + size, body.inputs + own[0], body.weights + own[1])
        reaches = reaches or parameter.requires_grad
    if head is None:
        return body, Products()
    size = float(head.weight.numel())
    return body, Products(size, size * reaches, size * head.weight.requires_grad)


def _in_order(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters about in the order in which they compute: within a block, first its vectors, such as norms."""
    blocks = groupby(model.named_parameters(), lambda named: re.split(r"(?<=\d)\.", named[0], maxsplit=1)[0])
    for _, block in blocks:
        yield from sorted(block, key=lambda named: named[1].dim() > 1)


def peak_of(device: torch.device, dtype: torch.dtype, options: TorchOptions) -> float:
    """Return the peak operations per second of a device in a number format; 0 if it is unknown."""
    if options.peak_tflops:
        return options.peak_tflops * 1e12
    if device.type != "cuda" or dtype == torch.float32:
        return 0.0
    return listed_peak(torch.cuda.get_device_name(device))


def listed_peak(device_name: str) -> float:
    """Return the peak 16-bit operations per second of a GPU by its name, such as `NVIDIA H100 80GB HBM3`; 0: unknown."""
    words = device_name.replace("-", " ").split()
    return next((peak * 1e12 for name, peak in PEAK_TFLOPS.items() if {*name.split()} <= {*words}), 0.0)
