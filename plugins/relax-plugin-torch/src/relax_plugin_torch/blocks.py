# SPDX-License-Identifier: Apache-2.0
"""The blocks that a model repeats, by its own word: they are compiled, shared out and computed again, one at a time."""

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
    """List them in the order in which they compute; empty where the model does not say what its blocks are."""
    kinds = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


def known_blocks(model: PreTrainedModel, field: str) -> list[nn.Module]:
    """List blocks as `blocks_of` does; ConfigError for an option that works by blocks where there are none."""
    if not (blocks := blocks_of(model)):
        raise ConfigError(field, "true", f"{type(model).__name__} does not say what its blocks are; leave it out")
    return blocks


def recompute_blocks(model: PreTrainedModel, draws: bool = False) -> None:
    """Keep of each block only what goes into it, and let the backward pass compute the rest again. Raises ConfigError.

    The same operations on the same numbers give the same loss and gradients, bit for bit. What a block computes is wrapped
    and not the block: names stay, and weights in parts are whole when it computes again. `draws`: something in a block is
    drawn by chance, and must be drawn alike again.
    """
    for block in known_blocks(model, "trainer.activation_checkpointing"):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=draws)


def compile_blocks(model: PreTrainedModel, attempt: Callable[[], Tensor], backend: str = "inductor") -> None:
    """Compile each block for rows of any number and length, and try a forward and backward pass, which `attempt` gives the
    result of. Raises ConfigError where the compiler fails."""
    for block in known_blocks(model, "trainer.compile"):
        block.compile(backend=backend, dynamic=True)
    try:
        result = attempt()
        if result.requires_grad:
            result.backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # compilers fail in their own ways
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError("trainer.compile", "true", f"torch.compile fails here ({why}); leave it out") from error
    finally:
        for parameter in model.parameters():
            parameter.grad = None
