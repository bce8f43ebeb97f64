# SPDX-License-Identifier: Apache-2.0
"""REINFORCE++ with baseline, arXiv 2501.03262: less the group's mean, by the batch's spread."""

from tests.golden.reference import plain
from tests.golden.reference.plain import equal, length, mean, std


def advantages(groups, options):
    centred = plain.credited(groups, {**options, "aggregation": "token"}, plain.centred)
    everything = []
    for group, values in zip(groups, centred):
        for member, value in zip(group, values):
            everything += [value] * length(member) if member["valid"] else []
    result = []
    for group, values in zip(groups, centred):
        result.append([])
        for member, value in zip(group, values):
            counts = member["valid"] and not equal(everything)
            value = (value - mean(everything)) / (std(everything) + 1e-6) if counts else 0.0
            result[-1].append(value)
    return result


loss = plain.loss_of(plain.clipped)
