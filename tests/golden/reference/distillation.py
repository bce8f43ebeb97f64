# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation, arXiv 2306.13649, eq. 1 and 2; arXiv 2306.08543, eq. 4.

Beside what other references have, a row has `teacher` (of the sampled token), and of k tokens in each position `student_at`
and `teacher_at`. The loss is differentiated by `log_probs` and `student_at`.
"""

import cmath

from tests.golden.reference import plain
from tests.golden.reference.plain import STEP, constant, exp, larger, trained

LEAST = 1e-6


def advantages(groups, options):
    """[group][member][row][token]."""
    rewards = plain.credited(groups, {**options, "aggregation": "token"}, plain.normalised)
    result = []
    for group, earned in zip(groups, rewards):
        result.append([])
        for member, reward in zip(group, earned):
            rows = []
            for row in member["rows"]:
                own = [0.0] * len(row["mask"])
                for t in trained(row) if member["valid"] else ():
                    own[t] = options["reward_coef"] * reward
                    if options["mode"] == "advantage":
                        later = [u for u in trained(row) if u >= t]
                        for steps, u in enumerate(later):
                            own[t] += options["coef"] * options["discount"] ** steps * credit(row, u, options)
                rows.append(own)
            result[-1].append(rows)
    return result


def credit(row, t, options):
    """Minus f(x) - x f'(x), less what it is at 1, of x = p(y) / q(y)."""
    x = exp(row["teacher"][t] - row["rollout"][t]).real
    b = options["beta"]
    if options["divergence"] == "reverse":
        return cmath.log(x).real
    return x - 1 if options["divergence"] == "forward" else (1 - b) * cmath.log(b * x + 1 - b).real


def kl(one, other):
    return sum(exp(a) * (a - b) for a, b in zip(one, other))


def divergence(row, t, options):
    """D of one position."""
    if options["tokens"] == "sampled":
        x = row["teacher"][t] - row["log_probs"][t]
        return x * x / 2 if options["divergence"] == "reverse" else exp(x) - 1 - x
    q, p = over(row["student_at"][t], options), over(row["teacher_at"][t], options)
    if options["divergence"] == "reverse":
        return kl(q, p)
    if options["divergence"] == "forward":
        return kl(p, q)
    b = options["beta"]
    m = [cmath.log(b * exp(x) + (1 - b) * exp(y)) for x, y in zip(p, q)]
    return b * kl(p, m) + (1 - b) * kl(q, m)


def over(log_probs, options):
    total = sum(exp(x) for x in log_probs)
    if options["rest"] == "bucket":
        return [*log_probs, cmath.log(larger(1 - total, LEAST))]
    return [x - cmath.log(total) for x in log_probs]


def loss(rows, options):
    if options["mode"] == "advantage":
        return plain.loss(rows, options, plain.clipped)

    def value(row, t):
        weight = plain.weight(row, t, options) if options["tokens"] == "sampled" else 1.0
        total = options["coef"] * weight * divergence(row, t, options)
        return total + (options["kl_coef"] * plain.divergence(row, t, options) if options["kl_coef"] else 0.0)

    result = plain.aggregate(rows, value, options)
    if options["reward_coef"]:
        result += plain.loss(rows, {**options, "kl_coef": 0.0, "entropy_coef": 0.0}, plain.clipped)
    return result


def slopes_at(rows, options):
    """d loss / d student_at of every position, [row][token][k]."""
    slopes = []
    for row in rows:
        slopes.append([])
        for own in row["student_at"]:
            slopes[-1].append([])
            for j in range(len(own)):
                own[j] += 1j * STEP
                slopes[-1][-1].append(complex(loss(rows, options)).imag / STEP)
                own[j] = constant(own[j])
    return slopes
