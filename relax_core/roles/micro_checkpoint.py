# SPDX-License-Identifier: Apache-2.0
"""Micro-checkpoints: the newest state of a role's ranks in the machine's shared memory, between checkpoints on disk.

Ranks that died, or whose rows were lost under them, are restored from it, so that few steps are repeated. It ends with the
run or the machine: a run is resumed from checkpoints on disk alone.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from relax_core.api.errors import InfrastructureError
from relax_core.api.events import Logged
from relax_core.api.role import Resume
from relax_core.api.weights import Version
from relax_core.config.run_config import RunContext
from relax_core.roles.rank_group import RankGroup, TrainerDeviceLease
from relax_core.tensor_files.mapped_files import claim, memory_directory, sweep_abandoned

FOLDER = "micro-checkpoints"


class MicroCheckpoints:
    """One role's state in memory: `due -> saved beside the one before -> newest -> replaced | forgotten`.

    Invariants:
    - The newest is whole, and of a committed step that no rollback has undone.
    - The ledger takes no notice of it: rows of its steps stay provisional, and are kept, until a checkpoint on disk covers
      them. A rollback to it undoes later steps alone.
    - No room for one is a warning; the run goes on with the one before, or with checkpoints on disk.
    """

    def __init__(self, context: RunContext, role: str) -> None:
        self._context, self._role = context, role
        self._every = context.config.checkpoint.micro_every
        self._newest: Resume | None = None

    async def save(self, trainer: RankGroup, lease: TrainerDeviceLease, version: Version) -> None:
        """Copy the ranks' state of a committed version where it is due; training waits for it."""
        if not self._every or version.step % self._every:
            return
        memory = memory_directory(self._context.run_id)
        if memory is None:
            raise InfrastructureError(
                "checkpoint.micro_every: this machine has no /dev/shm to hold micro-checkpoints; set it to 0"
            )
        if not memory.is_dir():
            sweep_abandoned()
            claim(memory)
        directory = memory / FOLDER / self._role / f"step-{version.step:06d}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            async with lease:
                await lease.train()
                await trainer.call("save", str(directory / "trainer"))
        except (InfrastructureError, OSError) as error:
            if trainer.lost:
                raise
            shutil.rmtree(directory, ignore_errors=True)
            said = f"no micro-checkpoint of step {version.step}: {error}"
            await self._context.run_status.emit(Logged("warning", self._role, said, {}))
            return
        former, self._newest = self._newest, Resume(version.step, str(directory), {})
        if former is not None and former.directory != self._newest.directory:
            shutil.rmtree(former.directory, ignore_errors=True)

    def newest(self, beyond: int) -> Resume | None:
        """Return the newest one where it is of a later step than `beyond`."""
        found = self._newest
        return found if found is not None and found.step > beyond and Path(found.directory).is_dir() else None

    def rewind(self, step: int) -> None:
        """Forget it where it is of a step that was undone."""
        if self._newest is not None and self._newest.step > step:
            self.close()

    def close(self) -> None:
        """Free its memory."""
        if self._newest is not None:
            shutil.rmtree(self._newest.directory, ignore_errors=True)
            self._newest = None
