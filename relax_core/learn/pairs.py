# SPDX-License-Identifier: Apache-2.0
"""What is learnt from pairs: the logistic likelihood that the chosen one wins, and how pairs are told of."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def preference(margin: Tensor, smoothing: float = 0.0, *, robust: bool = False) -> Tensor:
    """[pairs] -> [pairs]: minus the log-likelihood of the order, given by how far the chosen one is ahead.

    `smoothing`: the share of pairs whose order is wrong. `robust` takes it out of the loss, so that its mean over wrong
    labels is that over right ones; otherwise the loss is what such labels say.
    """
    right, wrong = -logsigmoid(margin), -logsigmoid(-margin)
    if robust:
        return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
    return (1 - smoothing) * right + smoothing * wrong


def pair_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """(sum, count) over pairs of their rewards [pairs]: mean of each, difference, and how often the chosen one is ahead."""
    count = chosen.new_tensor(float(len(chosen)))
    return {
        "pairs/chosen": (chosen.sum(), count),
        "pairs/rejected": (rejected.sum(), count),
        "pairs/margin": ((chosen - rejected).sum(), count),
        "pairs/accuracy": ((chosen > rejected).to(chosen.dtype).sum(), count),
    }
