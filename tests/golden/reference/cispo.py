# SPDX-License-Identifier: Apache-2.0
"""CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4 and 5."""

from tests.golden.reference import plain
from tests.golden.reference.plain import clip, constant, ratio


def advantages(groups, options):
    return plain.credited(groups, options, plain.normalised)


def surrogate(row, t, options):
    w = clip(ratio(row, t, options), 1 - options["clip_low"], 1 + options["clip_high"])
    return -constant(w) * row["advantage"][t] * row["log_probs"][t]


loss = plain.loss_of(surrogate)
