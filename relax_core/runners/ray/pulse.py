# SPDX-License-Identifier: Apache-2.0
"""The pulse of a role's loop: the loop beats, others ask from another thread whether it still turns."""

from __future__ import annotations

from relax_core.api.clock import Clock
from relax_core.api.errors import InfrastructureError

LIMIT_S = 60.0
"""A loop that has not turned for this long is stuck: work that takes longer belongs into a worker or a thread."""


class Pulse:
    """One loop's."""

    def __init__(self, role: str, clock: Clock) -> None:
        self._role, self._clock = role, clock
        self._last = clock.now()

    def beat(self) -> None:
        """From within the loop."""
        self._last = self._clock.now()

    def check(self) -> None:
        """Raises InfrastructureError where the loop stands still."""
        still = self._clock.now() - self._last
        if still > LIMIT_S:
            raise InfrastructureError(f"role {self._role}: its loop has not turned for {still:.0f} s")
