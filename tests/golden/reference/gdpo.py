# SPDX-License-Identifier: Apache-2.0
"""GDPO, arXiv 2601.05242: each reward normalised in its group, their sum over the batch."""

from tests.golden.reference import plain
from tests.golden.reference.plain import equal, mean, std


def advantages(groups, options):
    summed, everything = [], []
    for group in groups:
        members = [member for member in group if member["valid"]]
        values = [0.0] * len(members)
        for name in members[0]["parts"] if members else ():
            rewards = [member["parts"][name] for member in members]
            for i, r in enumerate(rewards):
                scale = 0.0 if equal(rewards) else options["weights"].get(name, 1.0) / (std(rewards) + 1e-6)
                values[i] += scale * (r - mean(rewards))
        everything += values
        summed.append(iter(values))
    result = []
    for group, values in zip(groups, summed):
        result.append([])
        for member in group:
            value = 0.0
            if member["valid"] and not equal(everything):
                value = (next(values) - mean(everything)) / (std(everything) + 1e-6)
            result[-1].append(value)
    return result


loss = plain.loss_of(plain.clipped)
