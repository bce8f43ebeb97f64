# SPDX-License-Identifier: Apache-2.0
"""GSPO, arXiv 2507.18071, eq. 5 to 7."""

from tests.golden.reference import plain
from tests.golden.reference.plain import clip, dual_clipped, exp, mean, smaller, trained


def advantages(groups, options):
    return plain.credited(groups, options, plain.normalised)


def surrogate(row, t, options):
    """Of the whole sequence, for each of its tokens."""
    anchor = row["rollout"] if options["correction"] == "behaviour" else row["old"]
    s = exp(mean([row["log_probs"][u] - anchor[u] for u in trained(row)]))
    a = row["advantage"][t]
    return dual_clipped(-smaller(s * a, clip(s, 1 - options["clip_low"], 1 + options["clip_high"]) * a), a, options)


loss = plain.loss_of(surrogate)
