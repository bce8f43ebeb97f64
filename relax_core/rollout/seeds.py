# SPDX-License-Identifier: Apache-2.0
"""Seeds as pure functions of names: (run seed, group, sample, attempt, turn). Nothing here draws or remembers.

Each step is splitmix64's finalizer over a running state, so that neighbouring names give unrelated seeds.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def sample_seed(run_seed: int, group: int, sample: int, retry: int = 0) -> int:
    """The seed of one attempt at one place of a group, below 2**63."""
    return _mix(_mix(_mix(_mix(0, run_seed), group), sample), retry) >> 1


def turn_seed(sample_seed: int, turn: int) -> int:
    """The seed of one turn of a sample, below 2**63."""
    return _mix(_mix(1, sample_seed), turn) >> 1


def branch_seed(seed: int, turn: int, branch: int) -> int:
    """What turns of a branch are seeded from: independent of the order in which branches happen to run."""
    return _mix(_mix(_mix(2, seed), turn), branch) >> 1


def _mix(state: int, value: int) -> int:
    z = (state + _GAMMA + (value & _MASK)) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
