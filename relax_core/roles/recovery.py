# SPDX-License-Identifier: Apache-2.0
"""Where a trained role goes back to when its ranks are lost, or its guard says so, and how often it may.

It only decides and tells; ranks, ledger and weights are the role's. A run that gets further than ever before has all
its returns again.
"""

from __future__ import annotations

from pathlib import Path

from relax_core.api.errors import InfrastructureError, RelaxError
from relax_core.api.events import RoleFailed, RoleRecovered, RolledBack
from relax_core.api.role import Context, Resume
from relax_core.api.version import Version
from relax_core.roles.checkpoint import complete, read_state

MAX_RETURNS = 3
"""Without a step that had not been reached before."""


class GoBack(RelaxError):
    """Restart the trainer from its last checkpoint: its weights are not worth going on with."""


class Recovery:
    """Of one role, over a run."""

    def __init__(self, context: Context, role: str, start: Version) -> None:
        self._context, self._role, self._start = context, role, start
        self._furthest, self._returns = start.step, 0
        self._began = 0.0

    def reached(self, step: int) -> None:
        """A step is committed."""
        if step > self._furthest:
            self._furthest, self._returns = step, 0

    async def begin(self, error: RelaxError) -> Resume | None:
        """Where to go on: a checkpoint, or None for the model that the run started with. Raises `error` where it may not."""
        found = complete(Path(self._context.run_dir) / "checkpoints")
        self._returns += 1
        if self._returns > MAX_RETURNS or (self._context.resume is not None and not found):
            raise error
        self._began = self._context.clock.now()
        code = error.exit_code if isinstance(error, InfrastructureError) else 1
        await self._context.board.emit(RoleFailed(self._role, str(error), code, fatal=False))
        self._context.doing("starting its ranks again")
        return read_state(found[-1]) if found else None

    async def end(self, version: Version, why: RelaxError) -> None:
        """The role goes on at `version`."""
        clock = self._context.clock
        await self._context.board.emit(RolledBack(version, str(why)))
        detail = f"ranks started again at step {version.step}"
        await self._context.board.emit(RoleRecovered(self._role, clock.now() - self._began, detail))
