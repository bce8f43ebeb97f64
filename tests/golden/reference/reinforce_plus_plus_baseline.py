# SPDX-License-Identifier: Apache-2.0
"""REINFORCE++ with baseline, arXiv 2501.03262: less the group's mean, by the batch's spread."""

from tests.golden.reference import plain
from tests.golden.reference.plain import clip, dual_clipped, equal, length, mean, ratio, smaller, std


def advantages(groups, options):
    plainly = {**options, "aggregation": "token"}
    centred = plain.credited(
        groups, plainly, lambda rewards, _: [0.0 if equal(rewards) else r - mean(rewards) for r in rewards]
    )
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
            result[-1].append(value / max(1, length(member)) if options["aggregation"] == "trajectory" else value)
    return result


def surrogate(row, t, options):
    r, a = ratio(row, t, options), row["advantage"][t]
    return dual_clipped(-smaller(r * a, clip(r, 1 - options["clip_low"], 1 + options["clip_high"]) * a), a, options)


def loss(rows, options):
    return plain.loss(rows, options, surrogate)
