# SPDX-License-Identifier: Apache-2.0
"""Advantages (credit) of samples, turns and tokens, computed from the rewards of samples [groups, samples].

Only valid members enter the statistics and get an advantage. A group with equal rewards, or with one valid member, gets
exactly 0: rounding would otherwise give it a tiny gradient, and its rows a useless forward pass. Credit of turns is
[groups, samples, turns]; a missing turn is NaN. Credit of tokens is packed [tokens]: rows follow each other, with
`lengths` [rows]. Tokens with mask 0 (prompts, observations) are skipped: they have no reward and take no time step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from relax_core.api.algorithm import Groups
from relax_core.learn.losses import kl_k1

STD_EPS = 1e-6
"""Added to standard deviations to keep nearly constant groups finite; far below any meaningful spread of rewards."""
ROUNDING = 1e-12
"""Relative rounding error of a sum of normalised rewards in float64, with a margin."""


def group_mean(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return `r - mean(r)` within each group, [groups, samples] (Dr.GRPO)."""
    centred = rewards - _mean(rewards, valid)
    return torch.where(valid & _spread(rewards, valid), centred, 0.0)


def group_mean_std(rewards: Tensor, valid: Tensor, eps: float = STD_EPS) -> Tensor:
    """Return `(r - mean(r)) / (std(r) + eps)` with the unbiased standard deviation (GRPO)."""
    centred = group_mean(rewards, valid)
    return centred / (_std(centred, valid) + eps)


