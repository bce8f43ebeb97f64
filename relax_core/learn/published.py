# SPDX-License-Identifier: Apache-2.0
"""A model's own tensors under the names of its folder: views of the same memory, so that what is written there is loaded.

Models fuse what folders hold apart: the experts of a layer are one tensor, and a folder has two or three for each. Which
part of which tensor a name means is found by sending positions in place of weights through the model's own conversion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from relax_core.api.errors import ConfigError

Tensors: TypeAlias = Mapping[str, Tensor]
Revert: TypeAlias = Callable[[dict[str, Tensor]], Tensors]
"""From the tensors of a model to those of its folder."""
_LAYER = re.compile(r"\.(\d+)\.")


class PublishedPart(NamedTuple):
    """Where a named tensor lies in the memory of another."""

    source: str
    start: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]

    def of(self, tensors: Tensors) -> Tensor:
        own = tensors[self.source]
        return own.as_strided(self.shape, self.steps, own.storage_offset() + self.start)


def parts_of(own: Tensors, revert: Revert) -> dict[str, PublishedPart]:
    """Every tensor of the folder that is not one of the model's own. ConfigError where one is a part of none.

    Layers are alike: positions go through once for each kind of tensor.
    """
    named = revert({name: tensor.to("meta") for name, tensor in own.items()})
    kept = {name for name, tensor in own.items() if name in named and named[name].shape == tensor.shape}
    found: dict[str, PublishedPart] = {}
    known: dict[tuple[str, torch.Size], list[tuple[str, PublishedPart]]] = {}
    for name, tensor in own.items():
        if name in kept:
            continue
        layer = _LAYER.search(name)
        number = layer[1] if layer else ""
        kind = (_LAYER.sub(".#.", name, count=1), tensor.shape)
        if kind not in known:
            known[kind] = [(_unnumbered(to, number), part) for to, part in _lie(name, tensor, revert).items()]
        found |= {to.replace("#", number): part._replace(source=name) for to, part in known[kind]}
    if lacking := sorted(named.keys() - kept - found.keys()):
        raise ConfigError("model.path", lacking[0], "no part of the model is this tensor of its folder: choose another")
    return found


def _unnumbered(name: str, number: str) -> str:
    return name.replace(f".{number}.", ".#.", 1) if number else name


def _lie(name: str, tensor: Tensor, revert: Revert) -> dict[str, PublishedPart]:
    """What becomes of one tensor."""
    places = torch.arange(tensor.numel(), dtype=torch.int32 if tensor.numel() < 2**31 else torch.int64)
    return {to: _part(name, to, at) for to, at in revert({name: places.view(tensor.shape)}).items()}


def _part(source: str, to: str, places: Tensor) -> PublishedPart:
    """From the positions that a part's elements have in the whole: ConfigError where these are not evenly spaced."""
    start = int(places.flatten()[0])
    steps = tuple(
        int(places.select(axis, 1).flatten()[0]) - start if size > 1 else 1 for axis, size in enumerate(places.shape)
    )
    spaced = torch.tensor(start, dtype=places.dtype)
    for axis, (size, step) in enumerate(zip(places.shape, steps, strict=True)):
        along = torch.arange(size, dtype=places.dtype) * step
        spaced = spaced + along.view(-1, *[1] * (places.dim() - axis - 1))
    if not torch.equal(spaced.expand(places.shape), places):
        raise ConfigError("model.path", to, f"it is no even part of {source}: choose another model")
    return PublishedPart(source, start, tuple(places.shape), steps)
