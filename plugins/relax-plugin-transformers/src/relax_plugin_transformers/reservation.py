# SPDX-License-Identifier: Apache-2.0
"""Rows and columns that a cache reserves; the cache and the estimates of its memory count alike.

This module does not import torch, so that an estimate does not load it.
"""

from __future__ import annotations

AHEAD = 64
"""Columns that a new cache reserves for tokens that are not yet sampled."""
_MULTIPLE = 16
"""Number of columns of which each reservation is a multiple."""


def rounded(columns: int) -> int:
    """Return the number of columns that a cache reserves if it needs `columns`."""
    return -(-columns // _MULTIPLE) * _MULTIPLE


def grown(reserved: int, needed: int) -> int:
    """Return the rows or columns to reserve if `needed` must fit; a reservation grows at least by half."""
    return max(needed, reserved * 3 // 2) if needed > reserved else reserved
