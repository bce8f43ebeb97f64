# SPDX-License-Identifier: Apache-2.0
"""GiGPO, arXiv 2505.10978: eq. 3, 6, 7 and 8. A member's `turns` are dicts of `state` and `reward`; a row's `turns` say of
each token which one sampled it, -1 for given ones."""

from tests.golden.reference import plain
from tests.golden.reference.plain import equal, mean, std


def advantages(groups, options):
    """[group][member][row][token]."""
    result = []
    for group in groups:
        valid = [member for member in group if member["valid"]]
        rewards = plain.rewards(group, options)
        episode = dict(zip(map(id, valid), relative(rewards, options)))
        seen = [(member, t) for member in valid for t in range(len(member["turns"])) if sampled(member, t)]
        steps = {}
        for member, t in seen:
            anchored = [(m, u) for m, u in seen if m["turns"][u]["state"] == member["turns"][t]["state"]]
            returns = [discounted(m, u, options["gamma"]) for m, u in anchored]
            steps[id(member), t] = relative(returns, options)[anchored.index((member, t))]
        result.append([])
        for member in group:
            a_e = episode.get(id(member), 0.0)
            credit = [
                a_e + options["step_weight"] * steps.get((id(member), t), 0.0) for t in range(len(member["turns"]))
            ]
            result[-1].append([
                [credit[t] if t >= 0 and member["valid"] else 0.0 for t in row["turns"]] for row in member["rows"]
            ])  # fmt: skip
    return result


def sampled(member, turn):
    return any(turn in row["turns"] for row in member["rows"])


def discounted(member, turn, gamma):
    return sum(gamma ** (k - turn) * member["turns"][k]["reward"] for k in range(turn, len(member["turns"])))


def relative(values, options):
    """(x - mean) / F; nothing where all are equal."""
    if equal(values):
        return [0.0] * len(values)
    scale = std(values) + 1e-6 if options["normalise"] == "std" else 1.0
    return [(x - mean(values)) / scale for x in values]


loss = plain.loss_of(plain.clipped)
