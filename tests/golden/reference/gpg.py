# SPDX-License-Identifier: Apache-2.0
"""GPG, arXiv 2504.02546: alpha makes up for groups without a gradient."""

from tests.golden.reference import plain
from tests.golden.reference.plain import equal, mean


def advantages(groups, options):
    samples, telling = 0, 0
    for group in groups:
        rewards = plain.rewards(group, options)
        samples += len(rewards)
        telling += 0 if equal(rewards) else len(rewards)
    alpha = samples / max(1, telling)

    def scaled(rewards, members):
        return [0.0 if equal(rewards) else alpha * (r - mean(rewards)) for r in rewards]

    return plain.credited(groups, options, scaled)


loss = plain.loss_of(plain.reinforced)
