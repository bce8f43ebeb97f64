# SPDX-License-Identifier: Apache-2.0
"""The lease of the process that controls a run, held in the run's hub: who may command the roles, and for how long.

A controller that a supervisor replaces is killed without the roles noticing: the hub outlives it for the length of the lease,
and the next controller takes the lease over. Nothing is computed here for a controller that nobody would replace.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from relax_core.api.errors import InfrastructureError, StaleFence
from relax_core.api.role import Clock

LEASE_S = 180.0
"""Of silence of the controller: longer than a loaded machine takes to start another one."""
RENEW_S = 2.0
"""Between two renewals, and between two looks of the hub."""
FIRST_TERM = 1


class ControllerLease:
    """The controllers of one start of a run, one after another. A state machine; the hub tells it the time.

        held in term 1 -> taken over, held in term 2 -> ... -> expired

    Invariants:
    - One term is current, and only its holder renews: every word of an earlier one is refused, also after a suspension.
    - A lease that has expired stays so: whoever comes later finds a run that is ending, and takes nothing over.
    """

    def __init__(self, length_s: float, now: float) -> None:
        self.term, self._length_s = FIRST_TERM, length_s
        self._renewed_at, self._expired = now, False

    def renew(self, term: int, now: float) -> None:
        """Note a word of the holder of a term. StaleFence where another one has taken over."""
        self.check(term)
        self._renewed_at = max(now, self._renewed_at)

    def check(self, term: int) -> None:
        """Refuse the holder of a term that is over. Raises StaleFence."""
        if term != self.term:
            raise StaleFence(f"another process controls the run (term {self.term}); this one had term {term}")

    def take_over(self, now: float) -> int:
        """Begin the next term for a successor, and return it. InfrastructureError where the lease has expired."""
        if self.expired(now):
            raise InfrastructureError(f"no process controlled the run for {self._length_s:.0f} s, and it is ending")
        self.term += 1
        self._renewed_at = now
        return self.term

    def expired(self, now: float) -> bool:
        """Tell whether the holder was silent for the length of the lease."""
        self._expired = self._expired or now - self._renewed_at >= self._length_s
        return self._expired


def end_at_expiry(lease: ControllerLease, clock: Clock, end: Callable[[], None]) -> None:
    """Call `end` once the lease has expired, from a thread: an event loop that hangs keeps no run alive."""

    def look() -> None:
        while not lease.expired(clock.now()):
            time.sleep(RENEW_S)
        end()

    threading.Thread(target=look, name="controller-lease", daemon=True).start()
