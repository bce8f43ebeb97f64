# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: the negative log-likelihood of given tokens.

    L = - sum_i sum_t m_it log p(y_it | x_i, y_i<t) / sum_i sum_t m_it          (`token`)
    L = - 1/N sum_i 1/|m_i| sum_t m_it log p(y_it | x_i, y_i<t)                 (`sequence`)

The option `data.train_on` selects the tokens with m = 1. Sums run over the whole step, across micro-batches and ranks.
"""

from __future__ import annotations

from typing import Literal

from relax_core import learn
from relax_core.api import Algorithm, Loss, LossBatch, Options, PolicyOutputs, Source
from relax_core.learn.counts import DENOMINATOR


class SFTOptions(Options):
    """Options of supervised fine-tuning."""

    aggregation: Literal["token", "sequence"] = "token"
    """Aggregation of the tokens' losses. `token`: mean over all trained tokens of the step, so long answers weigh more;
    `sequence`: mean over each row's tokens, then over rows."""


class SFT(Algorithm[SFTOptions]):
    """Learns the answers of a dataset by maximum likelihood."""

    source = Source.DATASET

    def __init__(self, options: SFTOptions | None = None) -> None:
        super().__init__(options)
        self.denominators = frozenset({DENOMINATOR[self.options.aggregation]})

    def loss(self, batch: LossBatch, policy: PolicyOutputs) -> Loss:
        return Loss({"nll": learn.aggregate(batch, -policy.log_probs, self.options.aggregation)})
