# SPDX-License-Identifier: Apache-2.0
"""The sums of an open update, the trainer's progress in steps and versions, and the loss scale of float16.

A trainer computes the outputs of a micro-batch, asks the update for their loss, and runs the backward pass; so the
gradient of an open update is in the parameters. At the end each rank returns its `share`, and every rank calls
`join` with the shares of all ranks, so that all ranks hold the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relax_core import learn
from relax_core.api import LOG_PROBS, Algorithm, Version
from relax_core.api.algorithm import ENTROPY
from relax_core.learn.counts import Metric

MEASURED_ENTROPY = "measured_entropy"
"""Name of the entropy of trained tokens that is only measured, without gradient."""


class Update:
    """The loss terms and metrics of one update, summed over micro-batches."""

    def __init__(
        self, algorithm: Algorithm, denominators: Mapping[str, float], role: str = "actor", scale: float = 1.0
    ) -> None:
        """Start an update. Losses are multiplied by `scale`; recorded loss terms and metrics are not."""
        self._algorithm, self._role, self._scale = algorithm, role, scale
        self.denominators = learn.Denominators(denominators)
        self._terms: dict[str, Tensor] = {}
        self._mismatch = learn.Mismatch()
        self._metrics: list[Mapping[str, tuple[Tensor, Tensor]]] = []
        self._totals: dict[str, float] = {}
        self._merged: dict[str, Metric] = {}

    @property
    def measures_entropy(self) -> bool:
        """True if the trainer shall give the output `MEASURED_ENTROPY` too, which the algorithm does not ask for."""
        asked = self._algorithm.outputs()
        return self._role == "actor" and LOG_PROBS in asked and ENTROPY not in asked

    def loss(self, batch: learn.PackedBatch, outputs: Mapping[str, Tensor], step_start: int | None) -> Tensor:
        """Return the loss of one micro-batch, a scalar from which the backward pass starts; record its terms.

        `outputs`: the algorithm's outputs by name. `step_start`: step number of the policy's version; None after an
        update of this training step was applied.
        """
        outputs = dict(outputs)
        if (entropy := outputs.pop(MEASURED_ENTROPY, None)) is not None:
            self.measured({"policy/entropy": (entropy.sum(), batch.loss_mask.sum())})
        if "log_probs" in outputs and not batch.has("old_log_probs") and step_start is not None:
            batch.put("old_log_probs", outputs["log_probs"].detach())
        given = learn.Outputs(outputs)
        actor = self._role == "actor"
        with learn.charged_to(self._algorithm):
            loss = self._algorithm.loss(batch, given) if actor else self._algorithm.fit_loss(self._role, batch, given)
            terms = learn.reduce(loss, batch, self.denominators)
        for name, value in terms.items():
            self._terms[name] = self._terms.get(name, 0.0) + value.detach()
        self.measured(loss.metrics)
        if "log_probs" in outputs and step_start is not None and batch.has("rollout_log_probs"):
            apart = outputs["log_probs"].detach() - batch.column("rollout_log_probs")
            fresh = None  # tokens without lag, whose difference comes from the engine and not from learning
            if batch.has("weight_versions"):
                fresh = batch.loss_mask & (batch.column("weight_versions") == step_start)
            self._mismatch.add(apart, batch.loss_mask, fresh)
        return torch.stack(tuple(terms.values())).sum() * self._scale

    def measured(self, metrics: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Record metrics of a micro-batch as (sum, count)."""
        self._metrics.append(metrics)

    def share(self, speaks: bool = True) -> dict[str, object]:
        """Return this rank's counts, loss terms and metrics as plain data.

        The data are empty unless `speaks`: the ranks of a tensor-parallel group compute the same rows, so only the
        group's first rank speaks.
        """
        if not speaks:
            return {"counts": learn.Denominators({}).share(), "terms": {}, "metrics": {}}
        parts = [
            {name: (float(total), float(count)) for name, (total, count) in part.items()} for part in self._metrics
        ]
        terms = {name: float(value) for name, value in self._terms.items()}
        metrics = learn.merge_metrics(*parts, self._mismatch.share())
        return {"counts": self.denominators.share(), "terms": terms, "metrics": metrics}

    def join(self, shares: Sequence[Mapping[str, Any]]) -> None:
        """Replace this rank's sums by the sums of all ranks' shares, this rank's included."""
        self.denominators.join([share["counts"] for share in shares])
        for share in shares:
            for name, value in share["terms"].items():
                self._totals[name] = self._totals.get(name, 0.0) + value
        parts = [{name: (total, count) for name, (total, count) in share["metrics"].items()} for share in shares]
        self._merged = learn.merge_metrics(*parts)

    @property
    def finite(self) -> bool:
        """True if the joined loss terms are finite; says nothing about the gradient."""
        return all(math.isfinite(value) for value in self._totals.values())

    def metrics(self, factor: float) -> dict[str, Metric]:
        """Return (sum, count) of each loss term and metric over all ranks; `factor` scales terms and gradient alike."""
        terms = {name: value * factor for name, value in self._totals.items()}
        group = "train" if self._role == "actor" else self._role
        losses = {f"{group}/loss/{name}": (value, 1.0) for name, value in terms.items()}
        return learn.merge_metrics({f"{group}/loss": (sum(terms.values()), 1.0)}, losses, self._merged)


