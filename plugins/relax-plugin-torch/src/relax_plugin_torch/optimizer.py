# SPDX-License-Identifier: Apache-2.0
"""AdamW as the experiment's optimizer table says; weight decay leaves vectors (norms, biases) alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from relax_core.api import OptimizerSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def make_optimizer(model: PreTrainedModel, spec: OptimizerSpec) -> torch.optim.AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=spec.lr, betas=spec.betas, fused=True)
