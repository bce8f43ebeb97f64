# SPDX-License-Identifier: Apache-2.0
"""M2PO, arXiv 2510.01161: the tokens that move away furthest are left out until the second moment of the others fits."""

from tests.golden.reference import plain
from tests.golden.reference.plain import capped, mean, ratio, trained


def advantages(groups, options):
    return plain.credited(groups, options, plain.normalised)


def trusted(rows, bound):
    """{(row, token)} that count."""
    squares = {}
    for i, row in enumerate(rows):
        for t in trained(row):
            moved = row["old"][t] - row["rollout"][t]
            if moved * row["advantage"][t] > 0:
                squares[i, t] = moved**2
    while squares and mean(list(squares.values())) > bound:
        furthest = max(squares.values())
        squares = {place: square for place, square in squares.items() if square < furthest}
    return {
        (i, t) for i, row in enumerate(rows) for t in trained(row)
        if (i, t) in squares or (row["old"][t] - row["rollout"][t]) * row["advantage"][t] <= 0
    }  # fmt: skip


def loss(rows, options):
    kept = trusted(rows, options["second_moment"])
    number = {id(row): i for i, row in enumerate(rows)}

    def surrogate(row, t, options):
        r = capped(ratio(row, t, options), options["ratio_cap"])
        return -r * row["advantage"][t] if (number[id(row)], t) in kept else 0.0

    return plain.loss(rows, options, surrogate)
