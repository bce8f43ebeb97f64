# SPDX-License-Identifier: Apache-2.0
"""DAPO, arXiv 2503.14476, eq. 8, 9 and 13."""

from tests.golden.reference import plain
from tests.golden.reference.plain import length


def advantages(groups, options):
    def punished(rewards, members):
        return plain.normalised([r + overlong(length(m), options) for r, m in zip(rewards, members)], members)

    return plain.credited(groups, options, punished)


def overlong(tokens, options):
    """Eq. 13."""
    longest, buffer = options["overlong_length"], options["overlong_buffer"]
    if not longest or tokens <= longest - buffer:
        return 0.0
    return (longest - buffer - tokens) / buffer if tokens <= longest else -1.0


loss = plain.loss_of(plain.clipped)
