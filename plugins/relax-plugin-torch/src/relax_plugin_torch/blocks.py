# SPDX-License-Identifier: Apache-2.0
"""The repeated blocks of a model (its decoder layers), which are compiled, sharded and recomputed one at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from relax_core.api import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the blocks in the order in which they compute; empty if the model does not name its blocks."""
    kinds = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


def known_blocks(model: PreTrainedModel, field: str) -> list[nn.Module]:
    """Return the model's blocks. Raises ConfigError for the option `field` if the model does not name its blocks."""
    if not (blocks := blocks_of(model)):
        raise ConfigError(field, "true", f"{type(model).__name__} does not name its blocks; leave it out")
    return blocks


def recompute_blocks(model: PreTrainedModel, draws: bool = False) -> None:
    """Keep only the inputs of each block, and let the backward pass recompute the rest.

    The same operations on the same numbers give the same loss and gradients, bit for bit. Only `forward` of a block is
    wrapped, so parameter names stay, and sharded weights are whole during the recomputation. `draws`: True if blocks
    use random numbers (dropout) that the recomputation must repeat. Raises ConfigError if the model names no blocks.
    """
    for block in known_blocks(model, "trainer.activation_checkpointing"):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=draws)


def compile_blocks(model: PreTrainedModel, attempt: Callable[[], Tensor], backend: str = "inductor") -> None:
    """Compile each block for any number and length of rows, and try a forward and a backward pass.

    `attempt` runs the forward pass and returns its result. Raises ConfigError if the model names no blocks or the
    compiler fails.
    """
    for block in known_blocks(model, "trainer.compile"):
        block.compile(backend=backend, dynamic=True)
    try:
        result = attempt()
        if result.requires_grad:
            result.backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # compilers raise errors of many types
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError("trainer.compile", "true", f"torch.compile fails here ({why}); leave it out") from error
    finally:
        for parameter in model.parameters():
            parameter.grad = None
