# SPDX-License-Identifier: Apache-2.0
"""A Bradley-Terry reward model, arXiv 2203.02155 eq. 1, with a margin and rewards kept around 0."""

from tests.golden.reference.plain import log_sigmoid, mean, pairs


def loss(rows, options):
    losses = []
    for chosen, rejected in pairs(rows):
        margin = options["margin"] + (chosen["margin"] if options["margins"] else 0.0)
        ahead = -log_sigmoid(chosen["reward"] - rejected["reward"] - margin)
        losses.append(ahead + options["center_coef"] * (chosen["reward"] + rejected["reward"]) ** 2)
    return mean(losses)


def gradient(rows, options):
    """d loss / d reward of every row."""
    slopes = []
    for row in rows:
        row["reward"] += 1j * 1e-40
        slopes.append(complex(loss(rows, options)).imag / 1e-40)
        row["reward"] = complex(row["reward"]).real
    return slopes
