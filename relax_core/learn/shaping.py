# SPDX-License-Identifier: Apache-2.0
"""Rewards for the length of a sample, to be added to what its rewards say."""

from __future__ import annotations

from torch import Tensor


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """0 up to `max_length - buffer`, falling to -1 at `max_length`, -1 beyond (DAPO, arXiv 2503.14476, eq. 13)."""
    return (-(lengths.double() - (max_length - buffer)) / buffer).clamp(min=-1.0, max=0.0)
