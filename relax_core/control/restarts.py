# SPDX-License-Identifier: Apache-2.0
"""The decision whether a run that failed restarts by itself, as a whole, from its last checkpoint (`[recovery]`).

It is the second tier of recovery: what a role, a pool or a hub can repair in place never gets here. `control.run` ends what
is left of the run, asks here, and starts it again with `control.prepare.prepare_restart`; the third tier is a person.
"""

from __future__ import annotations

from relax_core.api.errors import DiskFull, InfrastructureError, RelaxError
from relax_core.rpc.waiting import RestartBudget

FIRST_PAUSE_S, PAUSE_FACTOR, MAX_PAUSE_S = 5.0, 4, 60.0
"""Before the second restart in a row, its growth from one to the next, and its bound: a machine may take minutes to be back."""


class RunRestarts:
    """The restarts of one run: `starting -> ready -> failed -> restarting -> ready | failed -> ... | given up`.

    Invariants:
    - Only a fault of the infrastructure is retried, and only after the run was ready once: a first start that fails is more
      likely for a person. A full disk is never retried: each try would train the same steps to fill it again.
    - A run that is being stopped is not restarted.
    - Restarts in a row begin at one step. A checkpoint of a later step than any before gives all of them back, so a run that
      never gets further ends.
    """

    def __init__(self, limit: int, step: int) -> None:
        """`step`: the one that the run begins after."""
        self._budget, self._step = RestartBudget(limit), step
        self._first: RelaxError | None = None
        self._was_ready = False

    @property
    def limit(self) -> int:
        return self._budget.limit

    @property
    def in_a_row(self) -> int:
        """Failures since the run last got further, the present one included."""
        return self._budget.spent

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the restart that was granted last: none before the first in a row."""
        later = self.in_a_row - 2
        return 0.0 if later < 0 else min(FIRST_PAUSE_S * PAUSE_FACTOR**later, MAX_PAUSE_S)

    def ready(self) -> None:
        """Note that every role of the run has left `starting`."""
        self._was_ready = True

    def grant(self, error: RelaxError, saved_step: int, stopping: bool) -> bool:
        """Grant a restart after this error; False where the run ends with `final`. `saved_step`: of its last checkpoint."""
        retried = isinstance(error, InfrastructureError) and not isinstance(error, DiskFull)
        if not retried or stopping or not self._was_ready:
            self._first = None
            return False
        if saved_step > self._step:
            self._step = saved_step
            self._budget.refill()
        if not self._budget.spent:
            self._first = error
        return self._budget.spend()

    def final(self, error: RelaxError) -> RelaxError:
        """Return the error that the run ends with: the first one of those that spent the budget, or the last one itself."""
        if self._first is None or self._first is error:
            return error
        times = f"{self.limit} time{'s' * (self.limit > 1)}"
        got_no_further = f"the run restarted by itself {times}, got no further than step {self._step}"
        return InfrastructureError(f"{self._first}; {got_no_further}, and ended with: {error}")
