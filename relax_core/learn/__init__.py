# SPDX-License-Identifier: Apache-2.0
"""What algorithms and trainers are made of: batches, chunk plans, and the parts of a loss. Imports only `api`.

Names load on first use. Counting, planning and lag need numpy alone, so a shell that plans chunks never loads torch;
write `from relax_core import learn` and `learn.clipped_surrogate(...)` to keep an algorithm's file light as well.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "advantages": (
        "STD_EPS",
        "beyond_baseline",
        "group_mean",
        "group_mean_relative",
        "group_mean_std",
        "informative",
        "leave_one_out",
        "length_weighted_baseline",
        "per_reward",
        "whiten",
    ),
    "aggregation": ("aggregate", "per_trajectory"),
    "counts": ("count",),
    "distribution": ("Wanted", "score_distribution"),
    "divergence": ("sampled_credit", "sampled_divergence", "token_divergence", "with_rest"),
    "gradient": ("rows_with_gradient",),
    "groups": ("Grouping",),
    "kl": ("kl_k1", "kl_k2", "kl_k3", "kl_unbiased", "less_divergence"),
    "lag": ("check_lag",),
    "metrics": ("mean", "merge_metrics"),
    "mismatch": ("Mismatch",),
    "off_policy": (
        "importance_ratio",
        "importance_weight",
        "mask_outside",
        "off_policy_sequence_mask",
        "second_moment_mask",
        "truncate",
        "within",
    ),
    "outputs": ("Outputs",),
    "packed": ("PackedBatch",),
    "plan": ("plan_micro_batches",),
    "prepared": ("prepared_columns",),
    "policy_gradient": ("PolicyGradient", "PolicyGradientOptions", "Surrogate"),
    "pairs": ("pair_metrics", "preference"),
    "ratio": ("log_ratio",),
    "reduction": ("Denominators", "reduce"),
    "returns": ("at_last_token", "gae", "reward_to_go", "turn_returns"),
    "schedule": ("SCHEDULES", "lr_factor"),
    "score": ("score_tokens",),
    "shaping": ("overlong_penalty",),
    "surrogate": (
        "binary_divergence",
        "clipped",
        "clipped_surrogate",
        "clipped_weight",
        "moves_away",
        "reinforce",
        "soft_gate",
    ),
    "turns": ("of_turns", "step_credit"),
    "value": ("clipped_value_loss",),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"relax_core.learn has no {name!r}; it exports {', '.join(sorted(_MODULE))}")
    return getattr(importlib.import_module(f"relax_core.learn.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_MODULE)


if TYPE_CHECKING:
    from relax_core.learn.advantages import STD_EPS as STD_EPS
    from relax_core.learn.advantages import beyond_baseline as beyond_baseline
    from relax_core.learn.advantages import group_mean as group_mean
    from relax_core.learn.advantages import group_mean_relative as group_mean_relative
    from relax_core.learn.advantages import group_mean_std as group_mean_std
    from relax_core.learn.advantages import informative as informative
    from relax_core.learn.advantages import leave_one_out as leave_one_out
    from relax_core.learn.advantages import length_weighted_baseline as length_weighted_baseline
    from relax_core.learn.advantages import per_reward as per_reward
    from relax_core.learn.advantages import whiten as whiten
    from relax_core.learn.aggregation import aggregate as aggregate
    from relax_core.learn.aggregation import per_trajectory as per_trajectory
    from relax_core.learn.counts import count as count
    from relax_core.learn.distribution import Wanted as Wanted
    from relax_core.learn.distribution import score_distribution as score_distribution
    from relax_core.learn.divergence import sampled_credit as sampled_credit
    from relax_core.learn.divergence import sampled_divergence as sampled_divergence
    from relax_core.learn.divergence import token_divergence as token_divergence
    from relax_core.learn.divergence import with_rest as with_rest
    from relax_core.learn.gradient import rows_with_gradient as rows_with_gradient
    from relax_core.learn.groups import Grouping as Grouping
    from relax_core.learn.kl import kl_k1 as kl_k1
    from relax_core.learn.kl import kl_k2 as kl_k2
    from relax_core.learn.kl import kl_k3 as kl_k3
    from relax_core.learn.kl import kl_unbiased as kl_unbiased
    from relax_core.learn.kl import less_divergence as less_divergence
    from relax_core.learn.lag import check_lag as check_lag
    from relax_core.learn.metrics import mean as mean
    from relax_core.learn.metrics import merge_metrics as merge_metrics
    from relax_core.learn.mismatch import Mismatch as Mismatch
    from relax_core.learn.off_policy import importance_ratio as importance_ratio
    from relax_core.learn.off_policy import importance_weight as importance_weight
    from relax_core.learn.off_policy import mask_outside as mask_outside
    from relax_core.learn.off_policy import off_policy_sequence_mask as off_policy_sequence_mask
    from relax_core.learn.off_policy import second_moment_mask as second_moment_mask
    from relax_core.learn.off_policy import truncate as truncate
    from relax_core.learn.off_policy import within as within
    from relax_core.learn.outputs import Outputs as Outputs
    from relax_core.learn.packed import PackedBatch as PackedBatch
    from relax_core.learn.pairs import pair_metrics as pair_metrics
    from relax_core.learn.pairs import preference as preference
    from relax_core.learn.plan import plan_micro_batches as plan_micro_batches
    from relax_core.learn.policy_gradient import PolicyGradient as PolicyGradient
    from relax_core.learn.policy_gradient import PolicyGradientOptions as PolicyGradientOptions
    from relax_core.learn.policy_gradient import Surrogate as Surrogate
    from relax_core.learn.prepared import prepared_columns as prepared_columns
    from relax_core.learn.ratio import log_ratio as log_ratio
    from relax_core.learn.reduction import Denominators as Denominators
    from relax_core.learn.reduction import reduce as reduce
    from relax_core.learn.returns import at_last_token as at_last_token
    from relax_core.learn.returns import gae as gae
    from relax_core.learn.returns import reward_to_go as reward_to_go
    from relax_core.learn.returns import turn_returns as turn_returns
    from relax_core.learn.schedule import SCHEDULES as SCHEDULES
    from relax_core.learn.schedule import lr_factor as lr_factor
    from relax_core.learn.score import score_tokens as score_tokens
    from relax_core.learn.shaping import overlong_penalty as overlong_penalty
    from relax_core.learn.surrogate import binary_divergence as binary_divergence
    from relax_core.learn.surrogate import clipped as clipped
    from relax_core.learn.surrogate import clipped_surrogate as clipped_surrogate
    from relax_core.learn.surrogate import clipped_weight as clipped_weight
    from relax_core.learn.surrogate import moves_away as moves_away
    from relax_core.learn.surrogate import reinforce as reinforce
    from relax_core.learn.surrogate import soft_gate as soft_gate
    from relax_core.learn.turns import of_turns as of_turns
    from relax_core.learn.turns import step_credit as step_credit
    from relax_core.learn.value import clipped_value_loss as clipped_value_loss
