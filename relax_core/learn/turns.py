# SPDX-License-Identifier: Apache-2.0
"""Credit of turns: [groups, samples, turns], with the rewards and states that the environment gave (`Groups`).

What a turn earned from there on is `returns.turn_returns`; here it is compared with that of other turns that began in the
same state, and brought to tokens. A turn that is missing is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relax_core.api.algorithm import Groups
from relax_core.learn.advantages import STD_EPS


def step_credit(returns: Tensor, states: Tensor, valid: Tensor, std: bool = True, eps: float = STD_EPS) -> Tensor:
    """`(G - mean(G)) / (std(G) + eps)` over the turns of a group that began in an equal state, or without the division
    (GiGPO, arXiv 2505.10978, eq. 7). 0 where no other turn began there, or all earned the same; NaN stays NaN."""
    there = valid[..., None] & ~torch.isnan(returns)
    group = torch.arange(len(returns), device=returns.device)[:, None, None].expand_as(returns)
    anchors = torch.stack([group[there], states[there]], dim=1)
    _, anchor, turns = torch.unique(anchors, dim=0, return_inverse=True, return_counts=True)
    earned = returns[there]

    def over(values: Tensor, how: str) -> Tensor:
        """Of each anchor, for each of its turns."""
        return values.new_zeros(len(turns)).scatter_reduce(0, anchor, values, how, include_self=False)[anchor]

    apart = over(earned, "amax") > over(earned, "amin")
    credit = torch.where(apart, earned - over(earned, "mean"), 0.0)
    if std:
        variance = over(credit.square(), "sum") / (turns[anchor] - 1).clamp(min=1)
        credit = credit / (variance.sqrt() + eps)
    return (returns * 0.0).masked_scatter(there, credit)


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
