# SPDX-License-Identifier: Apache-2.0
"""MaxRL, arXiv 2602.02710: divided by the mean."""

from tests.golden.reference import plain
from tests.golden.reference.plain import equal, mean


def advantages(groups, options):
    return plain.credited(groups, options, relative)


def relative(rewards, members):
    if equal(rewards) or mean(rewards) <= 0:
        return [0.0] * len(rewards)
    return [(r - mean(rewards)) / (mean(rewards) + 1e-6) for r in rewards]


loss = plain.loss_of(plain.reinforced)
