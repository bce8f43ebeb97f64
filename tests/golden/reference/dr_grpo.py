# SPDX-License-Identifier: Apache-2.0
"""Dr.GRPO, arXiv 2503.20783: no 1/|o|, no 1/std."""

from tests.golden.reference import plain
from tests.golden.reference.plain import clip, dual_clipped, equal, mean, ratio, smaller


def advantages(groups, options):
    return plain.credited(groups, options, centred)


def centred(rewards, members):
    return [0.0 if equal(rewards) else r - mean(rewards) for r in rewards]


def surrogate(row, t, options):
    r, a = ratio(row, t, options), row["advantage"][t]
    return dual_clipped(-smaller(r * a, clip(r, 1 - options["clip_low"], 1 + options["clip_high"]) * a), a, options)


def loss(rows, options):
    return plain.loss(rows, options, surrogate)
