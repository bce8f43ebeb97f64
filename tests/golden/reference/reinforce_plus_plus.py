# SPDX-License-Identifier: Apache-2.0
"""REINFORCE++, arXiv 2501.03262: rewards to go, normalised over all tokens of the batch."""

from tests.golden.reference import plain
from tests.golden.reference.plain import equal, mean, std, trained


def advantages(groups, options):
    """[group][member][row][token]."""
    result, everything = [], []
    for group in groups:
        result.append([[to_go(row, member["reward"], options) for row in member["rows"]] for member in group])
        for member, rows in zip(group, result[-1]):
            if member["valid"]:
                everything += [row[t] for row, own in zip(rows, member["rows"]) for t in trained(own)]
    for group, credited in zip(groups, result):
        for member, rows in zip(group, credited):
            for row, own in zip(rows, member["rows"]):
                for t in range(len(row)):
                    counts = own["mask"][t] and member["valid"] and not equal(everything)
                    row[t] = (row[t] - mean(everything)) / (std(everything) + 1e-6) if counts else 0.0
    return result


def to_go(row, reward, options):
    """The reward is earned at the last token, the divergence at each."""
    earned, following = [0.0] * len(row["mask"]), 0.0
    for t in reversed(trained(row)):
        own = reward if t == trained(row)[-1] else 0.0
        own -= options["reward_kl_coef"] * (row["rollout"][t] - row["ref"][t])
        following = own + options["gamma"] * following
        earned[t] = following
    return earned


loss = plain.loss_of(plain.clipped)
