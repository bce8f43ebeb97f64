# SPDX-License-Identifier: Apache-2.0
"""SAPO, arXiv 2511.20347."""

from tests.golden.reference import plain
from tests.golden.reference.plain import equal, exp, mean, ratio, std


def advantages(groups, options):
    return plain.credited(groups, options, normalised)


def normalised(rewards, members):
    """(R - mean) / std; nothing where all are equal."""
    if equal(rewards):
        return [0.0] * len(rewards)
    return [(r - mean(rewards)) / (std(rewards) + 1e-6) for r in rewards]


def surrogate(row, t, options):
    a = row["advantage"][t]
    tau = options["tau_positive"] if a > 0 else options["tau_negative"]
    gate = 1 / (1 + exp(-tau * (ratio(row, t, options) - 1)))
    return -gate * 4 / tau * a


def loss(rows, options):
    return plain.loss(rows, options, surrogate)
