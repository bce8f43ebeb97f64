# SPDX-License-Identifier: Apache-2.0
"""The number format of matrix products. Weights that are trained, their gradients and the optimizer's state are float32
whatever it is, so that small steps add up. What is exported is in that format, what is published in the engines'.
"""

from __future__ import annotations

from typing import Any

import torch

from relax_core.api import ConfigError, TrainerSpec

FIELD = "model.dtype"
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_format(name: Any, device: torch.device) -> torch.dtype:
    """Return the format that `[model] dtype` names. Raises ConfigError for one that this device does not compute in."""
    if name not in FORMATS:
        raise ConfigError(FIELD, repr(name), f"the torch trainer has {', '.join(FORMATS)}")
    lacking = bfloat16_lacks(device) if name == "bfloat16" else ""
    if lacking:
        raise ConfigError(FIELD, repr(name), f"{lacking} does not compute in bfloat16; use float16 or float32")
    return FORMATS[name]


def publish_format(spec: TrainerSpec, computes: torch.dtype) -> torch.dtype:
    """Return the format of weights sent to engines. Raises ConfigError for one that the trainer does not publish."""
    name = spec.publish_dtype
    if name and name not in FORMATS:
        raise ConfigError("rollout.dtype", repr(name), f"the torch trainer publishes {', '.join(FORMATS)}")
    return FORMATS[name] if name else computes


def frozen_format(publishes: torch.dtype, computes: torch.dtype) -> torch.dtype:
    """How frozen weights lie: rounded as they are computed with, unless engines are to get them in another format, for
    which they would have been rounded twice."""
    return computes if publishes == computes else torch.float32


def bfloat16_lacks(device: torch.device) -> str:
    """The GPU that would only imitate bfloat16, at a fraction of its speed; a CPU computes in every format."""
    if device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
        return ""
    return torch.cuda.get_device_name(device)


def rounded(dtype: torch.dtype) -> torch.dtype | None:
    """Return the format that matrix products are rounded to; None where it is that of the weights."""
    return None if dtype == torch.float32 else dtype