@dataclass(slots=True)
class Progress:
    """The step and version that the trainer is at: a step begun at version s ends at version s + 1."""

    step: int = 0
    """Version step at the start of the current training step."""
    incarnation: int = 0
    begun: bool = False
    updated: bool = False
    """True once an update of the current step was applied."""

    def begin(self, version: Version) -> None:
        """Start the step at `version`. Raises ValueError if the trainer's weights are not that version."""
        self.check(version, "begin_step")
        self.step, self.incarnation = version.step, version.incarnation
        self.begun, self.updated = True, False

    def check(self, version: Version, call: str) -> None:
        """Raise ValueError if the trainer's weights are not that version.

        After an update the weights are the next version. A step may also end without an update, so unchanged weights
        may be either version.
        """
        possible = {self.step + 1} if self.updated else {self.step, self.step + 1} if self.begun else {self.step}
        if version.step not in possible or version.incarnation < self.incarnation:
            mine = " or ".join(f"{self.incarnation}.{step}" for step in sorted(possible))
            raise ValueError(
                f"{call}: got version {version}, but this trainer holds version {mine}; load its checkpoint first"
            )

    def state(self) -> dict[str, int | bool]:
        return {"step": self.step, "begun": self.begun, "updated": self.updated, "incarnation": self.incarnation}


MIN_SCALE, MAX_SCALE = 1.0, 2.0**24


@dataclass(slots=True)
class LossScale:
    """The factor on losses: in float16 a dynamic one that keeps small gradients from rounding to 0, else constant 1.

    Losses are multiplied by the scale before the backward pass, and gradients divided by it afterwards. An overflow
    halves the scale, and the rank group computes the update again. After `window` updates without an overflow the scale
    is doubled. All ranks hold the same scale, since they see the same gradient norms.
    """

    value: float = MIN_SCALE
    window: int = 0
    """Updates without an overflow until the scale is doubled; 0: the scale is constant."""
    held: int = 0
    """Updates since the scale last changed."""

    @classmethod
    def of(cls, dtype: torch.dtype, first: float, window: int) -> LossScale:
        return cls(first, window) if dtype == torch.float16 else cls()

    @property
    def dynamic(self) -> bool:
        return self.window > 0

    def overflowed(self) -> bool:
        """Halve the scale after an overflow; return False if it is constant or cannot go lower."""
        if not self.dynamic or self.value <= MIN_SCALE:
            return False
        self.value, self.held = max(MIN_SCALE, self.value / 2), 0
        return True

    def applied(self) -> None:
        """Count an update without an overflow; double the scale after `window` such updates."""
        self.held += 1
        if self.dynamic and self.held >= self.window:
            self.value, self.held = min(MAX_SCALE, self.value * 2), 0

    def state(self) -> dict[str, object]:
        return {"value": self.value, "held": self.held}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Restore the scale of a checkpoint, unless the checkpoint or this run has a constant scale."""
        if self.dynamic and state is not None and state["value"] > MIN_SCALE:
            self.value, self.held = float(state["value"]), int(state["held"])
