# SPDX-License-Identifier: Apache-2.0
"""What the references share, in plain loops over numbers. It imports nothing of ours, and neither do they.

A row is a dict of lists over its tokens: `log_probs` (the policy's, which the loss is differentiated by), `mask`, `old`,
`rollout`, `ref`, `entropy`, `advantage`; and `sample`, the sample it belongs to. Options are a dict. A member of a group is
a dict: `reward`, `valid`, `parts`, and `rows`, dicts with `mask`, `rollout`, `ref`.

Derivatives are taken by a complex step, f'(x) = Im f(x + ih) / h, which is exact: so numbers may be complex, comparisons
look at the real part alone, and `constant` is a number without derivative.
"""

import cmath

STEP = 1e-40


def constant(z):
    return complex(z).real


def smaller(a, b):
    return a if constant(a) <= constant(b) else b


def larger(a, b):
    return a if constant(a) >= constant(b) else b


def clip(z, low, high):
    return smaller(larger(z, low), high)


def exp(z):
    return cmath.exp(z)


def log_sigmoid(z):
    """Of the smaller exponential, so that neither overflows."""
    return -cmath.log(1 + exp(-z)) if constant(z) >= 0 else z - cmath.log(1 + exp(z))


def pairs(rows):
    """(chosen, rejected): samples 0 and 1 of each group."""
    groups = sorted({row["sample"][0] for row in rows})
    by_sample = {row["sample"]: row for row in rows}
    return [(by_sample[group, 0], by_sample[group, 1]) for group in groups]


def mean(numbers):
    return sum(numbers) / len(numbers)


def std(numbers):
    """Unbiased."""
    middle = mean(numbers)
    return (sum((x - middle) ** 2 for x in numbers) / (len(numbers) - 1)) ** 0.5


def equal(numbers):
    return len(numbers) < 2 or max(numbers) == min(numbers)


# -- losses ------------------------------------------------------------------------------------------------------


def ratio(row, t, options):
    """Of the policy and what the step started from, or what sampled."""
    anchor = row["rollout"] if options["correction"] == "behaviour" else row["old"]
    return exp(row["log_probs"][t] - anchor[t])


def capped(r, cap):
    """A ratio as a weight of at most `cap`, with the slope of `cap log p` beyond."""
    return r * min(1.0, cap / constant(r))


def dual_clipped(value, advantage, options):
    """The loss of a token whose ratio is clipped, bounded where its advantage is negative."""
    bound = options["dual_clip"]
    return smaller(value, -bound * advantage) if bound and advantage < 0 else value


def trained(row):
    return [t for t in range(len(row["mask"])) if row["mask"][t]]


def weight(row, t, options):
    """Of the off-policy correction: the step's start over what sampled."""
    if options["correction"] in ("behaviour", "none"):
        return 1.0
    moved = [row["old"][u] - row["rollout"][u] for u in trained(row)]
    level = {"token": row["old"][t] - row["rollout"][t], "sequence": sum(moved), "geometric": mean(moved)}
    w = exp(level[options["correction_level"]]).real
    if options["correction"] == "truncate":
        return min(w, options["correction_cap"])
    inside = options["correction_floor"] <= w <= options["correction_cap"]
    return (w if options["correction"] == "mask" else 1.0) if inside else 0.0


def kept(row, t, options):
    """0 for a sequence with a negative advantage that is too far from what sampled it."""
    if not options["sequence_mask_delta"] or row["advantage"][t] >= 0:
        return 1.0
    apart = mean([row["rollout"][u] - constant(row["log_probs"][u]) for u in trained(row)])
    return 0.0 if apart > options["sequence_mask_delta"] else 1.0


def divergence(row, t, options):
    x = row["log_probs"][t] - row["ref"][t]
    if options["kl_estimator"] == "k1":
        return x
    if options["kl_estimator"] == "k2":
        return x * x / 2
    k3 = exp(-x) - 1 + x
    return k3 * exp(row["log_probs"][t] - row["rollout"][t]) if options["kl_estimator"] == "unbiased" else k3


def aggregate(rows, values, options):
    """One number from a value for every trained token: `values(row, t)`."""
    sums = [sum(values(row, t) for t in trained(row)) for row in rows]
    how = options["aggregation"]
    if how == "token":
        return sum(sums) / sum(len(trained(row)) for row in rows)
    if how == "sequence":
        return mean([total / max(1, len(trained(row))) for row, total in zip(rows, sums)])
    if how == "trajectory":
        lengths = {}
        for row in rows:
            lengths[row["sample"]] = lengths.get(row["sample"], 0) + len(trained(row))
        return sum(total / max(1, lengths[row["sample"]]) for row, total in zip(rows, sums)) / len(lengths)
    return sum(sums) / len(rows) / (options["fixed_length"] if how == "fixed" else 1)


def loss(rows, options, surrogate):
    """The surrogate of every token, corrected, plus divergence, less entropy."""

    def value(row, t):
        total = surrogate(row, t, options) * weight(row, t, options) * kept(row, t, options)
        total += options["kl_coef"] * divergence(row, t, options) if options["kl_coef"] else 0.0
        return total - options["entropy_coef"] * row["entropy"][t]

    return aggregate(rows, value, options)


def loss_of(surrogate):
    """The loss function whose tokens have this surrogate."""
    return lambda rows, options: loss(rows, options, surrogate)


def reinforced(row, t, options):
    """REINFORCE's surrogate."""
    return -row["advantage"][t] * row["log_probs"][t]


def clipped(row, t, options):
    """PPO's surrogate, arXiv 1707.06347 eq. 7."""
    r, a = ratio(row, t, options), row["advantage"][t]
    return dual_clipped(-smaller(r * a, clip(r, 1 - options["clip_low"], 1 + options["clip_high"]) * a), a, options)


def gradient(rows, options, loss_of):
    """d loss / d log_prob of every token of every row."""
    slopes = []
    for row in rows:
        slopes.append([])
        for t in range(len(row["mask"])):
            row["log_probs"][t] += 1j * STEP
            slopes[-1].append(complex(loss_of(rows, options)).imag / STEP)
            row["log_probs"][t] = constant(row["log_probs"][t])
    return slopes


# -- advantages --------------------------------------------------------------------------------------------------


def centred(rewards, members):
    """R - mean; nothing where all are equal."""
    return [0.0 if equal(rewards) else r - mean(rewards) for r in rewards]


def normalised(rewards, members):
    """(R - mean) / std; nothing where all are equal."""
    return [0.0 if equal(rewards) else (r - mean(rewards)) / (std(rewards) + 1e-6) for r in rewards]


def rewards(group, options):
    """Of the valid members, less the divergence from the reference where that is part of the reward."""
    return [
        member["reward"] - options["reward_kl_coef"] * sum(
            row["rollout"][t] - row["ref"][t] for row in member["rows"] for t in trained(row)
        )
        for member in group
        if member["valid"]
    ]  # fmt: skip


def length(member):
    return sum(len(trained(row)) for row in member["rows"])


def baseline(members):
    """Reward of the group's greedy sample; None without a verdict."""
    return members[0].get("greedy") if members else None


def credited(groups, options, rule):
    """`rule(rewards, members)` of each group's valid members, 0 for the others."""
    result = []
    for group in groups:
        members = [member for member in group if member["valid"]]
        values = iter(rule(rewards(group, options), members))
        result.append([next(values) if member["valid"] else 0.0 for member in group])
    return result
