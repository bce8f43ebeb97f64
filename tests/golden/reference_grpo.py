# SPDX-License-Identifier: Apache-2.0
"""GRPO in plain Python loops over floats, from arXiv 2402.03300: the judge of the real one. It imports nothing of ours.

A row is a dict: `logits` [tokens][vocab] (of the distribution that token t was drawn from), `tokens`, `mask`,
`old`, `rollout` and `ref` log-probs [tokens], `advantage` (one number). Options are a dict with the names of `GRPOOptions`.
"""

import math

STD_EPS = 1e-6


def advantages(groups):
    """Section 4.1.2: (r - mean) / std for each reward of each group; the unbiased standard deviation."""
    result = []
    for rewards in groups:
        mean = sum(rewards) / len(rewards)
        if len(rewards) < 2 or max(rewards) == min(rewards):
            result.append([0.0 for _ in rewards])
            continue
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        result.append([(r - mean) / (std + STD_EPS) for r in rewards])
    return result


def softmax(logits, temperature):
    scaled = [x / temperature for x in logits]
    top = max(scaled)
    total = sum(math.exp(x - top) for x in scaled)
    return [math.exp(x - top) / total for x in scaled]


def loss_and_gradient(rows, options, temperature):
    """The loss, and its derivative with respect to every logit: [rows][tokens][vocab]."""
    loss, gradients = 0.0, []
    all_tokens = sum(sum(row["mask"]) for row in rows)
    for row in rows:
        trained = sum(row["mask"])
        gradient = [[0.0] * len(logits) for logits in row["logits"]]
        for t in range(len(row["tokens"])):
            if not row["mask"][t]:
                continue
            if options["aggregation"] == "sequence":
                share = 1.0 / (len(rows) * trained)
            elif options["aggregation"] == "token":
                share = 1.0 / all_tokens
            else:
                share = 1.0 / (len(rows) * options["fixed_length"])
            value, gradient[t] = _token(row, t, options, temperature, share)
            loss += value
        gradients.append(gradient)
    return loss, gradients


def _token(row, t, options, temperature, share):
    """One token's summand of minus eq. 3, and its derivative with respect to the token's logits."""
    probs = softmax(row["logits"][t], temperature)
    chosen = row["tokens"][t]
    log_prob = math.log(probs[chosen])
    ratio = math.exp(log_prob - row["old"][t])
    advantage = row["advantage"]
    clipped = min(max(ratio, 1 - options["clip_low"]), 1 + options["clip_high"])
    value = -min(ratio * advantage, clipped * advantage)
    by_log_prob = -ratio * advantage if ratio * advantage <= clipped * advantage else 0.0
    if options.get("correction", "truncate") == "truncate":  # the decoupled objective, truncated at 2
        weight = min(math.exp(row["old"][t] - row["rollout"][t]), 2.0)
        value, by_log_prob = weight * value, weight * by_log_prob

    if options["kl_coef"]:  # eq. 4
        q_over_p = math.exp(row["ref"][t] - log_prob)
        value += options["kl_coef"] * (q_over_p - math.log(q_over_p) - 1)
        by_log_prob += options["kl_coef"] * (1 - q_over_p)

    entropy = -sum(p * math.log(p) for p in probs)
    value -= options["entropy_coef"] * entropy
    gradient = []
    for j, p in enumerate(probs):
        by_logit = by_log_prob * ((1.0 if j == chosen else 0.0) - p)
        by_logit -= options["entropy_coef"] * (-p * (math.log(p) + entropy))
        gradient.append(share * by_logit / temperature)
    return share * value, gradient
