# SPDX-License-Identifier: Apache-2.0
"""The weights of one rank under Hugging Face names: read in parts, published one tensor at a time, saved as pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor

from relax_core.trainer_kit.lora import is_adapter, matrix
from relax_core.trainer_kit.ranks import Ranks
from relax_core.trainer_kit.setup import SCALAR_HEAD
from relax_core.trainer_kit.shards import Piece, to_host
from relax_plugin_megatron.architecture import Architecture
from relax_plugin_megatron.layout import Grid
from relax_plugin_megatron.mapping import Mapped, apart, join, mapped, part
from relax_plugin_megatron.model import Decoder


class Parts(Protocol):
    """Tensors of which parts can be read."""

    def read(self, name: str, index: Sequence[slice]) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Held:
    """One Megatron tensor of this rank, its sources, and its place among the ranks that split it."""

    parameter: torch.nn.Parameter
    mapped: Mapped
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the whole sources."""
    group: dist.ProcessGroup
    """The ranks that split the tensor."""
    original: bool
    """False if another rank, or another tensor of this rank, publishes and saves the same part."""

    def index(self, source: int) -> tuple[slice, ...]:
        """Return the part of a source that this rank holds."""
        return part(self.mapped.rule, self.shapes[source], self.group.rank(), self.group.size())


@dataclass(frozen=True, slots=True)
class Entry:
    """A published tensor."""

    shape: tuple[int, ...]
    owner: int
    """The rank that gathers it from the ranks that split it."""
    key: str
    """First source of its Megatron tensor."""
    source: int
    """Index of the tensor among the sources of the Megatron tensor."""


