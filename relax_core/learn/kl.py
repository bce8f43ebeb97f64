# SPDX-License-Identifier: Apache-2.0
"""Estimators of KL(policy || reference) from the policy's own samples, [tokens] each (Schulman, 2020).

k1 is unbiased and may be negative; k2 is biased with low variance; k3 is unbiased in value and never negative.
"""

from __future__ import annotations

from torch import Tensor


def kl_k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """`log p - log q`."""
    return log_probs - ref_log_probs


def kl_k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """`(log p - log q)^2 / 2`."""
    return (log_probs - ref_log_probs).square() / 2


def kl_k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """`q/p - log(q/p) - 1`."""
    log_ratio = ref_log_probs - log_probs
    return log_ratio.exp() - log_ratio - 1
