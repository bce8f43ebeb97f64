# SPDX-License-Identifier: Apache-2.0
"""CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4 and 5."""

from tests.golden.reference import plain
from tests.golden.reference.plain import clip, constant, equal, mean, ratio, std


def advantages(groups, options):
    return plain.credited(groups, options, normalised)


def normalised(rewards, members):
    """(R - mean) / std; nothing where all are equal."""
    if equal(rewards):
        return [0.0] * len(rewards)
    return [(r - mean(rewards)) / (std(rewards) + 1e-6) for r in rewards]


def surrogate(row, t, options):
    w = clip(ratio(row, t, options), 1 - options["clip_low"], 1 + options["clip_high"])
    return -constant(w) * row["advantage"][t] * row["log_probs"][t]


def loss(rows, options):
    return plain.loss(rows, options, surrogate)
