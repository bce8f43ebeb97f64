# SPDX-License-Identifier: Apache-2.0
"""Credit of tokens and turns: what follows, discounted, and its advantage over a critic's values.

Token quantities are packed [tokens], rows one after another by `lengths` [rows]; tokens with mask 0 (prompts,
observations) are stepped over: neither a reward nor a step of time.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
