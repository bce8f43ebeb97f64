# SPDX-License-Identifier: Apache-2.0
"""Log-probs, entropies and most likely tokens from logits whose vocabulary is split over the tensor-parallel ranks.

Every rank holds the logits of a range of token ids and computes the same scores. The backward pass gives each rank the
gradient of its own range. Only trained tokens go through the head, in slices under a bound of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from relax_core import learn

NEVER = -1e9
"""Logit of ids that are never sampled, and of the padding of the vocabulary; finite, so that no gradient is NaN."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The range of token ids of one tensor-parallel rank."""

    size: int
    """Number of token ids of the model."""
    first: int
    """First id of the range."""
    group: dist.ProcessGroup

    def score(
        self, features: Tensor, head: Callable[[Tensor], Tensor], ids: Tensor, wanted: learn.Wanted, *,
        temperature: float, max_logits: int,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Return `log_probs` of `ids` and the wanted outputs, as `learn.score_distribution` does.

        `features` [tokens, width] go through `head` to this rank's logits [tokens, range].
        """
        width = max(1, max_logits * self.group.size() // self.size)
        if len(ids) <= width:
            return self._slice(features, head, ids, wanted, temperature)
        parts = []
        for start in range(0, len(ids), width):
            own = slice(start, start + width)
            some = replace(wanted, at={name: at[own] for name, at in wanted.at.items()})
            parts.append(checkpoint(self._slice, features[own], head, ids[own], some, temperature, use_reentrant=False))
        return {name: torch.cat([one[name] for one in parts]) for name in parts[0]}

    def _slice(
        self, features: Tensor, head: Callable[[Tensor], Tensor], ids: Tensor, wanted: learn.Wanted, temperature: float
    ) -> dict[str, Tensor]:
        logits = head(features).float()
        if temperature != 1.0:
            logits = logits / temperature
        highest = logits.detach().amax(-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self.group)
        logits = logits - highest[:, None]
        weights = logits.exp()
        total = self._sum(weights.sum(-1))
        scored = {"log_probs": self._at(logits, ids[:, None]).squeeze(-1) - total.log()}
        if wanted.entropy:
            scored["entropy"] = total.log() - self._sum((weights * logits).sum(-1)) / total
        if wanted.measured_entropy:
            with torch.no_grad():
                scored["measured_entropy"] = total.log() - self._sum((weights * logits).sum(-1)) / total
        if wanted.top_k:
            scored["top_k_log_probs"], scored["top_k_ids"] = self._top(logits - total.log()[:, None], wanted.top_k)
        for name, at in wanted.at.items():
            scored[f"log_probs_at:{name}"] = self._at(logits, at) - total.log()[:, None]
        return scored

    def _sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks; the backward pass hands the gradient to every rank unchanged."""
        return reduce_from_tensor_model_parallel_region(values, group=self.group)

    def _at(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the logits of ids [tokens, k] from the ranks that hold these ids."""
        own = ids - self.first
        held = (own >= 0) & (own < logits.shape[-1])
        return self._sum(torch.where(held, logits.gather(-1, own.clamp(0, logits.shape[-1] - 1)), 0.0))

    def _top(self, log_probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, ids = log_probs.topk(min(k, log_probs.shape[-1]), dim=-1)
        values = gather_from_tensor_model_parallel_region(values, group=self.group)
        everyone = [torch.empty_like(ids) for _ in range(self.group.size())]
        dist.all_gather(everyone, ids + self.first, group=self.group)
        best, places = values.topk(k, dim=-1)
        return best, torch.cat(everyone, dim=-1).gather(-1, places)
