# SPDX-License-Identifier: Apache-2.0
"""Uniform numbers by (seed, position): splitmix64 as a counter-based hash, vectorised.

No state: a request draws the same numbers whatever runs beside it, and a continuation elsewhere goes on with them.
"""

from __future__ import annotations

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_A, _B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SEED_MASK = (1 << 64) - 1


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 in [0, 1 - 2^-52] for uint64 seeds and non-negative positions, [rows]."""
    counters = (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
    drawn: np.ndarray = (_mix(_mix(seeds) + counters) >> np.uint64(12)).astype(np.float64) * 2.0**-52
    return drawn


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * _A
    z = (z ^ (z >> np.uint64(27))) * _B
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed
