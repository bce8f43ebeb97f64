# SPDX-License-Identifier: Apache-2.0
"""Recovery of a trained role: where it goes back to when its ranks are lost, and its policy on updates that are not finite.

Both only decide and tell; ranks, ledger and weights are the role's.
"""

from __future__ import annotations

from pathlib import Path

from relax_core.api.errors import InfrastructureError, RelaxError
from relax_core.api.events import Logged, RoleFailed, RoleRecovered, RolledBack
from relax_core.api.role import Resume
from relax_core.api.trainer import UpdateOutcome, UpdateResult
from relax_core.api.weights import Version
from relax_core.config.run_config import RunContext
from relax_core.roles.checkpoint import complete, read_state
from relax_core.rpc.waiting import RestartBudget

MAX_RETURNS = 3
"""Without a step that had not been reached before."""


class RollbackRequired(RelaxError):
    """Restart the trainer from its last checkpoint: its weights are not worth going on with."""


class Recovery:
    """The returns of one role to its checkpoints, over a run. One that gets further than ever before has all of them again."""

    def __init__(self, context: RunContext, role: str, start: Version) -> None:
        self._context, self._role, self._start = context, role, start
        self._furthest, self._returns = start.step, RestartBudget(MAX_RETURNS)
        self._began = 0.0

    def reached(self, step: int) -> None:
        """Note that a step is committed."""
        if step > self._furthest:
            self._furthest = step
            self._returns.refill()

    async def begin(self, error: RelaxError) -> Resume | None:
        """Find where to go on: a checkpoint, or None for the starting model. Raises `error` once the budget is spent."""
        found = complete(Path(self._context.run_dir) / "checkpoints")
        if not self._returns.spend() or (self._context.resume is not None and not found):
            raise error
        self._began = self._context.clock.now()
        code = error.exit_code if isinstance(error, InfrastructureError) else 1
        await self._context.run_status.emit(RoleFailed(self._role, str(error), code, fatal=False))
        self._context.doing("starting its ranks again")
        return read_state(found[-1]) if found else None

    async def end(self, version: Version, why: RelaxError) -> None:
        """Report that the role goes on at `version`."""
        clock = self._context.clock
        await self._context.run_status.emit(RolledBack(version, str(why)))
        detail = f"ranks started again at step {version.step}"
        await self._context.run_status.emit(RoleRecovered(self._role, clock.now() - self._began, detail))


MAX_SKIPPED = 5
"""Updates in a row that may be skipped before the run stops: more would only spend rows."""
ADVICE = "lower optimizer.lr or look at the rewards of the last steps in samples/"


class NonFinitePolicy:
    """The policy of one trained role on updates whose loss or gradient is NaN or infinite (`optimizer.not_finite`).

    The trainer has not applied such an update. A rollback to the last checkpoint trains the same rows again, so a step that
    comes out the same a second time is skipped.
    """

    def __init__(self, context: RunContext, role: str) -> None:
        self._context, self._role = context, role
        self._skipped = RestartBudget(MAX_SKIPPED)
        self._rolled_back: set[int] = set()

    async def check(self, result: UpdateResult, version: Version) -> UpdateResult:
        """Return the result of an update of the step at `version`. Raises RollbackRequired, or RelaxError to stop the run."""
        if result.outcome is UpdateOutcome.APPLIED:
            self._skipped.refill()
            return result
        rule = self._context.config.optimizer.not_finite
        what = f"{self._role}: an update of step {version.step + 1} had a NaN or infinite loss or gradient"
        if rule == "stop":
            raise RelaxError(f"{what}, and optimizer.not_finite is stop; {ADVICE}")
        if rule == "roll-back" and version.step not in self._rolled_back:
            self._rolled_back.add(version.step)
            raise RollbackRequired(what)
        if not self._skipped.spend():
            raise RelaxError(f"{what}, as {MAX_SKIPPED} before it had in a row; {ADVICE}")
        facts = {"step": version.step + 1, "grad_norm": result.grad_norm, "in_a_row": self._skipped.spent}
        await self._context.run_status.emit(Logged("warning", self._role, f"{what}: it is skipped", facts))
        return result
