# SPDX-License-Identifier: Apache-2.0
"""Values of samples that show degenerate policies: lengths of completions, and repetition. No IO."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relax_core.api.trajectory import Outcome, Trajectory

NGRAM = 8
"""Length in tokens of the sequences whose repetition counts. Ordinary text rarely repeats so many tokens; a loop does."""
_FACTORS = np.random.default_rng(NGRAM).integers(1, 2**63, NGRAM, dtype=np.uint64) | np.uint64(1)
"""Odd factors, one for each place in a sequence, whose sum of products identifies the sequence."""


def completion_values(trajectories: Sequence[Trajectory]) -> dict[str, tuple[float, ...]]:
    """Return the values of each sample that `completion_metrics` summarizes. A completion is all that a sample sampled."""
    lengths = tuple([trajectory.num_sampled for trajectory in trajectories])
    outcomes = [trajectory.outcome for trajectory in trajectories]
    counts = [_repeated(trajectory) for trajectory in trajectories]
    return {
        "length": lengths,
        "finished": tuple([length for length, how in zip(lengths, outcomes, strict=True) if how is Outcome.FINISHED]),
        "truncated": tuple([float(how is Outcome.TRUNCATED) for how in outcomes]),
        "repeated": tuple(repeated / total for repeated, total in counts if total),
    }


def _repeated(trajectory: Trajectory) -> tuple[int, int]:
    """Count a sample's n-grams that occurred before in the same turn, and all of its n-grams."""
    repeated = total = 0
    for node in trajectory.forest:
        if node.sampled and len(node.tokens) >= NGRAM:
            repeated += repeated_ngrams(node.tokens)
            total += len(node.tokens) - NGRAM + 1
    return repeated, total


def repeated_ngrams(tokens: Sequence[int]) -> int:
    """Count the sequences of `NGRAM` tokens that occurred before, at an earlier place in `tokens`."""
    count = len(tokens) - NGRAM + 1
    if count < 2:
        return 0
    ids = np.asarray(tokens).astype(np.uint64)
    keys = np.zeros(count, np.uint64)
    for place, factor in enumerate(_FACTORS):
        keys += ids[place : place + count] * factor  # modulo 2^64
    return count - len(np.unique(keys))
