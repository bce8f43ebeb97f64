# SPDX-License-Identifier: Apache-2.0
"""The names that this package exports, and the module of each; they load on first use."""

# fmt: off
# isort: skip_file
from .advantages import (
    STD_EPS as STD_EPS, at_last_token as at_last_token, beyond_baseline as beyond_baseline,
    context_credit as context_credit, gae as gae, group_mean
    as group_mean, group_mean_relative as group_mean_relative, group_mean_std as group_mean_std, informative as
    informative, leave_one_out as leave_one_out, length_weighted_baseline as length_weighted_baseline, of_samples as
    of_samples, of_turns as of_turns, over_batch_std as
    over_batch_std, overlong_penalty as overlong_penalty, per_reward as per_reward, reward_to_go as reward_to_go,
    step_credit as step_credit, token_rewards as token_rewards,
    turn_returns as turn_returns, whiten as whiten,
)
from .counts import (
    Denominators as Denominators, aggregate as aggregate, charged_to as charged_to, check_lag as check_lag, count
    as count, mean as mean, merge_metrics as merge_metrics, reduce as reduce, rows_with_gradient as rows_with_gradient,
    sample_tokens as sample_tokens,
)
from .groups import Grouping as Grouping
from .logits import Wanted as Wanted, score_distribution as score_distribution
from .off_policy import (
    Mismatch as Mismatch, importance_ratio as importance_ratio, importance_weight as importance_weight, log_ratio
    as log_ratio, mask_outside as mask_outside, off_policy_sequence_mask as off_policy_sequence_mask,
    second_moment_mask as second_moment_mask, truncate as truncate, within as within,
)
from .packed import Outputs as Outputs, PackedBatch as PackedBatch, prepared_columns as prepared_columns
from .plan import SCHEDULES as SCHEDULES, lr_factor as lr_factor, plan_micro_batches as plan_micro_batches
from .policy_gradient import (
    ClippedOptions as ClippedOptions, ClippedPolicyGradient as ClippedPolicyGradient, PlainOptions as PlainOptions,
    PlainPolicyGradient as PlainPolicyGradient, PolicyGradient as PolicyGradient, PolicyGradientOptions as
    PolicyGradientOptions, Surrogate as Surrogate,
)
from .losses import (
    binary_divergence as binary_divergence, capped as capped, clipped as clipped, clipped_surrogate as clipped_surrogate,
    clipped_value_loss as clipped_value_loss, clipped_weight as clipped_weight, kl_k1 as kl_k1,
    kl_k2 as kl_k2, kl_k3 as kl_k3, kl_unbiased as kl_unbiased, less_divergence as less_divergence,
    moves_away as moves_away, pair_metrics as pair_metrics, preference as preference, reinforce as reinforce,
    sampled_credit as sampled_credit, sampled_divergence as sampled_divergence, soft_gate as soft_gate,
    token_divergence as token_divergence, with_rest as with_rest,
)
