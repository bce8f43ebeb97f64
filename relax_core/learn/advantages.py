# SPDX-License-Identifier: Apache-2.0
"""Advantages: rewards of samples [groups, samples] to credit of samples, turns and tokens.

Only valid members count and get one; a group whose rewards are all equal, or with one valid member, is exactly 0 (rounding
would otherwise give it a tiny gradient, and its rows a forward for nothing). Credit of turns is [groups, samples, turns],
where a missing turn is NaN. Credit of tokens is packed [tokens], rows one after another by `lengths` [rows]; tokens with
mask 0 (prompts, observations) are stepped over: neither a reward nor a step of time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from relax_core.api.algorithm import Groups

STD_EPS = 1e-6
"""Keeps a nearly constant group finite; far below any spread of rewards that means something."""


def group_mean(rewards: Tensor, valid: Tensor) -> Tensor:
    """[groups, samples] `r - mean(r)` (Dr.GRPO)."""
    centred = rewards - _mean(rewards, valid)
    return torch.where(valid & _spread(rewards, valid), centred, 0.0)


def group_mean_std(rewards: Tensor, valid: Tensor, eps: float = STD_EPS) -> Tensor:
    """`(r - mean(r)) / (std(r) + eps)` with the unbiased standard deviation (GRPO)."""
    centred = group_mean(rewards, valid)
    members = valid.sum(dim=1, keepdim=True)
    variance = centred.square().sum(dim=1, keepdim=True) / (members - 1).clamp(min=1)
    return centred / (variance.sqrt() + eps)


def leave_one_out(rewards: Tensor, valid: Tensor) -> Tensor:
    """`r_i` minus the mean of the others, which is `n / (n - 1) (r_i - mean(r))` (RLOO)."""
    members = valid.sum(dim=1, keepdim=True)
    return group_mean(rewards, valid) * members / (members - 1).clamp(min=1)


def group_mean_relative(rewards: Tensor, valid: Tensor, eps: float = STD_EPS) -> Tensor:
    """`(r - mean(r)) / (mean(r) + eps)` for rewards of 0 and above; a group whose mean is not above 0 has none (MaxRL)."""
    mean = _mean(rewards, valid)
    return torch.where(mean > 0, group_mean(rewards, valid) / (mean.clamp(min=0) + eps), 0.0)


def length_weighted_baseline(rewards: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    """`r - sum(l r) / sum(l)`: the baseline of least variance where a gradient's size grows with length (OPO)."""
    weights = torch.where(valid, lengths.to(rewards.dtype), 0.0)
    baseline = (weights * rewards).sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(valid & _spread(rewards, valid), rewards - baseline, 0.0)


def per_reward(
    parts: Mapping[str, Tensor], valid: Tensor, weights: Mapping[str, float], eps: float = STD_EPS
) -> Tensor:
    """`sum_k w_k (r_k - mean(r_k)) / std(r_k)`: each reward normalised in its group before they are added (GDPO)."""
    credited = [group_mean_std(part, valid, eps) * weights.get(name, 1.0) for name, part in sorted(parts.items())]
    return torch.stack(credited).sum(dim=0)


def whiten(values: Tensor, valid: Tensor, eps: float = STD_EPS) -> Tensor:
    """`(a - mean(a)) / (std(a) + eps)` over everything that is valid, whatever the shape; 0 where all are equal."""
    chosen = values[valid]
    if len(chosen) < 2 or bool((chosen == chosen[0]).all()):
        return torch.zeros_like(values)
    return torch.where(valid, (values - chosen.mean()) / (chosen.std() + eps), 0.0)


def beyond_baseline(rewards: Tensor, valid: Tensor, baseline: Tensor | None) -> Tensor:
    """`R_i - b`, b [groups]; 0 in a group whose baseline is NaN or missing."""
    if baseline is None:
        return torch.zeros_like(rewards)
    known = valid & torch.isfinite(baseline)[:, None]
    return torch.where(known, rewards - torch.nan_to_num(baseline)[:, None], 0.0)


def informative(rewards: Tensor, valid: Tensor) -> Tensor:
    """[groups] bool: two valid rewards of the group differ."""
    return _spread(rewards, valid).squeeze(1)


def _mean(rewards: Tensor, valid: Tensor) -> Tensor:
    total = torch.where(valid, rewards, 0.0).sum(dim=1, keepdim=True)
    return total / valid.sum(dim=1, keepdim=True).clamp(min=1)


def _spread(rewards: Tensor, valid: Tensor) -> Tensor:
    """[groups, 1]: whether two valid rewards of the group differ."""
    largest = torch.where(valid, rewards, -torch.inf).amax(dim=1, keepdim=True)
    smallest = torch.where(valid, rewards, torch.inf).amin(dim=1, keepdim=True)
    return largest > smallest


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """0 up to `max_length - buffer`, falling to -1 at `max_length`, -1 beyond (DAPO, arXiv 2503.14476, eq. 13)."""
    return (-(lengths.double() - (max_length - buffer)) / buffer).clamp(min=-1.0, max=0.0)


