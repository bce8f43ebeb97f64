# SPDX-License-Identifier: Apache-2.0
"""Routing replay: routers choose the experts that a column of the rows names, and tell their own choice.

Each rank holds the routers of its stage, and may hold only a part of the tokens. `Layout` maps the tokens of packed
rows to the tokens of a rank. Ranks join their choices of one micro-batch after the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from relax_core import learn
from relax_core.api import ROUTED_COLUMNS, Ragged, TrainerSpec
from relax_plugin_megatron.architecture import Architecture
from relax_plugin_megatron.model import Decoder

EXPERTS, VALID = ROUTED_COLUMNS
OUTPUT = "routed_experts"
"""Name of the output column of a forward pass that holds the model's own choice of experts."""
_ROLES = frozenset({"actor", "actor_fwd"})
"""Roles with the policy's weights, which replay recorded experts."""
Sums = dict[str, tuple[Tensor, Tensor]]


@dataclass(slots=True)
class Planned:
    """The experts of one micro-batch for one router: the planned experts, and the router's own choice."""

    experts: Tensor | None
    """[tokens, top_k] of this rank; None: the router chooses freely."""
    known: Tensor | None
    """[tokens]: True where `experts` counts."""
    own: Tensor | None = None
    """The router's own choice, [tokens, top_k]."""


class LayerReplay:
    """Stands for Megatron's `RouterReplay` in one router; keeps the plans of micro-batches that await recomputation."""

    def __init__(self, recomputes: bool) -> None:
        self._recomputes = recomputes
        self._waiting: list[Planned] = []
        self._next = Planned(None, None)

    def plan(self, planned: Planned, trains: bool) -> None:
        """Set the plan of the next forward pass; with `trains`, a backward pass follows, in the same order."""
        self._next = planned
        if trains and self._recomputes:
            self._waiting.append(planned)

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return scores and experts, [tokens, topk] each; Megatron calls this instead of its own choice."""
        again = self._recomputes and torch.is_grad_enabled()
        planned = self._waiting.pop(0) if again else self._next
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        planned.own = own.detach()
        if planned.experts is None or planned.known is None:
            return values, own
        chosen = torch.where(planned.known[:, None], planned.experts, own)
        return scores.gather(1, chosen), chosen


@dataclass(slots=True)
class MicroBatch:
    """The plans of one micro-batch by layer, and the places of its tokens."""

    plans: dict[int, Planned]
    inputs: Tensor
    """Indices of the packed tokens that the model reads: all but the last of each row."""
    places: Tensor
    """Indices of these tokens in the flattened ids."""
    held: Tensor
    """Indices in the flattened ids of this rank's tokens, in the order of its routers."""
    size: int
    """Number of tokens of the flattened ids."""
    known: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))