def leave_one_out(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return `r_i` minus the mean of the remaining rewards, equal to `n / (n - 1) (r_i - mean(r))` (RLOO)."""
    members = valid.sum(dim=1, keepdim=True)
    return group_mean(rewards, valid) * members / (members - 1).clamp(min=1)


def group_mean_relative(rewards: Tensor, valid: Tensor, eps: float = STD_EPS) -> Tensor:
    """Return `(r - mean(r)) / (mean(r) + eps)` for rewards >= 0, and 0 in a group whose mean is not above 0 (MaxRL)."""
    mean = _mean(rewards, valid)
    return torch.where(mean > 0, group_mean(rewards, valid) / (mean.clamp(min=0) + eps), 0.0)


def length_weighted_baseline(rewards: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    """Return `r - sum(l r) / sum(l)` for lengths l; this baseline varies least if gradients grow with length (OPO)."""
    weights = torch.where(valid, lengths.to(rewards.dtype), 0.0)
    baseline = (weights * rewards).sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(valid & _spread(rewards, valid), rewards - baseline, 0.0)


def per_reward(
    parts: Mapping[str, Tensor], valid: Tensor, weights: Mapping[str, float], eps: float = STD_EPS
) -> Tensor:
    """Return `sum_k w_k (r_k - mean(r_k)) / std(r_k)`: rewards are normalised in their group, then added (GDPO).

    A sum within the error of `eps` and rounding is exactly 0. Otherwise rewards that cancel would leave a remainder,
    which a later division by the batch's standard deviation could enlarge to a whole advantage.
    """
    total = error = torch.zeros(valid.shape, dtype=torch.float64, device=valid.device)
    for name, part in sorted(parts.items()):
        centred = group_mean(part, valid)
        std = _std(centred, valid)
        credit = weights[name] * centred / (std + eps)
        total, error = total + credit, error + 2 * credit.abs() * (eps / (std + eps)).clamp(min=ROUNDING)
    return torch.where(total.abs() > error, total, 0.0)


def over_batch_std(values: Tensor, valid: Tensor, eps: float = STD_EPS) -> Tensor:
    """Return `a / (std(a) + eps)` over all valid values, whose mean must be 0; a value of 0 stays exactly 0."""
    chosen = values[valid]
    if len(chosen) < 2:
        return torch.zeros_like(values)
    return torch.where(valid, values / (chosen.std() + eps), 0.0)


def whiten(values: Tensor, valid: Tensor, eps: float = STD_EPS) -> Tensor:
    """Return `(a - mean(a)) / (std(a) + eps)` over all valid values, of any shape; 0 if all values are equal."""
    chosen = values[valid]
    if len(chosen) < 2 or bool((chosen == chosen[0]).all()):
        return torch.zeros_like(values)
    return torch.where(valid, (values - chosen.mean()) / (chosen.std() + eps), 0.0)


def beyond_baseline(rewards: Tensor, valid: Tensor, baseline: Tensor | None) -> Tensor:
    """Return `R_i - b` for the group's baseline b, [groups]; 0 in a group whose baseline is NaN or missing."""
    if baseline is None:
        return torch.zeros_like(rewards)
    known = valid & torch.isfinite(baseline)[:, None]
    return torch.where(known, rewards - torch.nan_to_num(baseline)[:, None], 0.0)


def informative(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return bool [groups]: True if two valid rewards of the group differ."""
    return _spread(rewards, valid).squeeze(1)


def _mean(rewards: Tensor, valid: Tensor) -> Tensor:
    total = torch.where(valid, rewards, 0.0).sum(dim=1, keepdim=True)
    return total / valid.sum(dim=1, keepdim=True).clamp(min=1)


def _std(centred: Tensor, valid: Tensor) -> Tensor:
    """Return the unbiased standard deviation of each group, [groups, 1], from rewards less their group's mean."""
    return _variance(centred, valid).sqrt()


def _variance(centred: Tensor, valid: Tensor) -> Tensor:
    members = valid.sum(dim=1, keepdim=True)
    return centred.square().sum(dim=1, keepdim=True) / (members - 1).clamp(min=1)


def _spread(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return bool [groups, 1]: True if two valid rewards of the group differ."""
    largest = torch.where(valid, rewards, -torch.inf).amax(dim=1, keepdim=True)
    smallest = torch.where(valid, rewards, torch.inf).amin(dim=1, keepdim=True)
    return largest > smallest


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Return a penalty: 0 up to `max_length - buffer`, falling to -1 at `max_length`, -1 for longer samples.

    Source: DAPO, arXiv 2503.14476, eq. 13.
    """
    return (-(lengths.double() - (max_length - buffer)) / buffer).clamp(min=-1.0, max=0.0)


def step_credit(returns: Tensor, states: Tensor, valid: Tensor, std: bool = True, eps: float = STD_EPS) -> Tensor:
    """Return `(G - mean(G)) / (std(G) + eps)` over those turns of a group that began in the same state.

    If `std` is False, skip the division (GiGPO, arXiv 2505.10978, eq. 7). The credit is 0 if only one turn began in the
    state, or if all its turns have equal returns. A missing turn stays NaN.
    """
    there = valid[..., None] & ~torch.isnan(returns)
    group = torch.arange(len(returns), device=returns.device)[:, None, None].expand_as(returns)
    anchors = torch.stack([group[there], states[there]], dim=1)
    _, anchor, turns = torch.unique(anchors, dim=0, return_inverse=True, return_counts=True)
    earned = returns[there]

    def over(values: Tensor, how: str) -> Tensor:
        """Reduce the values of each anchor state; return the result for each of the state's turns."""
        return values.new_zeros(len(turns)).scatter_reduce(0, anchor, values, how, include_self=False)[anchor]

    apart = over(earned, "amax") > over(earned, "amin")
    credit = torch.where(apart, earned - over(earned, "mean"), 0.0)
    if std:
        variance = over(credit.square(), "sum") / (turns[anchor] - 1).clamp(min=1)
        credit = credit / (variance.sqrt() + eps)
    return (returns * 0.0).masked_scatter(there, credit)


def context_credit(
    step_rewards: Tensor, contexts: Tensor, valid: Tensor, std: bool = True, eps: float = STD_EPS,
    sample_rewards: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the credit of each sample's contexts, [groups, samples, turns]; the turns of a context have equal credit.

    The credit is the sum of two differences. The first is the summed reward of the context's turns, minus the mean of
    this sum over the group's samples that have a context of the same name; it is 0 if only one sample has a context of
    the name. The second is the sample's part of `sample_rewards` [groups, samples], which `step_rewards` has at the last
    turn, minus the mean of these over all samples of the group. If `std` is True, the credit is divided by the standard
    deviation: of the sum if all samples have the context, else the root of the summed variances. A missing turn stays
    NaN.
    """
    there = valid[..., None] & ~torch.isnan(step_rewards)
    whole = step_rewards.new_zeros(valid.shape) if sample_rewards is None else sample_rewards
    last = there & (there.flip(-1).cumsum(-1).flip(-1) == 1)
    turns = step_rewards - torch.where(last, whole[..., None], 0.0)
    groups, samples, _ = torch.nonzero(there, as_tuple=True)
    members, member = torch.unique(torch.stack([groups, contexts[there], samples], dim=1), dim=0, return_inverse=True)
    earned = step_rewards.new_zeros(len(members)).index_add(0, member, turns[there])
    _, name, sizes = torch.unique(members[:, :2], dim=0, return_inverse=True, return_counts=True)
    group, sample = members[:, 0], members[:, 2]

    def over(values: Tensor, how: str) -> Tensor:
        """Reduce the values of the contexts of a name; return the result for each of these contexts."""
        return values.new_zeros(len(sizes)).scatter_reduce(0, name, values, how, include_self=False)[name]

    def variance(centred: Tensor) -> Tensor:
        squares: Tensor = over(centred.square(), "sum") / (sizes[name] - 1).clamp(min=1)
        return squares

    apart = over(earned, "amax") > over(earned, "amin")
    own, of_sample = torch.where(apart, earned - over(earned, "mean"), 0.0), group_mean(whole, valid)
    credit = own + of_sample[group, sample]
    if std:
        in_all = sizes[name] == valid.sum(dim=1)[group]
        apart_from = variance(own) + _variance(of_sample, valid)[group, 0]
        credit = credit / (torch.where(in_all, variance(credit), apart_from).sqrt() + eps)
    return (step_rewards * 0.0).masked_scatter(there, credit[member])


def of_turns(values: Tensor, groups: Groups) -> Tensor:
    """Return for each sampled token its turn's value, and 0 elsewhere: [groups, samples, turns] -> [tokens]."""
    if groups.row_sample is None or groups.row_lengths is None or "turns" not in groups.token_columns:
        raise ValueError("of_turns: got groups without turns; name the column `turns` in Algorithm.advantage_columns()")
    turns = groups.token_columns["turns"].long()
    sample = groups.row_sample.repeat_interleave(groups.row_lengths)
    flat = values.reshape(groups.rewards.numel(), values.shape[-1])
    sampled = turns >= 0
    tokens = flat.new_zeros(len(turns))
    tokens[sampled] = flat[sample[sampled], turns[sampled]]
    return tokens


def of_samples(values: Tensor, groups: Groups) -> Tensor:
    """Return for each token its sample's value: [groups, samples] -> [tokens]."""
    if groups.row_sample is None or groups.row_lengths is None:
        raise ValueError("of_samples: values of tokens need row_sample and row_lengths of the groups")
    return values.reshape(-1)[groups.row_sample].repeat_interleave(groups.row_lengths)


def reward_to_go(rewards: Tensor, mask: Tensor, lengths: Tensor, gamma: float = 1.0) -> Tensor:
    """Return `G_t = r_t + gamma G_(t+1)` (Sutton and Barto, eq. 3.9); 0 for masked tokens."""
    return _unpack(_discounted(_pack(rewards, mask, lengths), gamma), mask, lengths)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, lengths: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) by generalised advantage estimation (Schulman et al., arXiv 1506.02438, eq. 16).

    `A_t = sum_l (gamma lam)^l d_(t+l)` with `d_t = r_t + gamma V_(t+1) - V_t`; returns are `A + V`. V is 0 after
    the row's last token.
    """
    reward, value = _pack(rewards, mask, lengths), _pack(values, mask, lengths)
    following = torch.cat([value[:, 1:], value.new_zeros(len(value), 1)], dim=1)
    advantages = _discounted(reward + gamma * following - value, gamma * lam)
    return _unpack(advantages, mask, lengths), _unpack(advantages + value, mask, lengths)


def at_last_token(values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Return each row's value at its last trained token, where its reward is earned, else 0: [rows] -> [tokens]."""
    row = _row_of_token(lengths)
    place = torch.arange(len(mask), device=mask.device)
    last = place.new_full((len(lengths),), -1).scatter_reduce(0, row, torch.where(mask, place, -1), "amax")
    return torch.where(place == last[row], values[row], 0.0)


def token_rewards(groups: Groups, kl_coef: float = 0.0) -> Tensor:
    """Return each token's reward, [tokens]: its sample's at the last trained token of a row, less `kl_coef` times k1.

    k1 is `log p - log q` of policy and reference, as in InstructGPT (Ouyang et al., arXiv 2203.02155, eq. 2). If
    `kl_coef` is not 0, the groups need the columns rollout_log_probs and ref_log_probs.
    """
    columns, lengths = groups.token_columns, groups.row_lengths
    if groups.row_sample is None or lengths is None:
        raise ValueError("token_rewards: rewards of tokens need row_sample and row_lengths of the groups")
    earned = at_last_token(groups.rewards.reshape(-1)[groups.row_sample], columns["loss_mask"].bool(), lengths)
    if not kl_coef:
        return earned
    return earned - kl_coef * kl_k1(columns["rollout_log_probs"], columns["ref_log_probs"]).to(earned.dtype)


def turn_returns(step_rewards: Tensor, gamma: float = 1.0) -> Tensor:
    """Return `G_k = r_k + gamma G_(k+1)` of the rewards of turns, [..., turns] (GiGPO, arXiv 2505.10978).

    A missing turn stays NaN.
    """
    there = ~torch.isnan(step_rewards)
    flat = torch.where(there, step_rewards, 0.0).reshape(-1, step_rewards.shape[-1])
    return torch.where(there, _discounted(flat, gamma).reshape(step_rewards.shape), torch.nan)


def _discounted(values: Tensor, factor: float) -> Tensor:
    """Return discounted sums from each step to the last, [rows, steps]."""
    total, sums = values.new_zeros(len(values)), []
    for step in range(values.shape[1] - 1, -1, -1):
        total = values[:, step] + factor * total
        sums.append(total)
    return torch.stack(sums[::-1], dim=1) if sums else values


def _pack(values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Return each row's values at trained tokens, padded with 0: [rows, most trained tokens of a row]."""
    row, place, width = _places(mask, lengths)
    packed = values.new_zeros(len(lengths), width)
    packed[row, place] = values[mask]
    return packed


def _unpack(packed: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    row, place, _ = _places(mask, lengths)
    values = packed.new_zeros(len(mask))
    values[mask] = packed[row, place]
    return values


def _places(mask: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return each trained token's row and its index among the row's trained tokens, and the largest such number."""
    row = _row_of_token(lengths)[mask]
    trained = torch.zeros_like(lengths).index_add(0, row, torch.ones_like(row))
    place = torch.arange(len(row), device=mask.device) - (trained.cumsum(0) - trained)[row]
    return row, place, int(trained.max()) if len(trained) else 0


def _row_of_token(lengths: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
