# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: trainer, ledger and random state in one directory that appears whole or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax_core.api.errors import ConfigError, InfrastructureError
from relax_core.api.events import CheckpointSaved
from relax_core.api.role import Resume
from relax_core.api.weights import Version
from relax_core.config.run_config import RunContext
from relax_core.roles.rank_group import RankGroup, TrainerDeviceLease

SCHEMA = 1
PART_S = 900.0
"""For a role that has the last step still to learn."""
POLL_S = 0.1


class CheckpointPart:
    """The part of a checkpoint that another role adds once it is at that version too; both sides see files alone."""

    def __init__(self, run_dir: str, step: int, role: str) -> None:
        self._partial = _partial(run_dir, step)
        self.directory, self._whole = self._partial / role, self._partial / f"{role}.json"

    @property
    def wanted(self) -> bool:
        """Tell whether a checkpoint is being made and lacks it."""
        return self._partial.is_dir() and not self.is_whole

    @property
    def is_whole(self) -> bool:
        return self._whole.exists()

    def finish(self) -> None:
        """Mark it as whole: all of it is written."""
        with contextlib.suppress(FileNotFoundError):  # the checkpoint was given up meanwhile
            self._whole.write_text(json.dumps({"schema": SCHEMA}))


class Checkpoints:
    """Writes checkpoints when they are due and keeps the newest few.

    A checkpoint: `due -> snapshot -> parts of other roles -> ledger -> files synced -> renamed to its name | removed`.

    Invariants: at most one is being written; training goes on meanwhile, from what was copied; a directory without
    `.partial` in its name is complete.
    """

    def __init__(self, context: RunContext, trainer: RankGroup, lease: TrainerDeviceLease) -> None:
        self._context, self._trainer, self._lease = context, trainer, lease
        self._root = Path(context.run_dir) / "checkpoints"
        self._background = context.config.checkpoint.background and not context.plan.fit_columns
        self._writing: asyncio.Task[None] | None = None

    def due(self, step: int) -> bool:
        every = self._context.config.checkpoint.every
        return every > 0 and step % every == 0

    async def save(self, version: Version) -> None:
        """Begin one once the one before is whole. A full disk leaves the former ones as they were."""
        await self.over()
        context = self._context
        start, partial = context.clock.now(), _partial(context.run_dir, version.step)
        with self._removed_after_errors(version, partial):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            async with self._lease:
                await self._lease.train()
                await self._trainer.call("snapshot", str(partial / "trainer"))
            for role in context.plan.fit_columns:  # neither they nor the actor hold a lease on devices meanwhile
                part = CheckpointPart(context.run_dir, version.step, role)
                with context.waiting(f"the {role}'s part of checkpoint {version.step}", role, PART_S) as wait:
                    while not part.is_whole:
                        context.check(wait)
                        await context.clock.sleep(POLL_S)
            await context.bus.checkpoint(version.step, str(partial), final=False)
        self._writing = asyncio.create_task(self._finish(version, partial, start))
        if not self._background:
            await self.over()

    async def over(self) -> None:
        """Wait until the last one is whole. Raises why it can't be."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            try:
                await writing
            except BaseException:
                writing.cancel()
                raise

    async def check(self) -> None:
        """Raise what went wrong with one that was written behind."""
        if self._writing is not None and self._writing.done():
            await self.over()

    async def give_up(self) -> None:
        """Abandon the one being written: its ranks are gone, and it never will be whole."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _finish(self, version: Version, partial: Path, start: float) -> None:
        """Give it its name once all of it is on disk."""
        final, context = self._root / f"step-{version.step:06d}", self._context
        with self._removed_after_errors(version, partial):
            await self._trainer.call("saved")
            state = partial / "state.json"
            state.write_text(json.dumps({"schema": SCHEMA, "step": version.step, "incarnation": version.incarnation}))
            _sync(state)
            _sync(partial)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)
            _sync(self._root)
        await context.bus.finalize(version.step)
        keep = context.config.checkpoint.keep
        for old in complete(self._root)[:-keep] if keep else []:
            shutil.rmtree(old, ignore_errors=True)
        await context.run_status.emit(CheckpointSaved(version.step, str(final), context.clock.now() - start))

    @contextlib.contextmanager
    def _removed_after_errors(self, version: Version, partial: Path) -> Iterator[None]:
        """Remove a half-written checkpoint after an error, which tells a person what to do."""
        try:
            yield
        except (OSError, InfrastructureError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            said = isinstance(error, InfrastructureError)
            why = str(error) if said else f"{getattr(error, 'strerror', None) or error}; free space"
            then = "" if "`relax resume" in why else f", then `relax resume {self._context.run_dir}`"
            place = self._root / f"step-{version.step:06d}"
            raise InfrastructureError(f"checkpoint {place}: {why}{then}") from error


def _sync(path: Path) -> None:
    """Make a file, or the names in a directory, survive the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _partial(run_dir: str, step: int) -> Path:
    """Return the directory in which a checkpoint is made."""
    return Path(run_dir) / "checkpoints" / f".partial-{step:06d}"


def complete(root: Path) -> list[Path]:
    """Find finished checkpoints, oldest first."""
    return sorted((path for path in root.glob("step-*") if (path / "state.json").is_file()), key=step_of)


def step_of(path: Path) -> int:
    """Return the step of a checkpoint."""
    return int(path.name.removeprefix("step-"))


def newest(run_dir: Path) -> Resume:
    """Find where a run continues. ConfigError when it has no checkpoint."""
    found = complete(run_dir / "checkpoints")
    if not found:
        raise ConfigError("run", str(run_dir), "it has no complete checkpoint to resume from; start it anew")
    return read_state(found[-1])


def read_state(checkpoint: Path) -> Resume:
    """Read the state of a complete checkpoint."""
    state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    return Resume(state["step"], str(checkpoint), state)
