# SPDX-License-Identifier: Apache-2.0
"""DAPO, arXiv 2503.14476, eq. 8, 9 and 13."""

from tests.golden.reference import plain
from tests.golden.reference.plain import clip, dual_clipped, equal, length, mean, ratio, smaller, std


def advantages(groups, options):
    def punished(rewards, members):
        return normalised([r + overlong(length(m), options) for r, m in zip(rewards, members)], members)

    return plain.credited(groups, options, punished)


def overlong(tokens, options):
    """Eq. 13."""
    longest, buffer = options["overlong_length"], options["overlong_buffer"]
    if not longest or tokens <= longest - buffer:
        return 0.0
    return (longest - buffer - tokens) / buffer if tokens <= longest else -1.0


def normalised(rewards, members):
    """(R - mean) / std; nothing where all are equal."""
    if equal(rewards):
        return [0.0] * len(rewards)
    return [(r - mean(rewards)) / (std(rewards) + 1e-6) for r in rewards]


def surrogate(row, t, options):
    r, a = ratio(row, t, options), row["advantage"][t]
    return dual_clipped(-smaller(r * a, clip(r, 1 - options["clip_low"], 1 + options["clip_high"]) * a), a, options)


def loss(rows, options):
    return plain.loss(rows, options, surrogate)
