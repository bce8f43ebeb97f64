# SPDX-License-Identifier: Apache-2.0
"""Corrections for samples of a different policy (an older version, or an engine that rounds differently).

Three policies matter: `behaviour` sampled (rollout_log_probs), `proximal` starts the step (old_log_probs), and `policy`
is trained. The decoupled objective (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298, section 5) is

    E_behaviour[ w * min(r A, clip(r) A) ],   w = proximal / behaviour,   r = policy / proximal

and the corrections here are forms of w: [tokens], without gradient. No correction changes a denominator: a token that
is left out still counts in the mean, as in the papers. `Mismatch` measures how far engine and trainer differ.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from relax_core.api.algorithm import LossBatch
from relax_core.learn.counts import BUCKETS, MAX_LOG_RATIO, MIN_OCTAVE, PER_OCTAVE, Metric, merge_metrics

Level = Literal["token", "sequence", "geometric"]


def log_ratio(batch: LossBatch, log_probs: Tensor, old_log_probs: Tensor, level: Level = "token") -> Tensor:
    """Return `log(p / p_old)`, [tokens]: of each token, or its row's sum, or its row's mean (GSPO).

    Values are clamped to +-`MAX_LOG_RATIO`, so that their exponential is finite.
    """
    moved = log_probs - old_log_probs
    if level != "token":
        moved = batch.broadcast(batch.sequence_sum(moved) if level == "sequence" else batch.sequence_mean(moved))
    return moved.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_ratio(
    batch: LossBatch, old_log_probs: Tensor, rollout_log_probs: Tensor, level: Level = "token"
) -> Tensor:
    """Return `proximal / behaviour`, [tokens]: of each token, or its row's product, or its row's geometric mean."""
    return log_ratio(batch, old_log_probs.detach(), rollout_log_probs.detach(), level).exp()


def truncate(ratio: Tensor, cap: float) -> Tensor:
    """Return `min(w, C)`, [tokens]: truncated importance sampling.

    Sources: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; Espeholt et al.,
    arXiv 1802.01561, section 4.1, for the truncation itself.
    """
    return ratio.clamp(max=cap)


def mask_outside(ratio: Tensor, floor: float, cap: float) -> Tensor:
    """Return `w` if `floor <= w <= cap`, else 0, [tokens]: masked importance sampling.

    Per token with 0.5 and 5, this is IcePop (Ring-1T, arXiv 2510.18855). Per row or with the geometric mean, this is
    the MIS of Liu, Li et al. 2025, "When speed kills stability".
    """
    return torch.where(within(ratio, floor, cap), ratio, 0.0)


def within(ratio: Tensor, floor: float, cap: float) -> Tensor:
    """Return bool [tokens]: True if the ratio is within the bounds, so that the token is kept (rejection sampling)."""
    return (ratio >= floor) & (ratio <= cap)


def importance_weight(
    batch: LossBatch, old_log_probs: Tensor, rollout_log_probs: Tensor, *,
    level: Level = "token", truncate_at: float = 2.0, mask_below: float = 0.0, masks: bool = False,
) -> Tensor:  # fmt: skip
    """Return token weights [tokens]: `min(w, truncate_at)`; with `masks`, w, and 0 outside `mask_below .. truncate_at`.

    Without lag, and with an engine that computes as the trainer does, the weight is 1 apart from rounding.
    """
    ratio = importance_ratio(batch, old_log_probs, rollout_log_probs, level)
    return mask_outside(ratio, mask_below, truncate_at) if masks else truncate(ratio, truncate_at)


def off_policy_sequence_mask(
    batch: LossBatch, log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, delta: float
) -> Tensor:
    """Return bool [tokens], False for rows to leave out: `A < 0` and `mean_t log(behaviour / policy) > delta`.

    Source: DeepSeek-V3.2, arXiv 2512.02556, section 3.1, off-policy sequence masking.
    """
    apart = batch.broadcast(batch.sequence_mean(rollout_log_probs - log_probs.detach()))
    return (advantages >= 0) | (apart <= delta)


def second_moment_mask(log_ratio: Tensor, chosen: Tensor, bound: float) -> Tensor:
    """Return bool [tokens], False for the `chosen` tokens with the largest (log r)^2 (M2PO, arXiv 2510.01161).

    The fewest tokens are left out for which the mean (log r)^2 of the remaining `chosen` tokens is at most `bound`.
    Equal values are left out together, so that the order of tokens has no effect.
    """
    squares = log_ratio.square()
    ordered = squares[chosen].sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    fitting = int((means <= bound).sum())
    if fitting == len(ordered):
        return torch.ones_like(chosen)
    return ~chosen | (squares < ordered[fitting])


DIFFERENCE, KL, RATIO = "train/rollout_log_prob_diff", "train/rollout_kl", "train/rollout_ratio"


class Mismatch:
    """The difference of engine and trainer log-probs, as sums that add up over micro-batches, ranks and updates.

    Tokens without lag (`lag0`) were sampled by the very version that starts the step, so they show the engine's error
    alone. `add` does not wait for the device.
    """

    def __init__(self) -> None:
        self._parts: list[dict[str, tuple[Tensor, Tensor]]] = []
        self._counts: dict[str, Tensor] = {}

    def add(self, apart: Tensor, mask: Tensor, fresh: Tensor | None = None) -> None:
        """Add a micro-batch; `apart` [tokens] is log-probs of the trainer minus those of the engine.

        `mask` marks the tokens that count, and `fresh` the counted tokens without lag.
        """
        self._add(apart, mask, "")
        if fresh is not None:
            self._add(apart, fresh, "_lag0")

    def _add(self, apart: Tensor, mask: Tensor, of: str) -> None:
        size, count = torch.where(mask, apart.abs(), 0.0).double(), mask.sum()
        log = torch.where(mask, apart, 0.0).double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        some = count.clamp(max=1)
        self._parts.append(
            {
                f"{DIFFERENCE}{of}": (size.sum(), count),
                f"{DIFFERENCE}{of}_max": (size.max(), some),
                f"{KL}{of}": ((log.expm1() - log).sum(), count),
                f"{RATIO}{of}_max": (log.masked_fill(~mask, -MAX_LOG_RATIO).max().exp(), some),
                f"{RATIO}{of}_min": (log.masked_fill(~mask, MAX_LOG_RATIO).min().exp(), some),
            }
        )
        # Count the masked sizes by bucket; NaN falls into the last. Sorting is deterministic, also on a GPU.
        ranked = torch.where(mask, size, -1.0).sort().values
        edges = torch.arange(BUCKETS - 1, device=size.device, dtype=size.dtype) / PER_OCTAVE + MIN_OCTAVE
        below = torch.searchsorted(ranked, torch.cat([edges.new_zeros(1), edges.exp2()]))
        counts = torch.cat([below, below.new_tensor([len(ranked)])]).diff()
        name = f"{DIFFERENCE}{of}_p99"
        self._counts[name] = self._counts[name] + counts if name in self._counts else counts

    def share(self) -> dict[str, Metric]:
        """Return the sums of all added micro-batches as metrics. Sizes are counted by bucket, to compute a quantile."""
        parts = [{name: (float(total), float(count)) for name, (total, count) in part.items()} for part in self._parts]
        buckets = {
            f"{name}@{bucket}": (float(count), float(count))
            for name, counts in self._counts.items()
            for bucket, count in enumerate(counts.tolist())
            if count
        }
        return merge_metrics(*parts, buckets)