class RoutingReplay:
    """The replay of recorded routing on one rank, micro-batch by micro-batch."""

    def __init__(
        self, chunks: Sequence[Decoder], shape: Architecture, recomputes: bool, sequence_parallel: bool
    ) -> None:  # fmt: skip
        self._shape, self._split = shape, sequence_parallel
        self._layers = [layer for layer in range(shape.layers) if layer not in shape.dense_layers]
        self._routers: list[dict[int, LayerReplay]] = [{} for _ in chunks]
        for chunk, routers in zip(chunks, self._routers, strict=True):
            for layer in chunk.decoder.layers:
                if layer.layer_number - 1 in self._layers:
                    own = routers[self._layers.index(layer.layer_number - 1)] = LayerReplay(recomputes)
                    layer.mlp.router.router_replay = own

    @classmethod
    def of(
        cls,
        chunks: Sequence[Decoder],
        shape: Architecture,
        spec: TrainerSpec,
        recomputes: bool,
        sequence_parallel: bool,
    ) -> RoutingReplay | None:
        """Return the replay of a model, or None if nothing is replayed."""
        if spec.model.get("routing_replay", "off") == "off" or spec.role not in _ROLES or not shape.experts:
            return None
        return cls(chunks, shape, recomputes, sequence_parallel)

    def begin(self, made: MicroBatch | None, chunk: int, trains: bool) -> None:
        """Set the experts of a chunk's next pass; None: the routers choose freely."""
        for layer, router in self._routers[chunk].items():
            router.plan(Planned(None, None) if made is None else made.plans[layer], trains)

    def plan(
        self, batch: learn.PackedBatch | None, before: Tensor, shape: Sequence[int], held: Tensor
    ) -> MicroBatch | None:
        """Plan the experts of a micro-batch. `shape`: [rows, width] of the ids; `held`: this rank's columns."""
        if batch is None:
            return None
        rows, width = shape
        tokens = (torch.arange(rows)[None, :] * width + held[:, None]).to(before.device)
        if self._split:  # each rank has consecutive tokens of all rows
            group = parallel_state.get_tensor_model_parallel_group()
            tokens = tokens.chunk(group.size())[group.rank()]
        tokens = tokens.flatten()
        read = torch.ones(len(batch.tokens), dtype=torch.bool, device=before.device)
        read[batch.lengths.cumsum(0) - 1] = False
        inputs = read.nonzero().squeeze(1)
        made = MicroBatch({}, inputs, before[inputs + 1], tokens, rows * width)
        experts, known = self._given(batch, made)
        made.known = known
        for layer in chain(*self._routers):
            made.plans[layer] = Planned(None if experts is None else experts[tokens, layer], known[tokens])
        return made

    def _given(self, batch: learn.PackedBatch, made: MicroBatch) -> tuple[Tensor | None, Tensor]:
        """Return the recorded experts [ids, layers, top_k], and where they are known [ids]."""
        known = torch.zeros(made.size, dtype=torch.bool, device=made.places.device)
        if EXPERTS not in batch.rows.columns:
            return None, known
        self._check(batch.rows.columns[EXPERTS].values)
        given = batch.column(EXPERTS).long()
        valid = batch.column(VALID).bool() if batch.has(VALID) else torch.ones(len(given), dtype=torch.bool)
        experts = given.new_zeros(made.size, *given.shape[1:])
        experts[made.places], known[made.places] = given[made.inputs], valid.to(known.device)[made.inputs]
        return experts, known

    def _check(self, experts: np.ndarray) -> None:
        """Raise ValueError if the experts do not fit this model's layers and experts."""
        want = (len(self._layers), self._shape.experts_per_token)
        if experts.shape[1:] != want or int(experts.max(initial=0)) >= self._shape.experts:
            raise ValueError(
                f"{EXPERTS}: got [tokens, {', '.join(map(str, experts.shape[1:]))}] up to "
                f"{int(experts.max(initial=0))}; this model has {want[0]} layers that choose {want[1]} of "
                f"{self._shape.experts}"
            )

    # -- after a pass -----------------------------------------------------------------------------------------------------

    def column(self, batch: learn.PackedBatch, made: MicroBatch) -> Ragged:
        """Return the model's own experts, [tokens, layers, top_k], 0 for a row's last token. All ranks must call."""
        own = torch.zeros(made.size, len(self._layers), self._shape.experts_per_token, dtype=torch.long)
        for layer, planned in made.plans.items():
            own[made.held.cpu(), layer] = _own(planned).cpu().sort(-1).values
        self._join(own, dist.ReduceOp.SUM)
        kind = np.uint8 if self._shape.experts <= 256 else np.uint16
        whole = np.zeros((len(batch.tokens), *own.shape[1:]), kind)
        whole[made.inputs.cpu().numpy()] = own[made.places.cpu()].numpy()
        return Ragged(whole, np.asarray(batch.rows.columns["tokens"].lengths))

    @torch.no_grad()
    def metrics(self, made: MicroBatch) -> Sums:
        """Return (sum, count) of replayed tokens, and of those for which the model would now choose different experts.

        All ranks that compute the same rows must call.
        """
        differs = torch.zeros(made.size, dtype=torch.long)
        for planned in made.plans.values():
            if planned.experts is not None:
                apart = (_own(planned).sort(-1).values != planned.experts.sort(-1).values).any(-1)
                differs[made.held.cpu()] |= apart.long().cpu()
        self._join(differs, dist.ReduceOp.MAX)
        known = made.known[made.places].cpu()
        replayed = known.sum()
        if not replayed:
            return {}
        wrong = (differs[made.places.cpu()].bool() & known).sum()
        return {
            "routing/replayed": (replayed, torch.tensor(len(made.places))),
            "routing/differs": (wrong, replayed),
        }

    def _join(self, values: Tensor, how: dist.ReduceOp.RedOpType) -> None:
        """Reduce over the ranks that compute the same rows."""
        groups = [parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_context_parallel_group()]
        if self._split:
            groups.append(parallel_state.get_tensor_model_parallel_group())
        for group in groups:
            if group.size() > 1:
                dist.all_reduce(values, op=how, group=group)


def _own(planned: Planned) -> Tensor:
    if planned.own is None:
        raise RuntimeError("a router has not run since its plan was set")
    return planned.own
