# SPDX-License-Identifier: Apache-2.0
"""Which attention of transformers a rank computes with, and whether rows then lie one after another in a single line.

flash-attn reads rows of any length from one line and pays for no padding. It needs a GPU and a format of 16 bits; anywhere
else rows lie in rectangles, and masks keep them apart exactly.
"""

from __future__ import annotations

from typing import Literal

import torch

from relax_core.api import ConfigError

FIELD = "trainer.attention"
FLASH = "flash_attention_2"
Attention = Literal["auto", "sdpa", "eager", "flash_attention_2"]


def choose_attention(wanted: Attention, device: torch.device, dtype: torch.dtype, deterministic: bool) -> str:
    """By its name in transformers. Raises ConfigError where what is asked for does not run here."""
    if wanted not in ("auto", FLASH):
        return wanted
    lacking = _lacking(device, dtype, deterministic)
    if wanted == FLASH and lacking:
        raise ConfigError(FIELD, repr(wanted), f"{lacking}; use auto")
    return "sdpa" if lacking else FLASH


def _lacking(device: torch.device, dtype: torch.dtype, deterministic: bool) -> str:
    """Why flash-attn can't be had; empty: it can."""
    if device.type != "cuda":
        return "it needs a GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return "it computes in bfloat16 and float16 alone: set model.dtype"
    if deterministic:
        return "its gradients differ between runs, and deterministic is set"
    return "" if _installed() else "it needs the package flash-attn"


def _installed() -> bool:
    from transformers.utils import is_flash_attn_2_available

    return bool(is_flash_attn_2_available())
