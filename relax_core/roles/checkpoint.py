# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: the state of trainer, critic and ledger in one directory, which is written atomically."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from relax_core.api.errors import ConfigError, DiskFull, InfrastructureError, continuing, disk_error
from relax_core.api.events import CheckpointSaved, Logged
from relax_core.api.role import Resume
from relax_core.api.weights import Version
from relax_core.config.run_config import RunContext
from relax_core.observe.files import disk_errors, sync_to_disk
from relax_core.roles.checkpoint_files import LIST, checksums, find_damage, write_list
from relax_core.roles.rank_group import RankGroup, TrainerDeviceLease

SCHEMA = 1
PARTIAL = ".partial-"
POLL_S = 0.1
RECORDED_S = 60.0
"""Seconds to wait until the controller has recorded the metrics of a checkpoint's steps; then a warning is logged."""


class CheckpointPart:
    """The part of a checkpoint that another role, such as the critic, writes once it has reached the same step.

    The actor and that role coordinate only through files.
    """

    def __init__(self, context: RunContext, step: int, role: str) -> None:
        self._partial = _partial(context, step)
        self.directory, self._whole = self._partial / role, self._partial / f"{role}.json"

    @property
    def wanted(self) -> bool:
        """True while a checkpoint of this step is being made and this part is not complete."""
        return self._partial.is_dir() and not self.is_whole

    @property
    def is_whole(self) -> bool:
        return self._whole.exists()

    def finish(self) -> None:
        """Mark the part as complete, after its last file is written."""
        with contextlib.suppress(FileNotFoundError):  # the checkpoint was abandoned meanwhile
            self._whole.write_text(json.dumps({"schema": SCHEMA}))


