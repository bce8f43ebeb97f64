# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: of each block only what goes into it is kept, and the backward pass computes the rest again.

The same operations on the same numbers, so loss and gradients are those without it, bit for bit. It wraps what a block
computes, not the block: names stay, and weights in parts are whole when it computes again. It costs a forward pass more.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch.utils.checkpoint import checkpoint

from relax_plugin_torch.blocks import known_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIELD = "trainer.activation_checkpointing"


def recompute_blocks(model: PreTrainedModel, draws: bool = False) -> None:
    """From now on. `draws`: something in a block is drawn by chance, and must be drawn alike again. Raises ConfigError."""
    for block in known_blocks(model, FIELD):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=draws)
