# SPDX-License-Identifier: Apache-2.0
"""One update between begin and finish, the steps that were completed, and the scale of losses in fp16.

An update is what its micro-batches have added up so far; the gradient is in the parameters.

At the end each rank gives its `share` and all `join` the shares of all, so that every rank knows the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relax_core import learn
from relax_core.api import Algorithm, Version
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
        """Run one micro-batch forward and backward; `step_start` where the policy is still that of the step's start."""
        outputs = self._policy.score(batch, self._algorithm.outputs())
        if "log_probs" in outputs and not batch.has("old_log_probs") and step_start is not None:
            batch.put("old_log_probs", outputs["log_probs"].detach())
        given = learn.Outputs(outputs)
        actor = self._role == "actor"
        loss = self._algorithm.loss(batch, given) if actor else self._algorithm.fit_loss(self._role, batch, given)
        terms = learn.reduce(loss, batch, self.denominators)
        (torch.stack(tuple(terms.values())).sum() * self._scale).backward()
        for name, value in terms.items():
            self._terms[name] = self._terms.get(name, 0.0) + value.detach()
        self._metrics.append(loss.metrics)
        if self._policy.routes is not None:
            self._metrics.append(self._policy.routes.metrics())
        if "log_probs" in outputs and step_start is not None and batch.has("rollout_log_probs"):
            apart = outputs["log_probs"].detach() - batch.column("rollout_log_probs")
            fresh = None  # tokens without lag tell of the engine rather than of learning
            if batch.has("weight_versions"):
                fresh = batch.loss_mask & (batch.column("weight_versions") == step_start)
            self._mismatch.add(apart, batch.loss_mask, fresh)

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
        """Put the shares of all ranks, this one's too, in place of its own."""
        self.denominators.join([share["counts"] for share in shares])
        for share in shares:
            for name, value in share["terms"].items():
                self._totals[name] = self._totals.get(name, 0.0) + value
        parts = [{name: (total, count) for name, (total, count) in share["metrics"].items()} for share in shares]
        self._merged = learn.merge_metrics(*parts)

    @property
    def finite(self) -> bool:
        """Tell whether the loss of all that was joined is a number, whatever its gradient is."""
        return all(math.isfinite(value) for value in self._totals.values())

    def metrics(self, factor: float) -> dict[str, Metric]:
        """Return (sum, count) of everything that was joined; terms are scaled like the gradient."""
        terms = {name: value * factor for name, value in self._totals.items()}
        group = "train" if self._role == "actor" else self._role
        losses = {f"{group}/loss/{name}": (value, 1.0) for name, value in terms.items()}
        return learn.merge_metrics({f"{group}/loss": (sum(terms.values()), 1.0)}, losses, self._merged)


@dataclass(slots=True)
class Progress:
    """A step begun at version s completes version s + 1, at the latest when the next one begins."""

    step: int = 0
    """The version at the start of the present step."""
    incarnation: int = 0
    begun: bool = False
    updated: bool = False
    """An update of the present step was applied."""

    def begin(self, version: Version) -> None:
        """Start the step at `version`. Raises ValueError where these weights are not that version."""
        self.check(version, "begin_step")
        self.step, self.incarnation = version.step, version.incarnation
        self.begun, self.updated = True, False

    def check(self, version: Version, call: str) -> None:
        """Raise ValueError where these weights are not that version.

        Weights that an update changed are the next version; unchanged ones may close a step without any.
        """
        possible = {self.step + 1} if self.updated else {self.step, self.step + 1} if self.begun else {self.step}
        if version.step not in possible or version.incarnation < self.incarnation:
            mine = " or ".join(f"{self.incarnation}.{step}" for step in sorted(possible))
            raise ValueError(
                f"{call}: got version {version}, but this trainer holds version {mine}; load its checkpoint first"
            )

    def state(self) -> dict[str, int | bool]:
        return {"step": self.step, "begun": self.begun, "updated": self.updated, "incarnation": self.incarnation}


LEAST, MOST = 1.0, 2.0**24


@dataclass(slots=True)
class LossScale:
    """The dynamic scale of losses in fp16, so that small gradients are not rounded to 0. Other formats have 1 for ever.

    Losses are multiplied by it before the backward pass and gradients divided after it. An overflow halves it, and the
    shell computes the update again; one that held for `window` updates is doubled. All ranks hold the same scale, since
    they see the same norms.
    """

    value: float = LEAST
    window: int = 0
    """Updates without overflow until it is doubled; 0: it stays."""
    held: int = 0
    """Updates since it last changed."""

    @classmethod
    def of(cls, dtype: torch.dtype, first: float, window: int) -> LossScale:
        return cls(first, window) if dtype == torch.float16 else cls()

    @property
    def dynamic(self) -> bool:
        return self.window > 0

    def overflowed(self) -> bool:
        """Halve the scale after an overflow; False where a lower one is not worth another try."""
        if not self.dynamic or self.value <= LEAST:
            return False
        self.value, self.held = max(LEAST, self.value / 2), 0
        return True

    def applied(self) -> None:
        """Count an update that went well; double the scale after `window` of them."""
        self.held += 1
        if self.dynamic and self.held >= self.window:
            self.value, self.held = min(MOST, self.value * 2), 0

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "held": self.held}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Restore the scale of a checkpoint; one of another format tells nothing about this one."""
        if self.dynamic and state is not None and state["value"] > LEAST:
            self.value, self.held = float(state["value"]), int(state["held"])