class Checkpoints:
    """The writer of a run's checkpoints. It keeps only the newest few.

    A checkpoint: `due -> snapshot -> part of the critic -> ledger -> files synced and listed -> metrics of its steps
    recorded -> renamed to its final name | removed`.

    Invariants:
    - At most one checkpoint is being written. With `checkpoint.background`, training continues after the snapshot while
      files are written, except in a run with a critic.
    - A directory without `.partial` in its name is complete. A run resumed from it has the metrics of every step,
      unless a warning was logged that they were not recorded in time.
    - No checkpoint appears for steps that were rolled back while it was written.
    """

    def __init__(self, context: RunContext, trainer: RankGroup, lease: TrainerDeviceLease) -> None:
        self._context, self._trainer, self._lease = context, trainer, lease
        self._root = Path(context.run_dir) / "checkpoints"
        self._background = context.config.checkpoint.background and not context.plan.fit_columns
        self._writing: asyncio.Task[None] | None = None

    def due(self, step: int) -> bool:
        every = self._context.config.checkpoint.every
        return every > 0 and step % every == 0

    async def save(self, version: Version, keep_former: bool = False) -> None:
        """Save a checkpoint after the previous one is complete. An error leaves the earlier checkpoints intact.

        In the background, return after the snapshot. `keep_former`: delete no earlier checkpoint, because a guard
        suspects this step.
        """
        await self.over()
        context = self._context
        start, partial = context.clock.now(), _partial(context, version.step)
        with self._removed_after_errors(version, partial):
            with context.changing_files():
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            async with self._lease:
                await self._lease.train()
                await self._trainer.call("snapshot", str(partial / "trainer"))
            for role in context.plan.fit_columns:  # the actor holds no device lease here, so these roles can get one
                await self._wait_for_part(version.step, role)
            await context.bus.checkpoint(version.step, str(partial), final=False)
        self._writing = asyncio.create_task(self._finish(version, partial, start, keep_former))
        if not self._background:
            await self.over()

    async def _wait_for_part(self, step: int, role: str) -> None:
        """Wait until another role has written its part of a checkpoint, after training up to the checkpoint's step.

        Raises DeadlineExceeded if the role's heartbeats show no progress for `rollout.step_timeout_s`.
        """
        context, part = self._context, CheckpointPart(self._context, step, role)

        async def doing() -> list[str]:
            return [str(one.doing) for one in await context.run_status.heartbeats() if one.role == role]

        before = await doing()
        while not part.is_whole:
            within_s = context.config.rollout.step_timeout_s
            with context.waiting(f"the {role}'s part of checkpoint {step}", role, within_s) as wait:
                while not part.is_whole and context.clock.now() <= wait.deadline:
                    await context.clock.sleep(POLL_S)
            if not part.is_whole:
                before, last = await doing(), before
                if before == last:
                    context.check(wait)

    async def over(self) -> None:
        """Wait until the checkpoint in progress is complete. Raises the error that prevented it."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            try:
                await writing
            except BaseException:
                writing.cancel()
                raise

    async def check(self) -> None:
        """Raise the error of a checkpoint that failed in the background."""
        if self._writing is not None and self._writing.done():
            await self.over()

    async def give_up(self) -> None:
        """Abandon the checkpoint in progress, which can't be completed without the ranks that wrote it."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _finish(self, version: Version, partial: Path, start: float, keep_former: bool) -> None:
        """Rename a checkpoint to its final name once all of its files are on disk."""
        final, context = self._root / f"step-{version.step:06d}", self._context
        with self._removed_after_errors(version, partial):
            await self._trainer.call("saved")
            known = {"schema": SCHEMA, "step": version.step, "incarnation": version.incarnation, "listed": True}
            (partial / "state.json").write_text(json.dumps(known))
            write_list(partial, await asyncio.to_thread(checksums, partial))
            if not await context.run_status.recorded(RECORDED_S):
                said = f"checkpoint {version.step}: the metrics of its steps were not recorded in {RECORDED_S:.0f} s"
                await context.run_status.emit(Logged("warning", "actor", f"{said}; a kill now may lose them"))
            if (now := await context.bus.version()).incarnation != version.incarnation:
                raise InfrastructureError(f"{version} was rolled back while it was saved; the run is at {now}")
            with context.changing_files():
                shutil.rmtree(final, ignore_errors=True)
                os.replace(partial, final)
                for folder in (self._root, self._root.parent):  # `checkpoints/` itself may be new
                    sync_to_disk(folder)
        await context.bus.finalize(version.step)
        keep = 0 if keep_former else context.config.checkpoint.keep
        with context.changing_files():
            for old in complete(self._root)[:-keep] if keep else []:
                (old / "state.json").unlink(missing_ok=True)  # so that a half-deleted folder is not a checkpoint
                shutil.rmtree(old, ignore_errors=True)
        await context.run_status.emit(CheckpointSaved(version.step, str(final), context.clock.now() - start))

    @contextlib.contextmanager
    def _removed_after_errors(self, version: Version, partial: Path) -> Iterator[None]:
        """Remove a half-written checkpoint after an error, and raise the error with the path and the way to resume."""
        try:
            yield
        except (OSError, InfrastructureError) as error:
            resume = continuing(self._context.run_dir) or f"`relax resume {self._context.run_dir}`"
            if isinstance(error, OSError):  # measure the free space before the partial files are removed
                error = disk_error(partial, error, then=resume)
            shutil.rmtree(partial, ignore_errors=True)
            then = "" if resume in str(error) else f", then {resume}"
            kind = DiskFull if isinstance(error, DiskFull) else InfrastructureError
            raise kind(f"checkpoint {self._root / f'step-{version.step:06d}'}: {error}{then}") from error


def _partial(context: RunContext, step: int) -> Path:
    """Return the directory in which a checkpoint is written. Its name has the epoch of this start of the run."""
    return Path(context.run_dir) / "checkpoints" / f"{PARTIAL}{step:06d}-{context.epoch}"


def discard_partial(run_dir: Path) -> None:
    """Remove half-written checkpoints of earlier starts of a run. The caller must have begun the next epoch."""
    for left in (run_dir / "checkpoints").glob(f"{PARTIAL}*"):
        shutil.rmtree(left, ignore_errors=True)


