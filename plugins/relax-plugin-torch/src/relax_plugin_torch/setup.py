# SPDX-License-Identifier: Apache-2.0
"""Checks and choices before the model is loaded: spec, threads, determinism, device, number formats and attention.

Trained weights, their gradients and the optimizer's state are always float32, so that rounding does not swallow small
updates. `model.dtype` is the format of matrix products and of exported weights. Published weights have the same format
unless `rollout.dtype` names another for the engines.
"""

from __future__ import annotations

import torch

from relax_core.api import ConfigError
from relax_plugin_torch.options import Attention


def frozen_format(publishes: torch.dtype, computes: torch.dtype) -> torch.dtype:
    """Return the format in which frozen weights are stored.

    It is the format of matrix products if weights are published in that format too. Otherwise it is float32, so that
    published weights are not rounded twice.
    """
    return computes if publishes == computes else torch.float32


def rounded(dtype: torch.dtype) -> torch.dtype | None:
    """Return the autocast format of matrix products; None for float32, which needs no autocast."""
    return None if dtype == torch.float32 else dtype


FLASH = "flash_attention_2"


def choose_attention(wanted: Attention, device: torch.device, dtype: torch.dtype, deterministic: bool) -> str:
    """Return the attention implementation by its name in transformers. Raises ConfigError if flash-attn can't run.

    flash-attn reads rows of any length, packed into one sequence without padding. It needs a GPU and a 16-bit format.
    `sdpa` and `eager` read padded batches: each batch entry is one row, or all rows of a group under an exact mask.
    """
    if wanted not in ("auto", FLASH):
        return wanted
    lacking = _lacking(device, dtype, deterministic)
    if wanted == FLASH and lacking:
        raise ConfigError("trainer.attention", repr(wanted), f"{lacking}; use auto")
    return "sdpa" if lacking else FLASH


def _lacking(device: torch.device, dtype: torch.dtype, deterministic: bool) -> str:
    """Return the reason why flash-attn can't be used; empty if it can."""
    if device.type != "cuda":
        return "it needs a GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return "it computes in bfloat16 and float16 only: set model.dtype"
    if deterministic:
        return "its gradients differ between runs, and deterministic is set"
    return "" if _installed() else "it needs the package flash-attn"


def _installed() -> bool:
    from transformers.utils import is_flash_attn_2_available

    return bool(is_flash_attn_2_available())
