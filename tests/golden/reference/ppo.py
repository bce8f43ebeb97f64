# SPDX-License-Identifier: Apache-2.0
"""PPO, arXiv 1707.06347, with GAE, arXiv 1506.02438. A row has `values` too, and one that a critic learns from `value`, which
it now says, and `returns`."""

from tests.golden.reference import plain
from tests.golden.reference.plain import STEP, clip, constant, equal, larger, mean, std, trained


def gae(row, reward, options):
    """([token] advantages, [token] returns): eq. 16 as it stands, a sum over what follows."""
    steps = trained(row)
    earned = {t: -options["reward_kl_coef"] * (row["rollout"][t] - row["ref"][t]) for t in steps}
    earned[steps[-1]] += reward
    delta = {}
    for place, t in enumerate(steps):
        following = row["values"][steps[place + 1]] if place + 1 < len(steps) else 0.0
        delta[t] = earned[t] + options["gamma"] * following - row["values"][t]
    advantages, returns = [0.0] * len(row["mask"]), [0.0] * len(row["mask"])
    for place, t in enumerate(steps):
        for later, u in enumerate(steps[place:]):
            advantages[t] += (options["gamma"] * options["lam"]) ** later * delta[u]
        returns[t] = advantages[t] + row["values"][t]
    return advantages, returns


def returns(groups, options):
    """[group][member][row][token]; without a verdict, what was thought."""
    return [
        [[gae(row, m["reward"], options)[1] if m["valid"] else row["values"] for row in m["rows"]] for m in group]
        for group in groups
    ]


def advantages(groups, options):
    """[group][member][row][token], normalised over all trained tokens of valid members."""
    result = [[[gae(row, m["reward"], options)[0] for row in m["rows"]] for m in group] for group in groups]
    members = [(m, rows) for group, found in zip(groups, result) for m, rows in zip(group, found)]
    everything = [
        row[t] for m, rows in members if m["valid"] for row, own in zip(rows, m["rows"]) for t in trained(own)
    ]
    for member, rows in members:
        for row, own in zip(rows, member["rows"]):
            for t in trained(own):
                if options["normalise"]:
                    row[t] = 0.0 if equal(everything) else (row[t] - mean(everything)) / (std(everything) + 1e-6)
                row[t] = row[t] if member["valid"] else 0.0
    return result


loss = plain.loss_of(plain.clipped)


def value_loss(rows, options):
    """Mean over all trained tokens."""
    total, count = 0.0, 0
    for row in rows:
        for t in trained(row):
            v, old, target, bound = row["value"][t], row["values"][t], row["returns"][t], options["value_clip"]
            error = (v - target) ** 2
            if bound:
                error = larger(error, (clip(v, old - bound, old + bound) - target) ** 2)
            total += error / 2
            count += 1
    return total / count


def value_gradient(rows, options):
    """d value_loss / d value of every token of every row."""
    slopes = []
    for row in rows:
        slopes.append([])
        for t in range(len(row["mask"])):
            row["value"][t] += 1j * STEP
            slopes[-1].append(complex(value_loss(rows, options)).imag / STEP)
            row["value"][t] = constant(row["value"][t])
    return slopes
