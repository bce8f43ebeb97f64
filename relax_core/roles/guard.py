# SPDX-License-Identifier: Apache-2.0
"""What is done about an update whose loss or gradient is NaN or infinite: `optimizer.not_finite` says. All of it is told.

The trainer has not applied such an update. Going back to the last checkpoint trains the same rows again, so one that
comes out the same a second time is skipped.
"""

from __future__ import annotations

from relax_core.api.errors import RelaxError
from relax_core.api.events import Logged
from relax_core.api.role import Context
from relax_core.api.trainer import UpdateOutcome, UpdateResult
from relax_core.api.version import Version
from relax_core.roles.recovery import GoBack

MAX_SKIPPED = 5
"""Updates in a row that may be skipped before the run stops: more would only spend rows."""
ADVICE = "lower optimizer.lr or look at the rewards of the last steps in samples/"


class Guard:
    """Of one trained role, over a run."""

    def __init__(self, context: Context, role: str) -> None:
        self._context, self._role = context, role
        self._skipped = 0
        self._gone_back: set[int] = set()

    async def judge(self, result: UpdateResult, version: Version) -> UpdateResult:
        """The result, of an update of the step that starts at `version`. Raises GoBack, or RelaxError where the run stops."""
        if result.outcome is UpdateOutcome.APPLIED:
            self._skipped = 0
            return result
        rule: str = self._context.run.optimizer.not_finite
        what = f"{self._role}: an update of step {version.step + 1} had a NaN or infinite loss or gradient"
        if rule == "stop":
            raise RelaxError(f"{what}, and optimizer.not_finite is stop; {ADVICE}")
        if rule == "roll-back" and version.step not in self._gone_back:
            self._gone_back.add(version.step)
            raise GoBack(what)
        self._skipped += 1
        if self._skipped > MAX_SKIPPED:
            raise RelaxError(f"{what}, as {MAX_SKIPPED} before it had in a row; {ADVICE}")
        facts = {"step": version.step + 1, "grad_norm": result.grad_norm, "in_a_row": self._skipped}
        await self._context.board.emit(Logged("warning", self._role, f"{what}: it is skipped", facts))
        return result
