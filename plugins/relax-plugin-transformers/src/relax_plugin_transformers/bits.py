# SPDX-License-Identifier: Apache-2.0
"""Tensors as numpy sees them: it has no bf16 and no fp8, so those are their bits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

_BITS: Mapping[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view; itself where numpy has the dtype."""
    return tensor.view(_BITS[tensor.dtype]) if tensor.dtype in _BITS else tensor


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """An array over its memory, or over a copy of what lies on a GPU."""
    return as_bits(tensor.detach().cpu()).numpy()
