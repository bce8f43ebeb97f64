# SPDX-License-Identifier: Apache-2.0
"""Parts of a model by name: which of them a pattern means, freezing them, and holding what is frozen in less memory.

A frozen parameter has no gradient and no moments; it never changes, so a delta sends nothing of it.
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
    """Modules and parameters whose dotted name, or the end of it, is the pattern; `*` stands for anything."""
    for name, part in (*model.named_modules(), *model.named_parameters(remove_duplicate=False)):
        if name and (fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")):
            yield name, part


def found(model: nn.Module, pattern: str, field: str) -> list[tuple[str, nn.Module | nn.Parameter]]:
    """As `named`; ConfigError where it means nothing."""
    parts = list(named(model, pattern))
    if not parts:
        raise ConfigError(field, repr(pattern), f"this model has no such part; it has {_suggested(model, pattern)}")
    return parts


def _suggested(model: nn.Module, pattern: str) -> str:
    """Names like the wrong one, else those that modules end in."""
    ends = dict.fromkeys(name.rpartition(".")[2] for name, _ in model.named_modules())
    names = [end for end in ends if end and not end.isdigit()]
    return ", ".join(get_close_matches(pattern.rpartition(".")[2], names) or names[:_SHOWN])


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Everything in these parts stays as it is; something must be left to train."""
    for pattern in patterns:
        for _, part in found(model, pattern, FIELD):
            part.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(FIELD, ", ".join(patterns), "that is the whole model: leave a part of it to train")


def frozen_in(parts: Iterable[tuple[str, nn.Module | nn.Parameter]]) -> list[str]:
    """Names of those in which nothing is trained."""
    return [name for name, part in parts if not any(parameter.requires_grad for parameter in _parameters(part))]


def _parameters(part: nn.Module | nn.Parameter) -> Iterator[nn.Parameter]:
    return iter((part,)) if isinstance(part, nn.Parameter) else part.parameters()


def hold_frozen_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Frozen linear layers lie in the dtype that autocast would round them to anyway: the same results, half the memory.

    Anything else that is frozen (norms, embeddings and heads tied to them) is computed in float32 and stays there.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in embeddings:
            for parameter in module.parameters(recurse=False):
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(dtype)
