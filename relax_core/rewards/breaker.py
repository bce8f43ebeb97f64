# SPDX-License-Identifier: Apache-2.0
"""The circuit breaker: ends a run whose samples fail alike, instead of replacing them for ever.

A failed sample is dropped and its group is issued again. So an environment, a reward or a model that always fails would
keep a run busy without training anything.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from typing import TypeAlias

FIRST = 16
FIRST_GROUPS = 2
"""One task that can't be played fails all samples of its group, so the samples of one group alone prove nothing."""
WINDOW = 256
LIMIT = 0.5
Fault: TypeAlias = tuple[str, str]
"""(kind, place) of a failure; failures with the same kind and place are alike."""


class CircuitBreaker:
    """A detector of repeated faults, without IO and clock: `closed -> open`.

    It opens at a failed sample in one of three cases:

    - All samples so far failed alike: at least `first` samples of at least two groups.
    - More than the share `limit` of the last `window` samples failed alike.
    - All of the last `window` samples failed, alike or not.

    Samples in play may still succeed, and samples that fail end sooner than those that succeed. So `first` and `window`
    are at least the number of samples in play.

    Invariants:
    - `_counts` counts the faults in `_recent`, the newest samples.
    """

    def __init__(self, first: int = FIRST, window: int = WINDOW, limit: float = LIMIT) -> None:
        self._first, self._window, self._limit = first, window, limit
        self._seen = 0
        self._groups: set[Hashable] = set()
        """The first groups, at most FIRST_GROUPS."""
        self._recent: deque[Fault | None] = deque()
        self._counts: Counter[Fault] = Counter()

    def record(self, fault: Fault | None, group: Hashable = None, in_play: int = 0) -> str:
        """Record one sample of a group: its fault, or None if the sample was judged.

        `in_play`: number of samples that have started and not ended. Return which samples failed if the breaker opens,
        such as `alike on the first 16 samples`, or "".
        """
        self._seen += 1
        if len(self._groups) < FIRST_GROUPS:
            self._groups.add(group)
        self._recent.append(fault)
        size = max(self._window, in_play)
        while len(self._recent) > size:
            if (oldest := self._recent.popleft()) is not None:
                self._counts[oldest] -= 1
        if fault is None:
            return ""
        self._counts[fault] += 1
        alike = self._counts[fault]
        if alike == self._seen >= max(self._first, in_play) and len(self._groups) >= FIRST_GROUPS:
            return f"alike on the first {alike} samples"
        if alike > self._limit * size:
            return f"alike on {alike} of the last {size} samples"
        return f"on all of the last {size} samples, in several ways" if self._counts.total() == size else ""

    def failing(self) -> list[tuple[Fault, int]]:
        """Return the faults of the newest samples with their counts, the most frequent first."""
        return [(fault, count) for fault, count in self._counts.most_common() if count]

    @property
    def size(self) -> int:
        """Number of newest samples that `failing` covers."""
        return len(self._recent)