class Weights:
    """The weights of one rank, and their conversion from and to the tensors of a Hugging Face folder."""

    def __init__(
        self, chunks: Sequence[Decoder], shape: Architecture, grid: Grid, ranks: Ranks, scale: float = 0.0,
        frozen: Set[str] = frozenset(),
    ) -> None:  # fmt: skip
        """Map every parameter of the decoder's chunks. All ranks must call.

        `scale`: factor of adapters' products B A. `frozen`: names of tensors that are not trained.
        """
        self._shape, self._grid, self._ranks, self._scale, self._frozen = shape, grid, ranks, scale, frozen
        self._heads_per_group = shape.heads // shape.key_value_heads
        self._head_groups = shape.key_value_heads // grid.tensor
        self.held = [self._place(chunk, *named) for chunk in chunks for named in chunk.named_parameters()]
        self._by_key = {held.mapped.sources[0]: held for held in self.held if held.original}
        self._exact: dict[str, Tensor] = {}
        """Frozen tensors in float32 by first source, for a model that is published in another format than it has."""
        own = [
            [source, list(held.shapes[at]), held.mapped.sources[0], at]
            for held in self.held if held.original and held.group.rank() == 0
            for at, source in enumerate(held.mapped.sources)
        ]  # fmt: skip
        everything = {
            name: Entry(tuple(shape), owner, key, at)
            for owner, told in enumerate(ranks.tell(own)) for name, shape, key, at in told
        }  # fmt: skip
        self.adapters = {name: entry for name, entry in everything.items() if is_adapter(name)}
        """Matrices of adapters by name, as checkpoints hold them; the same on every rank."""
        self.entries = {name: entry for name, entry in everything.items() if name not in self.adapters}
        """Tensors of the model without adapters by name; the same on every rank."""

    def _place(self, chunk: Decoder, name: str, parameter: torch.nn.Parameter) -> Held:
        layers = chunk.decoder.layers
        first_layer = layers[0].layer_number - 1 if len(layers) else 0
        state = parallel_state
        first_expert = state.get_expert_model_parallel_rank() * (self._shape.experts // self._grid.expert)
        copied = name == "output_layer.weight" and self._shape.tied
        rule = mapped(
            self._shape.family, "embedding.word_embeddings.weight" if copied else name, first_layer, first_expert
        )
        if rule.expert:
            # Megatron sums experts over the wrong ranks if expert_parallel is 1 and tensor-parallel ranks have copies
            parameter.allreduce = False  # type: ignore[attr-defined]
            group, copy = state.get_expert_tensor_parallel_group(), state.get_expert_data_parallel_rank()
        else:
            group, copy = state.get_tensor_model_parallel_group(), state.get_data_parallel_rank(True)
        # the gradient's norm counts tensors without this attribute on one rank only
        if not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, rule.rule.axis is not None, rule.rule.axis or 0, 1)
        shapes = []
        for one in apart(rule.rule, parameter.detach(), self._head_groups, self._heads_per_group):
            whole = list(one.shape)
            if rule.rule.axis is not None:
                size = whole[rule.rule.axis] * group.size()
                whole[rule.rule.axis] = self._shape.vocabulary if rule.rule.vocabulary else size
            shapes.append(tuple(whole))
        return Held(parameter, rule, tuple(shapes), group, copy == 0 and not copied)

    @property
    def trained(self) -> Mapping[str, Entry]:
        """Tensors that training changes: all that are not frozen, or adapters and a scalar head."""
        whole = {name: entry for name, entry in self.entries.items() if name not in self._frozen}
        if not self.adapters:
            return whole
        return {**self.adapters, **{name: entry for name, entry in whole.items() if name == SCALAR_HEAD}}

    @property
    def trained_here(self) -> list[Held]:
        """Tensors of this rank that training changes."""
        return self._here(self.trained)

    @property
    def saved(self) -> Mapping[str, Entry]:
        """Tensors that a checkpoint holds: the whole model, or the trained tensors of a model with adapters."""
        return self.trained if self.adapters else self.entries

    @property
    def saved_here(self) -> list[Held]:
        """Tensors of this rank that a checkpoint holds."""
        return self._here(self.saved)

    def _here(self, entries: Mapping[str, Entry]) -> list[Held]:
        return [held for held in self.held if held.mapped.sources[0] in entries]

    @property
    def plain(self) -> bool:
        """True if training changes adapters only, so that they can be published without the base."""
        return bool(self.adapters) and len(self.trained) == len(self.adapters)

    @property
    def size(self) -> int:
        """Number of parameters of the whole model, with adapters."""
        return count(self.entries) + count(self.adapters)

    # -- into this rank -----------------------------------------------------------------------------------------------

    def read(self, held: Held, parts: Parts, prefix: str = "", suffix: str = "") -> Tensor:
        """Return a Megatron tensor of this rank from its sources, float32; the vocabulary's padding is 0."""
        found = [
            parts.read(f"{prefix}{source}{suffix}", held.index(at)).to(torch.float32)
            for at, source in enumerate(held.mapped.sources)
        ]
        return self._padded(held, join(held.mapped.rule, found, self._head_groups))

    def keep(self, held: Held, value: Tensor) -> None:
        """Keep the float32 value of a frozen tensor in host memory: its parameter is rounded, and not as published."""
        if held.original and held.mapped.sources[0] not in self.trained:
            self._exact[held.mapped.sources[0]] = value.cpu()

    @torch.no_grad()
    def set_frozen(self, held: Held, value: Tensor) -> None:
        """Set a frozen tensor of this rank, and its float32 value if that is kept."""
        held.parameter.copy_(value)
        if held.mapped.sources[0] in self._exact:
            self._exact[held.mapped.sources[0]] = value.cpu()

    def exact(self, held: Held) -> Tensor:
        """Return a frozen tensor of this rank in float32."""
        return self._exact.get(held.mapped.sources[0], held.parameter.detach()).float()

    @torch.no_grad()
    def put(self, name: str, value: Tensor) -> None:
        """Copy this rank's part of a whole tensor into the Megatron tensors that it is a source of."""
        for held in self.held:
            if name not in held.mapped.sources:
                continue
            at, rule = held.mapped.sources.index(name), held.mapped.rule
            for tensor in (held.parameter.detach(), self._exact.get(held.mapped.sources[0])):
                if tensor is not None:
                    own = apart(rule, tensor, self._head_groups, self._heads_per_group)
                    own[at] = self._padded(held, value[held.index(at)].to(tensor))
                    tensor.copy_(join(rule, own, self._head_groups))

    def _padded(self, held: Held, value: Tensor) -> Tensor:
        """Fill up a part of the vocabulary with zeros to the size that every rank holds."""
        missing = held.parameter.shape[0] - value.shape[0] if held.mapped.rule.vocabulary else 0
        return torch.nn.functional.pad(value, (0, 0, 0, missing)) if missing else value

    # -- out of this rank ---------------------------------------------------------------------------------------------

    def pieces(self, held: Held, tensor: Tensor, prefix: str = "", suffix: str = "") -> dict[str, Piece]:
        """Return the pieces of a tensor that has the shape of a parameter, copied to host memory.

        Empty on ranks other than the first of those that hold the same part.
        """
        rule = held.mapped.rule
        if not held.original or (rule.axis is None and held.group.rank()):
            return {}
        found = {}
        for at, own in enumerate(apart(rule, tensor, self._head_groups, self._heads_per_group)):
            index = held.index(at)
            own = own[tuple(slice(0, one.stop - one.start) for one in index)]  # without padding of the vocabulary
            if own.numel():
                name = f"{prefix}{held.mapped.sources[at]}{suffix}"
                found[name] = Piece(to_host(own), tuple(one.start for one in index))
        return found

    @torch.no_grad()
    def clear_adapters(self) -> None:
        """Set every matrix B to 0, so that the model computes the same as its base."""
        for held in self.held:
            if held.mapped.sources[0] in self.adapters and ".lora_B." in held.mapped.sources[0]:
                held.parameter.zero_()

    def stream(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor), with adapters folded in, on rank 0 in host memory. All ranks must iterate.

        Each tensor is gathered by the ranks that split it and sent to rank 0 when rank 0 asks for it.
        """
        return self._stream(self.entries, dtype)

    def stream_trained(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that training changes, in float32, in the same way."""
        return self._stream(self.trained, torch.float32)

    @torch.no_grad()
    def _stream(self, entries: Mapping[str, Entry], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        rank, key, wholes = self._ranks.rank, "", list[Tensor]()
        for name, entry in entries.items():
            if entry.key in self._by_key and entry.key != key:
                key, wholes = entry.key, self._gathered(self._by_key[entry.key], dtype, fold=True)
            if entry.owner == rank == 0:
                yield name, wholes[entry.source]
            elif entry.owner == rank:
                dist.send(wholes[entry.source], 0)
            elif rank == 0:
                arriving = torch.empty(entry.shape, dtype=dtype)
                dist.recv(arriving, entry.owner)
                yield name, arriving

    @torch.no_grad()
    def whole(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a whole tensor, without adapters, in host memory on every rank. All ranks must call."""
        entry = self.entries[name] if name in self.entries else self.adapters[name]
        held = self._by_key.get(entry.key)
        value = torch.empty(entry.shape, dtype=dtype)
        if held is not None:
            value = self._gathered(held, dtype)[entry.source]
        if self._ranks.size > 1:
            dist.broadcast(value, entry.owner)
        return value

    def _gathered(self, held: Held, dtype: torch.dtype, *, fold: bool = False) -> list[Tensor]:
        """Return the whole sources of a tensor, with adapters if `fold`; all ranks of its group call together."""
        rule = held.mapped.rule
        wholes = []
        value = self._exact.get(held.mapped.sources[0], held.parameter.detach())
        parts = apart(rule, value, self._head_groups, self._heads_per_group)
        for source, own in zip(held.mapped.sources, parts, strict=True):
            own = (self._folded(source, own) if fold else own).to("cpu", dtype).contiguous()
            if rule.axis is not None and held.group.size() > 1:
                everyone = [torch.empty_like(own) for _ in range(held.group.size())]
                dist.all_gather(everyone, own, group=held.group)
                own = torch.cat(everyone, dim=rule.axis)
            wholes.append(own[: self._shape.vocabulary] if rule.vocabulary else own)
        return wholes

    def _folded(self, source: str, own: Tensor) -> Tensor:
        """Return base + scale * B A of this rank's part of a tensor, in float32; the tensor itself without an adapter.

        The ranks split one of the matrices like the tensor, so each computes its own part.
        """
        module = source.removesuffix(".weight")
        if matrix(module, "A") not in self._by_key:
            return own
        a, b = (self._by_key[matrix(module, side)].parameter.detach() for side in "AB")
        return own.to(b) + self._scale * (b @ a)


def count(entries: Mapping[str, Entry]) -> int:
    """Return the number of values in these tensors."""
    return sum(math.prod(entry.shape) for entry in entries.values())
