# SPDX-License-Identifier: Apache-2.0
"""One update between begin and finish: what its micro-batches have added up so far. The gradient is in the parameters.

At the end each rank gives its `share` and all `join` the shares of all, so that every rank knows the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from relax_core import learn
from relax_core.api import Algorithm, Loss
from relax_core.learn.counts import Metric
from relax_plugin_torch.policy import Policy


class Update:
    """Accumulates gradients, term values and metrics over micro-batches."""

    def __init__(
        self, policy: Policy, algorithm: Algorithm, denominators: Mapping[str, float], role: str = "actor",
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Gradients are those of the loss times `scale`; terms and metrics are not."""
        self._policy, self._algorithm, self._role, self._scale = policy, algorithm, role, scale
        self.denominators = learn.Denominators(denominators)
        self._terms: dict[str, Tensor] = {}
        self._mismatch = learn.Mismatch()
        self._metrics: list[Mapping[str, tuple[Tensor, Tensor]]] = []
        self._totals: dict[str, float] = {}
        self._merged: dict[str, Metric] = {}

    def add(self, batch: learn.PackedBatch, step_start: int | None) -> None:
        """Forward and backward of one micro-batch; `step_start` where the policy is still that of the step's start."""
        outputs = self._policy.score(batch, self._algorithm.outputs())
        if "log_probs" in outputs and not batch.has("old_log_probs") and step_start is not None:
            batch.put("old_log_probs", outputs["log_probs"].detach())
        loss = self._loss(batch, learn.Outputs(outputs))
        terms = learn.reduce(loss, batch, self.denominators)
        (torch.stack(tuple(terms.values())).sum() * self._scale).backward()
        for name, value in terms.items():
            self._terms[name] = self._terms.get(name, 0.0) + value.detach()
        self._metrics.append(loss.metrics)
        if self._policy.routes is not None:
            self._metrics.append(self._policy.routes.metrics())
        if "log_probs" in outputs and step_start is not None and batch.has("rollout_log_probs"):
            apart = outputs["log_probs"].detach() - batch.column("rollout_log_probs")
            self._mismatch.add(apart, batch.loss_mask, _fresh(batch, step_start))

    def _loss(self, batch: learn.PackedBatch, outputs: learn.Outputs) -> Loss:
        if self._role == "actor":
            return self._algorithm.loss(batch, outputs)
        return self._algorithm.fit_loss(self._role, batch, outputs)

    def attend(self) -> None:
        """Take part in a micro-batch of other ranks."""
        self._policy.attend().backward()

    def share(self, speaks: bool = True) -> dict[str, Any]:
        """Return what this rank adds to the update, as plain data; nothing where another one computed the same rows and
        speaks for both."""
        if not speaks:
            return {"counts": learn.Denominators({}).share(), "terms": {}, "metrics": {}}
        parts = [
            {name: (float(total), float(count)) for name, (total, count) in part.items()} for part in self._metrics
        ]
        terms = {name: float(value) for name, value in self._terms.items()}
        metrics = learn.merge_metrics(*parts, self._mismatch.share())
        return {"counts": self.denominators.share(), "terms": terms, "metrics": metrics}

    def join(self, shares: Sequence[Mapping[str, Any]]) -> None:
        """The shares of all ranks, this one's too, take the place of its own."""
        self.denominators.join([share["counts"] for share in shares])
        for share in shares:
            for name, value in share["terms"].items():
                self._totals[name] = self._totals.get(name, 0.0) + value
        parts = [{name: (total, count) for name, (total, count) in share["metrics"].items()} for share in shares]
        self._merged = learn.merge_metrics(*parts)

    @property
    def finite(self) -> bool:
        """Whether the loss of all that was joined is a number, whatever its gradient is."""
        return all(math.isfinite(value) for value in self._totals.values())

    def metrics(self, factor: float) -> dict[str, Metric]:
        """(sum, count) of everything that was joined; terms are scaled like the gradient."""
        terms = {name: value * factor for name, value in self._totals.items()}
        group = "train" if self._role == "actor" else self._role
        losses = {f"{group}/loss/{name}": (value, 1.0) for name, value in terms.items()}
        return learn.merge_metrics({f"{group}/loss": (sum(terms.values()), 1.0)}, losses, self._merged)


def _fresh(batch: learn.PackedBatch, step_start: int) -> Tensor | None:
    """Tokens without lag: they tell of the engine rather than of learning."""
    if not batch.has("weight_versions"):
        return None
    return batch.loss_mask & (batch.column("weight_versions") == step_start)
