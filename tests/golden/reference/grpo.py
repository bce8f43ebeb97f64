# SPDX-License-Identifier: Apache-2.0
"""GRPO, arXiv 2402.03300, section 4.1."""

from tests.golden.reference import plain
from tests.golden.reference.plain import clip, dual_clipped, equal, mean, ratio, smaller, std


def advantages(groups, options):
    return plain.credited(groups, options, normalised if options["normalise"] == "std" else centred)


def normalised(rewards, members):
    """(R - mean) / std; nothing where all are equal."""
    if equal(rewards):
        return [0.0] * len(rewards)
    return [(r - mean(rewards)) / (std(rewards) + 1e-6) for r in rewards]


def centred(rewards, members):
    return [0.0 if equal(rewards) else r - mean(rewards) for r in rewards]


def surrogate(row, t, options):
    r, a = ratio(row, t, options), row["advantage"][t]
    return dual_clipped(-smaller(r * a, clip(r, 1 - options["clip_low"], 1 + options["clip_high"]) * a), a, options)


def loss(rows, options):
    return plain.loss(rows, options, surrogate)
