# SPDX-License-Identifier: Apache-2.0
"""A reward model by the Bradley-Terry likelihood of pairs (Ouyang et al., InstructGPT, arXiv 2203.02155, eq. 1).

    L = - log s(r(x, y_c) - r(x, y_r) - m) + c (r(x, y_c) + r(x, y_r))^2

s is the sigmoid, y_c the chosen completion, y_r the rejected completion, r the scalar head's value at the last token. m
is a margin by which r(y_c) must exceed r(y_r) (Llama 2, arXiv 2307.09288, eq. 2). The term with c keeps rewards near 0
(arXiv 2312.09244, section 2). transformers' `AutoModelForSequenceClassification` loads the exported model.
"""

from __future__ import annotations

from pydantic import Field

from relax_core import learn
from relax_core.api import MARGINS, Algorithm, Column, Loss, LossBatch, Options, Output, PolicyOutputs, Source, Term


class RewardModelOptions(Options):
    """Options of the reward model; the defaults use no margin and no centring, as in the paper."""

    margin: float = Field(0.0, ge=0.0)
    """Margin m by which a chosen completion's reward must exceed the rejected completion's reward."""
    margins: bool = False
    """Add each pair's own margin, from the data's column `margin`, to the option `margin`."""
    center_coef: float = Field(0.0, ge=0.0)
    """Weight c of the squared sum of a pair's rewards; 0.01 keeps rewards near 0."""


class RewardModel(Algorithm[RewardModelOptions]):
    """Learns to score the chosen completion of a pair above the rejected completion."""

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