def complete(root: Path) -> list[Path]:
    """List the complete checkpoints in a directory, oldest first."""
    found = (path for path in root.glob("step-*") if re.fullmatch(r"step-[0-9]+", path.name))
    return sorted((path for path in found if (path / "state.json").is_file()), key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


class DamagedCheckpoint(InfrastructureError):
    """A checkpoint with files that are missing or have changed since they were written; resume from another one."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The checkpoint that a run resumes from."""

    resume: Resume
    notices: tuple[str, ...] = ()
    """Sentences for the user about damaged, unchecked or later checkpoints."""
    undone: tuple[Path, ...] = ()
    """Later checkpoints, which are damaged or were not chosen, and the final export of later steps. The resumed run trains
    these steps again."""

    def with_undone(self, export: Path) -> Self:
        """Return the same point, which undoes a final export too."""
        return replace(self, notices=(*self.notices, _kept(export)), undone=(*self.undone, export))

    def set_aside(self) -> None:
        """Rename checkpoints and the export to `undone-*` instead of deleting them, so that no run resumes from them."""
        for path in self.undone:
            kept = _undone(path)
            with disk_errors(path):
                shutil.rmtree(kept, ignore_errors=True)
                os.replace(path, kept)
                sync_to_disk(path.parent)


def choose(run_dir: Path, step: int | None = None, steps_before: int = 0) -> ResumePoint:
    """Choose the newest undamaged checkpoint, or the checkpoint of `step`.

    `step` and the steps in messages count from the start of the whole run: `steps_before` is the number of steps in
    earlier stages. Raises ConfigError if no such checkpoint exists, and DamagedCheckpoint if only damaged ones do.
    """
    found = complete(run_dir / "checkpoints")
    if not found:
        raise ConfigError("run", str(run_dir), "the run has no complete checkpoint to resume from; start a new one")
    steps = ", ".join(str(step_of(path) + steps_before) for path in found)
    if step is not None:
        wanted = [path for path in found if step_of(path) + steps_before == step]
        if not wanted:
            raise ConfigError("--step", str(step), f"the run has checkpoints of these steps: {steps}")
        try:
            resume, notice = read_whole(wanted[0])
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"{error}; the run has checkpoints of these steps: {steps}") from error
        later = tuple(path for path in found if step_of(path) > resume.step)
        passed = [f"resuming from step {step}; {_kept(path)}" for path in later]
        return ResumePoint(resume, (*notice, *passed), later)
    problems: list[str] = []
    damaged: list[Path] = []
    for path in reversed(found):
        try:
            resume, notice = read_whole(path)
        except DamagedCheckpoint as error:
            problems.append(str(error))
            damaged.append(path)
            continue
        goes_on = f"resuming from step {resume.step + steps_before} before it"
        lines = [f"{why}; {goes_on}; {_kept(bad)}" for why, bad in zip(problems, damaged, strict=True)]
        return ResumePoint(resume, (*lines, *notice), tuple(damaged))
    raise DamagedCheckpoint(f"{run_dir}: every checkpoint is damaged: {'; '.join(problems)}; restore one from a backup")


def _undone(path: Path) -> Path:
    return path.with_name(f"undone-{path.name.removeprefix('step-')}")


def _kept(path: Path) -> str:
    what = "the export of later steps" if path.name == "export" else f"checkpoint {path.name}"
    return f"{what} is kept as {_undone(path).name}, which you may delete"


def read_whole(checkpoint: Path) -> tuple[Resume, Sequence[str]]:
    """Check the files of a checkpoint and read its state; also return a notice if it has no list of checksums.

    Raises DamagedCheckpoint, and ConfigError for a checkpoint with the schema of another relax version.
    """
    try:
        resume = read_state(checkpoint)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise DamagedCheckpoint(
            f"checkpoint {checkpoint.name} is damaged: state.json can't be read ({error})"
        ) from error
    if (schema := resume.state.get("schema")) != SCHEMA:
        raise ConfigError(
            "checkpoint", f"{checkpoint} of schema {schema}", "resume with the relax version that wrote it"
        )
    if not resume.state.get("listed") and not (checkpoint / LIST).exists():
        why = "because an earlier version wrote it; it is used without a check of its bytes"
        return resume, (f"checkpoint {checkpoint.name} has no list of its files {why}",)
    if damage := find_damage(checkpoint):
        raise DamagedCheckpoint(f"checkpoint {checkpoint.name} is damaged: {damage}")
    return resume, ()


def read_state(checkpoint: Path) -> Resume:
    state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    return Resume(int(state["step"]), str(checkpoint), state)