def step_credit(returns: Tensor, states: Tensor, valid: Tensor, std: bool = True, eps: float = STD_EPS) -> Tensor:
    """`(G - mean(G)) / (std(G) + eps)` over the turns of a group that began in an equal state, or without the division
    (GiGPO, arXiv 2505.10978, eq. 7). 0 where no other turn began there, or all earned the same; NaN stays NaN."""
    there = valid[..., None] & ~torch.isnan(returns)
    group = torch.arange(len(returns), device=returns.device)[:, None, None].expand_as(returns)
    anchors = torch.stack([group[there], states[there]], dim=1)
    _, anchor, turns = torch.unique(anchors, dim=0, return_inverse=True, return_counts=True)
    earned = returns[there]

    def over(values: Tensor, how: str) -> Tensor:
        """Reduce the values of each anchor, and give the result to each of its turns."""
        return values.new_zeros(len(turns)).scatter_reduce(0, anchor, values, how, include_self=False)[anchor]

    apart = over(earned, "amax") > over(earned, "amin")
    credit = torch.where(apart, earned - over(earned, "mean"), 0.0)
    if std:
        variance = over(credit.square(), "sum") / (turns[anchor] - 1).clamp(min=1)
        credit = credit / (variance.sqrt() + eps)
    return (returns * 0.0).masked_scatter(there, credit)


def context_credit(
    step_rewards: Tensor, contexts: Tensor, valid: Tensor, std: bool = True, eps: float = STD_EPS
) -> Tensor:
    """Credit of each context of a sample: the reward of its turns, less the mean of what contexts of that name earned in the
    group's samples, by their standard deviation or not. [groups, samples, turns], one value for all turns of a context.

    0 where no other sample has a context of that name, or all earned the same; NaN stays NaN."""
    there = valid[..., None] & ~torch.isnan(step_rewards)
    groups, samples, _ = torch.nonzero(there, as_tuple=True)
    members, member = torch.unique(torch.stack([groups, contexts[there], samples], dim=1), dim=0, return_inverse=True)
    earned = step_rewards.new_zeros(len(members)).index_add(0, member, step_rewards[there])
    _, name, sizes = torch.unique(members[:, :2], dim=0, return_inverse=True, return_counts=True)

    def over(values: Tensor, how: str) -> Tensor:
        """Reduce the values of the contexts of a name, and give the result to each of them."""
        return values.new_zeros(len(sizes)).scatter_reduce(0, name, values, how, include_self=False)[name]

    apart = over(earned, "amax") > over(earned, "amin")
    credit = torch.where(apart, earned - over(earned, "mean"), 0.0)
    if std:
        credit = credit / ((over(credit.square(), "sum") / (sizes[name] - 1).clamp(min=1)).sqrt() + eps)
    return (step_rewards * 0.0).masked_scatter(there, credit[member])


def of_turns(values: Tensor, groups: Groups) -> Tensor:
    """[groups, samples, turns] -> [tokens]: what its turn has, for each token that the policy sampled, else 0."""
    if groups.row_sample is None or groups.row_lengths is None or "turns" not in groups.token_columns:
        raise ValueError("of_turns: got groups without turns; name the column `turns` in Algorithm.advantage_columns()")
    turns = groups.token_columns["turns"].long()
    sample = groups.row_sample.repeat_interleave(groups.row_lengths)
    flat = values.reshape(groups.rewards.numel(), values.shape[-1])
    sampled = turns >= 0
    tokens = flat.new_zeros(len(turns))
    tokens[sampled] = flat[sample[sampled], turns[sampled]]
    return tokens


def reward_to_go(rewards: Tensor, mask: Tensor, lengths: Tensor, gamma: float = 1.0) -> Tensor:
    """`G_t = r_t + gamma G_(t+1)` (Sutton and Barto, eq. 3.9); 0 where masked."""
    return _unpack(_discounted(_pack(rewards, mask, lengths), gamma), mask, lengths)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, lengths: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(advantages, returns): `A_t = sum_l (gamma lam)^l d_(t+l)`, `d_t = r_t + gamma V_(t+1) - V_t` (Schulman et al., arXiv
    1506.02438, eq. 16), and `A + V`. V is 0 behind the last trained token of a row."""
    reward, value = _pack(rewards, mask, lengths), _pack(values, mask, lengths)
    following = torch.cat([value[:, 1:], value.new_zeros(len(value), 1)], dim=1)
    advantages = _discounted(reward + gamma * following - value, gamma * lam)
    return _unpack(advantages, mask, lengths), _unpack(advantages + value, mask, lengths)


def at_last_token(values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """[rows] -> [tokens]: each row's value at its last trained token, else 0: where a row's reward is earned."""
    row = _row_of_token(lengths)
    place = torch.arange(len(mask), device=mask.device)
    last = place.new_full((len(lengths),), -1).scatter_reduce(0, row, torch.where(mask, place, -1), "amax")
    return torch.where(place == last[row], values[row], 0.0)


def turn_returns(step_rewards: Tensor, gamma: float = 1.0) -> Tensor:
    """[..., turns] `G_k = r_k + gamma G_(k+1)` of the rewards that an environment credits turns with; NaN stays where a
    turn is missing (GiGPO, arXiv 2505.10978)."""
    there = ~torch.isnan(step_rewards)
    flat = torch.where(there, step_rewards, 0.0).reshape(-1, step_rewards.shape[-1])
    return torch.where(there, _discounted(flat, gamma).reshape(step_rewards.shape), torch.nan)


def _discounted(values: Tensor, factor: float) -> Tensor:
    """[rows, steps] backward sums."""
    total, sums = values.new_zeros(len(values)), []
    for step in range(values.shape[1] - 1, -1, -1):
        total = values[:, step] + factor * total
        sums.append(total)
    return torch.stack(sums[::-1], dim=1) if sums else values


def _pack(values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """[rows, most trained tokens of a row]: trained tokens moved together, 0 behind them."""
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
    """Row and place within it of each trained token."""
    row = _row_of_token(lengths)[mask]
    trained = torch.zeros_like(lengths).index_add(0, row, torch.ones_like(row))
    place = torch.arange(len(row), device=mask.device) - (trained.cumsum(0) - trained)[row]
    return row, place, int(trained.max()) if len(trained) else 0


def _row_of_token(lengths: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
