# SPDX-License-Identifier: Apache-2.0
"""OPO, arXiv 2505.23585: the baseline weighs rewards by length."""

from tests.golden.reference import plain
from tests.golden.reference.plain import equal, length


def advantages(groups, options):
    return plain.credited(groups, options, less_optimal)


def less_optimal(rewards, members):
    if equal(rewards):
        return [0.0] * len(rewards)
    lengths = [length(member) for member in members]
    baseline = sum(n * r for n, r in zip(lengths, rewards)) / sum(lengths)
    return [r - baseline for r in rewards]


loss = plain.loss_of(plain.reinforced)
