# SPDX-License-Identifier: Apache-2.0
"""DPPO, arXiv 2602.04879: a mask by the divergence of two-point distributions."""

import math

from tests.golden.reference import plain
from tests.golden.reference.plain import capped, constant, exp, ratio


def advantages(groups, options):
    return plain.credited(groups, options, plain.normalised)


def surrogate(row, t, options):
    r, a = ratio(row, t, options), row["advantage"][t]
    away = (a > 0 and constant(r) > 1) or (a < 0 and constant(r) < 1)
    return 0.0 if away and moved(row, t, options) > options["delta"] else -capped(r, options["ratio_cap"]) * a


def moved(row, t, options):
    anchor = row["rollout"] if options["correction"] == "behaviour" else row["old"]
    p, q = exp(constant(row["log_probs"][t])).real, exp(anchor[t]).real
    if options["divergence"] == "tv":
        return abs(p - q)
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


loss = plain.loss_of(surrogate)
