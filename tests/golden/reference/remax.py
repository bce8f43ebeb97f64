# SPDX-License-Identifier: Apache-2.0
"""ReMax, arXiv 2310.10505: the greedy answer is the baseline."""

from tests.golden.reference import plain
from tests.golden.reference.plain import baseline


def advantages(groups, options):
    return plain.credited(groups, options, beyond)


def beyond(rewards, members):
    greedy = baseline(members)
    return [0.0 if greedy is None else r - greedy for r in rewards]


loss = plain.loss_of(plain.reinforced)
