# SPDX-License-Identifier: Apache-2.0
"""Direct Preference Optimization (Rafailov et al., arXiv 2305.18290) and related losses on preference pairs.

    h = log pi(y_c | x) / pi_ref(y_c | x) - log pi(y_r | x) / pi_ref(y_r | x)
    sigmoid  L = -(1 - e) log s(beta h) - e log s(-beta h)                 (eq. 7; e: conservative DPO, section 3 of the note)
    robust   L = (-(1 - e) log s(beta h) + e log s(-beta h)) / (1 - 2 e)   (arXiv 2403.00409, eq. 12)
    hinge    L = max(0, 1 - beta h)                                        (SLiC, arXiv 2305.10425)
    ipo      L = (h' - 1 / (2 beta))^2                                     (arXiv 2310.12036, eq. 17)

y_c is the chosen completion, y_r the rejected completion, s the sigmoid, e `label_smoothing`. h' is h with log-ratios
averaged over a completion's tokens instead of summed, as IPO's authors do. The implicit reward of a completion is beta
times its log-ratio.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from relax_core import learn
from relax_core.api import REF_LOG_PROBS, Algorithm, Column, Loss, LossBatch, Options, PolicyOutputs, Source, Term

SMOOTHED = ("sigmoid", "robust")


class DPOOptions(Options):
    """Options of DPO; the defaults are the paper's."""

    beta: float = Field(0.1, gt=0.0)
    """Strength of the penalty for leaving the reference model; for `ipo`, the parameter tau of the IPO paper."""
    loss_type: Literal["sigmoid", "robust", "hinge", "ipo"] = "sigmoid"
    """Loss on a pair. `sigmoid`: DPO's; `robust`: DPO's, corrected for wrong labels; `hinge`: SLiC's; `ipo`: IPO's."""
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5)
    """Assumed share of pairs with the wrong completion as chosen; used only by `sigmoid` and `robust`."""

    @model_validator(mode="after")
    def _smoothing_has_an_effect(self) -> DPOOptions:
        if self.label_smoothing and self.loss_type not in SMOOTHED:
            raise ValueError(
                f"label_smoothing has no effect on {self.loss_type}: leave it out, or choose sigmoid or robust"
            )
        return self


class DPO(Algorithm[DPOOptions]):
    """Learns from preference pairs without a reward model."""

    source = Source.PAIRS
    paper = "arXiv 2305.18290"
    denominators = frozenset({"pairs"})

    def columns(self) -> frozenset[Column]:
        return frozenset({REF_LOG_PROBS})

    def loss(self, batch: LossBatch, policy: PolicyOutputs) -> Loss:
        options, apart = self.options, policy.log_probs - batch.column("ref_log_probs")
        over_row = batch.sequence_mean if options.loss_type == "ipo" else batch.sequence_sum
        chosen, rejected = batch.pair(over_row(apart))
        if options.loss_type == "ipo":
            values = (chosen - rejected - 1 / (2 * options.beta)) ** 2
        elif options.loss_type == "hinge":
            values = (1 - options.beta * (chosen - rejected)).clamp(min=0)
        else:
            robust = options.loss_type == "robust"
            values = learn.preference(options.beta * (chosen - rejected), options.label_smoothing, robust=robust)
        rewards = options.beta * batch.sequence_sum(apart.detach())
        return Loss(
            {"preference": Term(values, denominator="pairs", per="pair")}, learn.pair_metrics(*batch.pair(rewards))
        )
