# SPDX-License-Identifier: Apache-2.0
"""A budget of failures in a row: restarts of a worker, returns to a checkpoint, updates that were skipped.

It only counts. The owner decides what is a failure, what is progress, and what ends when the budget is spent.
"""

from __future__ import annotations

import math
from collections import deque


class RestartBudget:
    """`limit` failures are forgiven, one more is not; progress and time give them back.

    Invariants:
    - `refill` forgives all that was spent: the owner got further than before.
    - A failure longer ago than `window_s` no longer counts; without a window only progress refills.
    """

    def __init__(self, limit: int, window_s: float = math.inf) -> None:
        self.limit, self._window_s = limit, window_s
        self._failures: deque[float] = deque()

    @property
    def spent(self) -> int:
        """Failures that count at present, the last one included."""
        return len(self._failures)

    def spend(self, now: float = 0.0) -> bool:
        """Count a failure; False when it is one more than the budget forgives. Without a window `now` says nothing."""
        while self._failures and now - self._failures[0] > self._window_s:
            self._failures.popleft()
        self._failures.append(now)
        return len(self._failures) <= self.limit

    def refill(self) -> None:
        """Forgive every failure so far."""
        self._failures.clear()
