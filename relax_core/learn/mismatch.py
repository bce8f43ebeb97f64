# SPDX-License-Identifier: Apache-2.0
"""How far engine and trainer are apart on the same tokens: one training step's meter, in sums that add up over anything.

Only tokens without lag (`lag0`) tell of the engine: between others lies learning. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relax_core.learn.histogram import BUCKETS, LEAST, PER_OCTAVE, bucket_counts
from relax_core.learn.metrics import Metric, merge_metrics

DIFFERENCE, KL, RATIO = "train/rollout_log_prob_diff", "train/rollout_kl", "train/rollout_ratio"
MOST = 20.0
"""Of a log ratio, before its exponential."""


class Mismatch:
    """Adds up over micro-batches."""

    def __init__(self) -> None:
        self._parts: list[dict[str, tuple[Tensor, Tensor]]] = []
        self._counts: dict[str, Tensor] = {}

    def add(self, apart: Tensor, mask: Tensor, fresh: Tensor | None = None) -> None:
        """`apart` [tokens]: trainer - engine, log-probs; `mask` of those that count, `fresh` of those of them without lag."""
        self._add(apart, mask, "")
        if fresh is not None:
            self._add(apart, fresh, "_lag0")

    def _add(self, apart: Tensor, mask: Tensor, of: str) -> None:
        size, count = torch.where(mask, apart.abs(), 0.0).double(), mask.sum()
        log = torch.where(mask, apart, 0.0).double().clamp(-MOST, MOST)
        some = count.clamp(max=1)
        self._parts.append(
            {
                f"{DIFFERENCE}{of}": (size.sum(), count),
                f"{DIFFERENCE}{of}_max": (size.max(), some),
                f"{KL}{of}": ((log.expm1() - log).sum(), count),
                f"{RATIO}{of}_max": (log.masked_fill(~mask, -MOST).max().exp(), some),
                f"{RATIO}{of}_min": (log.masked_fill(~mask, MOST).min().exp(), some),
            }
        )
        name = f"{DIFFERENCE}{of}_p99"
        counts = _counts(size, mask)
        self._counts[name] = self._counts[name] + counts if name in self._counts else counts

    def share(self) -> dict[str, Metric]:
        """All of it as plain metrics."""
        parts = [{name: (float(total), float(count)) for name, (total, count) in part.items()} for part in self._parts]
        counted = [bucket_counts(name, counts.tolist()) for name, counts in self._counts.items()]
        return merge_metrics(*parts, *counted)


def _counts(size: Tensor, mask: Tensor) -> Tensor:
    """Of the masked sizes by bucket [BUCKETS]; what is not a number is in the last. By sorting: that is the same every time on
    a GPU too."""
    ranked = torch.where(mask, size, -1.0).sort().values
    edges = torch.arange(BUCKETS - 1, device=size.device, dtype=size.dtype) / PER_OCTAVE + LEAST
    below = torch.searchsorted(ranked, torch.cat([edges.new_zeros(1), edges.exp2()]))
    return torch.cat([below, below.new_tensor([len(ranked)])]).diff()
