# SPDX-License-Identifier: Apache-2.0
"""Selection of a model's parts by name patterns, freezing of parts, and a smaller format for frozen layers.

A frozen parameter has no gradient and no optimizer moments. It never changes, so a weight delta does not contain it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import nn

from relax_core.api import ConfigError

FIELD = "model.freeze"
_SHOWN = 12


def named(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    """Yield modules and parameters whose dotted name, or its end, matches the pattern; `*` matches any characters."""
    for name, part in (*model.named_modules(), *model.named_parameters(remove_duplicate=False)):
        if name and (fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")):
            yield name, part


def found(model: nn.Module, pattern: str, field: str) -> list[tuple[str, nn.Module | nn.Parameter]]:
    """Return the parts that `named` yields; raise ConfigError if no part matches."""
    parts = list(named(model, pattern))
    if not parts:
        raise ConfigError(field, repr(pattern), f"this model has no such part; it has {_suggested(model, pattern)}")
    return parts


def _suggested(model: nn.Module, pattern: str) -> str:
    """Return last parts of module names: those similar to the pattern, or the first few if none is similar."""
    ends = dict.fromkeys(name.rpartition(".")[2] for name, _ in model.named_modules())
    names = [end for end in ends if end and not end.isdigit()]
    return ", ".join(get_close_matches(pattern.rpartition(".")[2], names) or names[:_SHOWN])


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze all parameters in the parts that match. Raises ConfigError if this freezes the whole model."""
    for pattern in patterns:
        for _, part in found(model, pattern, FIELD):
            part.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(FIELD, ", ".join(patterns), "this freezes the whole model; leave a part to train")


def frozen_in(parts: Iterable[tuple[str, nn.Module | nn.Parameter]]) -> list[str]:
    """Return the names of the parts that have no trained parameter."""
    return [name for name, part in parts if not any(parameter.requires_grad for parameter in _parameters(part))]


def _parameters(part: nn.Module | nn.Parameter) -> Iterator[nn.Parameter]:
    return iter((part,)) if isinstance(part, nn.Parameter) else part.parameters()


def hold_frozen_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Store frozen linear layers in `dtype`, to which autocast rounds them: the same results from half the memory.

    Frozen norms, embeddings and heads tied to embeddings are computed in float32, and stay float32.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in embeddings:
            for parameter in module.parameters(recurse=False):
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(dtype)
