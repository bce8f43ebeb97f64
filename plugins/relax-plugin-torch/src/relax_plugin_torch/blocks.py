# SPDX-License-Identifier: Apache-2.0
"""The blocks that a model repeats, by its own word: what is compiled, shared out and computed again, one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from relax_core.api import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """In the order in which they compute; empty where the model does not say what its blocks are."""
    kinds = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


def known_blocks(model: PreTrainedModel, field: str) -> list[nn.Module]:
    """As `blocks_of`; ConfigError for an option that works by blocks where there are none."""
    if not (blocks := blocks_of(model)):
        raise ConfigError(field, "true", f"{type(model).__name__} does not say what its blocks are; leave it out")
    return blocks
