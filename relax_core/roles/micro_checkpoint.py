# SPDX-License-Identifier: Apache-2.0
"""Micro-checkpoints: the newest state of a role's ranks in the machine's shared memory, between checkpoints on disk.

Ranks that died, or whose rows were lost under them, are restored from it, so that few steps are repeated. It ends with the
run or the machine: a run is resumed from checkpoints on disk alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from relax_core.api.errors import InfrastructureError
from relax_core.api.events import Logged
from relax_core.api.role import Resume
from relax_core.api.weights import Version
from relax_core.config.run_config import RunContext
from relax_core.roles.rank_group import RankGroup, TrainerDeviceLease
from relax_core.tensor_files.mapped_files import claim, memory_directory, sweep_abandoned

FOLDER = "micro-checkpoints"
PART, WHOLE = "trainer", "whole"
"""What the ranks of a copy write, and the mark that all of them have."""


class MicroCheckpoints:
    """One role's state in memory: `due -> saved beside the one before -> newest -> replaced | abandoned`.

    Invariants:
    - A copy that is found is whole, and of a step of the actor's present lineage: its name has the actor's incarnation, and
      the bus knows which steps a rollback undid. So each role finds its own, and none is told of another's.
    - A copy outlives the role's own process; it ends with the run.
    - The ledger takes no notice of it: rows of its steps stay provisional, and are kept, until a checkpoint on disk covers
      them. A rollback to it undoes later steps alone.
    - No room for one is a warning; the run goes on with the one before, or with checkpoints on disk. So are ranks on other
      machines than the role's process, whose memory that is not.
    """

    def __init__(self, context: RunContext, role: str) -> None:
        self._context, self._role = context, role
        self._every = context.config.checkpoint.micro_every
        self._memory = memory_directory(context.run_id)

    async def save(self, trainer: RankGroup, lease: TrainerDeviceLease, version: Version) -> None:
        """Copy the ranks' state where it is due, as it is after `version.step` steps of the actor; training waits for it."""
        if not self._every or version.step % self._every:
            return
        if not trainer.is_local:
            self._every = 0
            said = f"no micro-checkpoints: ranks of {self._role} are on other machines than its own process"
            await self._context.run_status.emit(Logged("warning", self._role, said, {}))
            return
        if self._memory is None:
            raise InfrastructureError(
                "checkpoint.micro_every: this machine has no /dev/shm to hold micro-checkpoints; set it to 0"
            )
        if not self._memory.is_dir():
            sweep_abandoned()
            claim(self._memory)
        directory = self._memory / FOLDER / self._role / f"step-{version.step:06d}-{version.incarnation}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            async with lease:
                await lease.train()
                (directory / WHOLE).unlink(missing_ok=True)
                await trainer.call("save", str(directory / PART))
            (directory / WHOLE).touch()
        except (InfrastructureError, OSError) as error:
            if trainer.lost:
                raise
            shutil.rmtree(directory, ignore_errors=True)
            said = f"no micro-checkpoint of step {version.step}: {error}"
            await self._context.run_status.emit(Logged("warning", self._role, said, {}))
            return
        if (
            await self._context.bus.version()
        ).incarnation != version.incarnation:  # of which lineage it is, nobody knows
            shutil.rmtree(directory, ignore_errors=True)
        for path, _ in self._found():
            if path != directory:
                shutil.rmtree(path, ignore_errors=True)

    async def newest(self, trainer: RankGroup, beyond: int) -> Resume | None:
        """Return the newest one that no rollback has undone, where the ranks reach it and it is later than step `beyond`."""
        if not trainer.is_local:
            return None
        bus, done = self._context.bus, (await self._context.bus.version()).step
        for path, version in self._found():
            if beyond < version.step <= done and (path / WHOLE).exists() and not await bus.abandoned(version):
                return Resume(version.step, str(path), {})
        return None

    def close(self) -> None:
        """Free its memory."""
        if self._memory is not None:
            shutil.rmtree(self._memory / FOLDER / self._role, ignore_errors=True)

    def _found(self) -> Iterator[tuple[Path, Version]]:
        """Yield the copies, newest first, with the version of the actor that each is of."""
        folder = self._memory / FOLDER / self._role if self._memory is not None and self._every else None
        for path in sorted(folder.glob("step-*"), reverse=True) if folder is not None else ():
            _, step, incarnation = path.name.split("-")
            yield path, Version("actor", int(incarnation), int(step))
