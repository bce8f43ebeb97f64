# SPDX-License-Identifier: Apache-2.0
"""Routing replay in a trainer's forward pass, and the routed experts and metrics of that pass.

Routed experts come from columns of the packed rows: the experts that each layer chose for a token. The layout
gives each token's index in the model's input. The model chooses experts for tokens without recorded experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from relax_core import learn
from relax_core.api import ROUTED_COLUMNS, ConfigError, Ragged, TrainerSpec
from relax_core.learn.huggingface import FIELD, RouterReplay
from relax_plugin_torch.layout import Layout
from relax_plugin_torch.options import TorchOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXPERTS, VALID = ROUTED_COLUMNS
OUTPUT = "routed_experts"
"""Name of the output column of a forward pass that holds the model's own choice of experts."""
_ROLES = frozenset({"actor", "actor_fwd"})
"""Roles with the policy's weights, which replay recorded experts. Models of all other roles choose experts freely."""
Sums = dict[str, tuple[Tensor, Tensor]]


class RoutingReplay:
    """The replay of recorded routing in one model, batch by batch."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._replay = RouterReplay(model)
        self._inputs = self._places = self._known = torch.zeros(0)
        self._planned = False

    @classmethod
    def of(cls, model: PreTrainedModel, spec: TrainerSpec, options: TorchOptions) -> RoutingReplay | None:
        """Return the replay for a model, or None if nothing is replayed. Raises ConfigError if replay is impossible."""
        replay = spec.model.get("routing_replay", "off")
        if replay == "off" or spec.role not in _ROLES:
            return None
        if options.tensor_parallel > 1:
            raise ConfigError(
                FIELD,
                replay,
                "tensor-parallel ranks would all have to choose the same experts: set trainer.tensor_parallel = 1",
            )
        if options.compile:
            raise ConfigError(FIELD, replay, "routed experts change from batch to batch: leave trainer.compile out")
        return cls(model)

    def plan(self, batch: learn.PackedBatch, layout: Layout) -> None:
        """Set the routed experts of the next forward pass and of its backward pass, recomputed blocks included."""
        ends = batch.lengths.cumsum(0) - 1
        inputs = torch.ones(len(batch.tokens), dtype=torch.bool, device=ends.device)
        inputs[ends] = False  # a row's last token predicts nothing, so the model does not read it
        self._inputs = inputs.nonzero().squeeze(1)
        self._places = layout.before[self._inputs + 1]
        self._planned = EXPERTS in batch.rows.columns
        if not self._planned:
            self._replay.tell()
            return
        self._check(batch.rows.columns[EXPERTS].values)
        experts = batch.column(EXPERTS)
        valid = batch.column(VALID).bool() if batch.has(VALID) else torch.ones_like(inputs)
        size = layout.ids.numel()
        planned = experts.new_zeros(size, *experts.shape[1:])
        known = torch.zeros(size, dtype=torch.bool, device=ends.device)
        planned[self._places] = experts[self._inputs]
        known[self._places] = valid[self._inputs]
        self._known = known
        self._replay.tell(planned, known)

    def _check(self, experts: np.ndarray) -> None:
        """Raise ValueError if the routed experts do not fit this model's layers and experts."""
        want = self._replay.routing
        if experts.shape[1:] != (want.layers, want.top_k) or int(experts.max(initial=0)) >= want.experts:
            raise ValueError(
                f"{EXPERTS}: got [tokens, {', '.join(map(str, experts.shape[1:]))}] up to {int(experts.max(initial=0))}; "
                f"this model has {want.layers} layers that choose {want.top_k} of {want.experts}"
            )

    def column(self, batch: learn.PackedBatch) -> Ragged:
        """Return the model's own experts in the last forward pass, [tokens, layers, top_k]; 0 for a row's last token."""
        own = self._replay.own()[self._places].cpu().numpy()
        whole = np.zeros((len(batch.tokens), *own.shape[1:]), self._replay.routing.dtype)
        whole[self._inputs.cpu().numpy()] = own
        return Ragged(whole, np.asarray(batch.rows.columns["tokens"].lengths))

    @torch.no_grad()
    def metrics(self) -> Sums:
        """Return (sum, count) of replayed tokens, and of those for which the model would now choose different experts."""
        if not self._planned:
            return {}
        known = self._known[self._places]
        differs = self._replay.differs()[self._places] & known
        replayed = known.sum()
        count = torch.tensor(len(self._places), device=known.device)
        return {"routing/replayed": (replayed, count), "routing/differs": (differs.sum(), replayed)}


def prefix_keys(batch: learn.PackedBatch) -> np.ndarray | None:
    """Return each token's routed experts as bytes, [tokens, bytes]; None if the rows have none.

    Rows share a prefix only if the routed experts of its tokens are equal too.
    """
    if EXPERTS not in batch.rows.columns:
        return None
    experts = np.ascontiguousarray(batch.rows.columns[EXPERTS].values)
    flat = experts.reshape(len(experts), -1).view(np.uint8)
    valid = batch.rows.columns.get(VALID)
    if valid is None:
        return flat
    known = np.asarray(valid.values)[:, None]
    return np.concatenate([flat * (known != 0), known], axis=1)
