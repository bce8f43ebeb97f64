# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: trainer, ledger and random state in one directory that appears whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from relax_core.api.errors import ConfigError, InfrastructureError
from relax_core.api.role import Context, Resume
from relax_core.api.version import Version
from relax_core.roles.trainer_group import TrainerGroup

SCHEMA = 1


class Checkpoints:
    """Writes them when due and keeps the newest few."""

    def __init__(self, context: Context, trainer: TrainerGroup) -> None:
        self._context, self._trainer = context, trainer
        self._root = Path(context.run_dir) / "checkpoints"

    def due(self, step: int) -> bool:
        every: int = self._context.run.checkpoint.every
        return every > 0 and step % every == 0

    async def save(self, version: Version) -> str:
        """The directory of the finished checkpoint. A full disk leaves the former ones as they were."""
        final = self._root / f"step-{version.step:06d}"
        partial = self._root / f".partial-{version.step:06d}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            await self._trainer.call("save", str(partial / "trainer"))
            await self._context.bus.checkpoint(version.step, str(partial))
            self._write_state(partial, version)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)
        except (OSError, InfrastructureError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            said = isinstance(error, InfrastructureError)
            why = str(error) if said else f"{getattr(error, 'strerror', None) or error}; free space"
            raise InfrastructureError(
                f"checkpoint {final}: {why}, then `relax resume {self._context.run_dir}`"
            ) from error
        self._prune()
        return str(final)

    def _write_state(self, directory: Path, version: Version) -> None:
        state = {"schema": SCHEMA, "step": version.step, "incarnation": version.incarnation}
        (directory / "state.json").write_text(json.dumps(state))

    def _prune(self) -> None:
        keep: int = self._context.run.checkpoint.keep
        for old in complete(self._root)[:-keep] if keep else []:
            shutil.rmtree(old, ignore_errors=True)


def complete(root: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    found = [path for path in root.glob("step-*") if (path / "state.json").is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def newest(run_dir: Path) -> Resume:
    """Where a run continues. ConfigError when it has no checkpoint."""
    found = complete(run_dir / "checkpoints")
    if not found:
        raise ConfigError("run", str(run_dir), "it has no complete checkpoint to resume from; start it anew")
    state: dict[str, Any] = json.loads((found[-1] / "state.json").read_text())
    return Resume(state["step"], str(found[-1]), state)
