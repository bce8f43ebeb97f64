# SPDX-License-Identifier: Apache-2.0
"""Regular exports of a run: its model as a Hugging Face folder every few steps, while the run trains."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from relax_core.api.events import ExportSaved
from relax_core.config.run_config import RunContext
from relax_core.observe.files import disk_errors
from relax_core.roles.checkpoint import step_of
from relax_core.roles.rank_group import RankGroup

FOLDER = "exports"
OURS = re.compile(r"step-[0-9]+|\.step-[0-9]+\..*")
"""Names of exports and of folders that a trainer has not finished."""
WHOLE = "config.json"
"""File without which no library loads an export; deleted first, so that a half-deleted folder is not an export."""


class Exports:
    """The writer of `exports/step-N`, which keeps the newest `export.keep` exports.

    States of an export: due, written under another name, renamed to `step-N`, deleted.

    Invariants:
    - A folder `step-N` with `config.json` is complete: the trainer writes to another name and renames the folder.
    - Its weights are those that the run trains on from: exports of undone steps are deleted before the run continues.
    """

    def __init__(self, context: RunContext, trainer: RankGroup) -> None:
        self._context, self._trainer = context, trainer
        self._root = Path(context.run_dir) / FOLDER

    def due(self, step: int) -> bool:
        """Return True at each regular step. The last step is exported as `export/` instead."""
        every = self._context.config.export.every
        return every > 0 and step % every == 0 and step < self._context.config.steps

    async def write(self, step: int) -> None:
        """Write the export of the present weights, then delete old exports. The caller holds the device lease."""
        context, start = self._context, self._context.clock.now()
        folder = self._root / f"step-{step:06d}"
        context.doing("exporting", step=step)
        with context.changing_files():
            pass  # raise if the run was started again; the export itself is too long for this block
        await self._trainer.call("export", str(folder))
        seconds = round(context.clock.now() - start, 3)
        await context.run_status.emit(ExportSaved(step, str(folder), final=False, seconds=seconds))
        self._delete(self.written()[: -context.config.export.keep])

    def undo(self, step: int) -> None:
        """Delete the exports of steps after `step`, and what killed processes left."""
        if self._root.is_dir():
            kept = {path for path in self.written() if step_of(path) <= step}
            self._delete(path for path in self._root.iterdir() if path not in kept and OURS.fullmatch(path.name))

    def written(self) -> list[Path]:
        """Return the complete exports, oldest first."""
        found = (path for path in self._root.glob("step-*") if OURS.fullmatch(path.name))
        return sorted((path for path in found if (path / WHOLE).is_file()), key=step_of)

    def _delete(self, folders: Iterable[Path]) -> None:
        with self._context.changing_files(), disk_errors(self._root):
            for path in folders:
                (path / WHOLE).unlink(missing_ok=True)
                shutil.rmtree(path)
