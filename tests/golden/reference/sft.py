# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: the mean negative log-likelihood over tokens, or over each row and then over rows."""

from tests.golden.reference.plain import mean, trained


def loss(rows, options):
    if options["aggregation"] == "sequence":
        return mean([mean([-row["log_probs"][t] for t in trained(row)]) for row in rows])
    tokens = [-row["log_probs"][t] for row in rows for t in trained(row)]
    return sum(tokens) / len(tokens)
