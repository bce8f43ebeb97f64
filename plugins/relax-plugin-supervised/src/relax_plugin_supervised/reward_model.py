# SPDX-License-Identifier: Apache-2.0
"""A reward model by the Bradley-Terry likelihood of pairs (Ouyang et al., InstructGPT, arXiv 2203.02155, eq. 1).

    L = - log s(r(x, y_c) - r(x, y_r) - m) + c (r(x, y_c) + r(x, y_r))^2

r is a scalar head on the last token. m is a margin by which the chosen one has to win (Llama 2, arXiv 2307.09288, eq. 2), c
keeps rewards around 0 (arXiv 2312.09244, section 2). What is exported loads as `AutoModelForSequenceClassification`.
"""

from __future__ import annotations

from pydantic import Field

from relax_core import learn
from relax_core.api import MARGINS, Algorithm, Column, Loss, LossBatch, Options, Output, PolicyOutputs, Source, Term


class RewardModelOptions(Options):
    """Without margin and without centring, as in the paper."""

    margin: float = Field(0.0, ge=0.0)
    """Difference that every chosen completion has to exceed."""
    margins: bool = False
    """Each pair has its own in the column `margin` of the data, added to `margin`."""
    center_coef: float = Field(0.0, ge=0.0)
    """Weight of the squared sum of a pair's rewards; 0.01 keeps them around 0."""


class RewardModel(Algorithm[RewardModelOptions]):
    """Learns to score: the chosen completion of a pair above the rejected one."""

    source = Source.PAIRS
    paper = "arXiv 2203.02155"
    denominators = frozenset({"pairs"})

    def columns(self) -> frozenset[Column]:
        return frozenset({MARGINS} if self.options.margins else set())

    def outputs(self) -> frozenset[Output]:
        return frozenset({Output("rewards")})

    def loss(self, batch: LossBatch, policy: PolicyOutputs) -> Loss:
        chosen, rejected = batch.pair(policy.output("rewards"))
        margin = self.options.margin + (batch.pair(batch.column("margins"))[0] if self.options.margins else 0.0)
        terms = {"preference": Term(learn.preference(chosen - rejected - margin), denominator="pairs", per="pair")}
        if self.options.center_coef:
            centred = Term((chosen + rejected) ** 2, self.options.center_coef, denominator="pairs", per="pair")
            terms["centre"] = centred
        return Loss(terms, learn.pair_metrics(chosen.detach(), rejected.detach()))
