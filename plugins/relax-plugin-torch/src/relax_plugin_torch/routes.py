# SPDX-License-Identifier: Apache-2.0
"""Routes of rows in a trainer's forward: planned from their columns, replayed by the model's routers, told and counted.

Rows come packed; a layout says where in the model's rectangle each of their tokens lies. What no row plans (padding,
holes, rows of other ranks) the model routes for itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from relax_core import learn
from relax_core.api import ROUTES, ConfigError, Ragged, TrainerSpec
from relax_core.learn.huggingface import FIELD, RouteReplay
from relax_plugin_torch.layout import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from relax_plugin_torch.trainer import TorchOptions

EXPERTS, VALID = ROUTES
OUTPUT = "routed_experts"
"""What a forward is asked for."""
_ROLES = frozenset({"actor", "actor_fwd"})
"""Those whose weights are the policy's; others route for themselves."""
Sums = dict[str, tuple[Tensor, Tensor]]


class Routes:
    """The replay of recorded routing in one model, batch by batch."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._replay = RouteReplay(model)
        self._inputs = self._places = self._known = torch.zeros(0)
        self._planned = False

    @classmethod
    def of(cls, model: PreTrainedModel, spec: TrainerSpec, options: TorchOptions) -> Routes | None:
        """None where nothing is replayed. ConfigError where it can't be."""
        replay = spec.model.get("routing_replay", "off")
        if replay == "off" or spec.role not in _ROLES:
            return None
        if options.tensor_parallel > 1:
            raise ConfigError(
                FIELD,
                replay,
                "ranks of a tensor-parallel group would have to route alike: set trainer.tensor_parallel = 1",
            )
        if options.compile:
            raise ConfigError(FIELD, replay, "routes change from batch to batch: leave trainer.compile out")
        return cls(model)

    def plan(self, batch: learn.PackedBatch, layout: Layout) -> None:
        """For the forward that comes, its backward and what is computed again for that."""
        ends = batch.lengths.cumsum(0) - 1
        inputs = torch.ones(len(batch.tokens), dtype=torch.bool, device=ends.device)
        inputs[ends] = False  # a row's last token is not fed: nothing is predicted from it
        self._inputs = inputs.nonzero().squeeze(1)
        self._places = layout.before[self._inputs + 1]
        self._planned = EXPERTS in batch.rows.columns
        if not self._planned:
            self._replay.tell()
            return
        self._check(batch.rows.columns[EXPERTS].values)
        routes = batch.column(EXPERTS)
        valid = batch.column(VALID).bool() if batch.has(VALID) else torch.ones_like(inputs)
        size = layout.ids.numel()
        planned = routes.new_zeros(size, *routes.shape[1:])
        known = torch.zeros(size, dtype=torch.bool, device=ends.device)
        planned[self._places] = routes[self._inputs]
        known[self._places] = valid[self._inputs]
        self._known = known
        self._replay.tell(planned, known)

    def _check(self, routes: np.ndarray) -> None:
        """Raise ValueError where they are another model's."""
        want = self._replay.routing
        if routes.shape[1:] != (want.layers, want.top_k) or int(routes.max(initial=0)) >= want.experts:
            raise ValueError(
                f"{EXPERTS}: got [tokens, {', '.join(map(str, routes.shape[1:]))}] up to {int(routes.max(initial=0))}; "
                f"this model has {want.layers} layers that choose {want.top_k} of {want.experts}"
            )

    def column(self, batch: learn.PackedBatch) -> Ragged:
        """[tokens, layers, top_k] what the model chose in the forward that was; zeros for a row's last token."""
        own = self._replay.own()[self._places].cpu().numpy()
        whole = np.zeros((len(batch.tokens), *own.shape[1:]), self._replay.routing.dtype)
        whole[self._inputs.cpu().numpy()] = own
        return Ragged(whole, np.asarray(batch.rows.columns["tokens"].lengths))

    @torch.no_grad()
    def metrics(self) -> Sums:
        """Return metrics of the last forward: tokens that were replayed, and those of them that would go elsewhere
        now."""
        if not self._planned:
            return {}
        known = self._known[self._places]
        differs = self._replay.differs()[self._places] & known
        told = known.sum()
        count = torch.tensor(len(self._places), device=known.device)
        return {"routing/replayed": (told, count), "routing/differs": (differs.sum(), told)}


def beside(batch: learn.PackedBatch) -> np.ndarray | None:
    """[tokens, bytes] what tokens must have in common, beside themselves, to be computed once: their routes."""
    if EXPERTS not in batch.rows.columns:
        return None
    routes = np.ascontiguousarray(batch.rows.columns[EXPERTS].values)
    flat = routes.reshape(len(routes), -1).view(np.uint8)
    valid = batch.rows.columns.get(VALID)
    if valid is None:
        return flat
    known = np.asarray(valid.values)[:, None]
    return np.concatenate([flat * (known != 0), known], axis=1)
