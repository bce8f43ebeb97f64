# SPDX-License-Identifier: Apache-2.0
"""SAPO, arXiv 2511.20347."""

from tests.golden.reference import plain
from tests.golden.reference.plain import exp, ratio


def advantages(groups, options):
    return plain.credited(groups, options, plain.normalised)


def surrogate(row, t, options):
    a = row["advantage"][t]
    tau = options["tau_positive"] if a > 0 else options["tau_negative"]
    gate = 1 / (1 + exp(-tau * (ratio(row, t, options) - 1)))
    return -gate * 4 / tau * a


loss = plain.loss_of(surrogate)
