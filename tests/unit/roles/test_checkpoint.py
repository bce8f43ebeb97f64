# SPDX-License-Identifier: Apache-2.0
"""Checkpoints appear whole or not at all, the newest few stay, and a run continues from the newest complete one."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_core.api.errors import ConfigError, InfrastructureError
from relax_core.api.events import CheckpointSaved
from relax_core.api.weights import Version
from relax_core.roles.checkpoint import Checkpoints, complete, newest


class Disk:
    """Trainer and bus that write a file each; one of them may fail half-way."""

    def __init__(self, fails: str = "", error: BaseException | None = None) -> None:
        self.fails, self.error = fails, error or OSError(errno.ENOSPC, "No space left on device")

        self.lands = asyncio.Event()
        """Until then a snapshot is on its way."""
        self.lands.set()
        self.final: list[int] = []
        self.told: list[str] = []

    async def call(self, method: str, *directory: str) -> None:
        if directory:
            self._target = Path(*directory) / "weights"
            self._target.parent.mkdir()
            self._target.write_text("half")
            return
        await self.lands.wait()
        self._write(self._target, "trainer")

    async def checkpoint(self, step: int, directory: str, final: bool = True) -> None:
        assert not final
        self._write(Path(directory) / "ledger.db", "bus")

    async def finalize(self, step: int) -> None:
        self.final.append(step)

    async def emit(self, event: CheckpointSaved) -> None:
        self.told.append(Path(event.path).name)

    def now(self) -> float:
        return 0.0

    async def train(self) -> None:
        """The devices are ours."""

    async def __aenter__(self) -> None:
        """Nobody else has them."""

    async def __aexit__(self, *_: object) -> None:
        """Nobody wants them."""

    def _write(self, path: Path, who: str) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text("half")
        if self.fails == who:
            raise self.error
        path.write_text("whole")


def checkpoints(folder: Path, disk: Disk, every: int = 2, keep: int = 2, background: bool = False) -> Checkpoints:
    run: Any = SimpleNamespace(checkpoint=SimpleNamespace(every=every, keep=keep, background=background))
    plan = SimpleNamespace(fit_columns={})
    context: Any = SimpleNamespace(config=run, run_dir=str(folder), bus=disk, plan=plan, clock=disk, run_status=disk)
    return Checkpoints(context, disk, disk)  # type: ignore[arg-type]


async def saved(made: Checkpoints, version: Version) -> Path:
    await made.save(version)
    return complete(made._root)[-1]


def at(step: int, incarnation: int = 0) -> Version:
    return Version("actor", incarnation, step)


async def test_a_finished_checkpoint_holds_everything(tmp_path: Path) -> None:
    disk = Disk()
    path = await saved(checkpoints(tmp_path, disk), at(4, 1))
    assert (disk.final, disk.told) == ([4], ["step-000004"])
    assert sorted(os.listdir(path)) == ["ledger.db", "state.json", "trainer"]
    assert json.loads((path / "state.json").read_text()) == {"schema": 1, "step": 4, "incarnation": 1}
    found = newest(tmp_path)
    assert (found.step, found.directory, found.state["incarnation"]) == (4, str(path), 1)


@pytest.mark.parametrize("who", ["trainer", "bus"])
async def test_a_full_disk_leaves_the_former_one_and_nothing_half(tmp_path: Path, who: str) -> None:
    await checkpoints(tmp_path, Disk()).save(at(2))
    with pytest.raises(
        InfrastructureError, match=r"step-000004.*No space left on device; free space, then `relax resume"
    ):
        await checkpoints(tmp_path, Disk(who)).save(at(4))
    assert newest(tmp_path).step == 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]


async def test_one_that_was_cut_short_is_no_checkpoint_and_makes_room_for_the_next_try(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        await checkpoints(tmp_path, Disk("bus", KeyboardInterrupt())).save(at(4))
    assert complete(tmp_path / "checkpoints") == []
    await checkpoints(tmp_path, Disk()).save(at(4))
    assert newest(tmp_path).step == 4
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000004"]


async def test_the_same_step_may_be_saved_again(tmp_path: Path) -> None:
    made = checkpoints(tmp_path, Disk())
    assert await saved(made, at(4)) == await saved(made, at(4, 1))
    assert newest(tmp_path).state["incarnation"] == 1


async def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    made = checkpoints(tmp_path, Disk(), keep=2)
    for step in (2, 999_999, 1_000_000, 1_000_001):
        await made.save(at(step))
    assert [path.name for path in complete(tmp_path / "checkpoints")] == ["step-1000000", "step-1000001"]
    assert newest(tmp_path).step == 1_000_001


@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [1, 2, 3, 4]), (3, [3])])
def test_they_are_due_every_few_steps(tmp_path: Path, every: int, due: list[int]) -> None:
    made = checkpoints(tmp_path, Disk(), every=every)
    assert [step for step in range(1, 5) if made.due(step)] == due


def test_a_run_without_one_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no complete checkpoint to resume from"):
        newest(tmp_path)


async def test_one_that_is_written_behind_counts_when_all_of_it_is_on_disk(tmp_path: Path) -> None:
    disk = Disk()
    made = checkpoints(tmp_path, disk, background=True)
    await made.save(at(2))
    await made.over()
    disk.lands.clear()
    await made.save(at(4))
    await asyncio.sleep(0)
    await made.check()
    assert (newest(tmp_path).step, disk.final) == (2, [2])
    disk.lands.set()
    await made.over()
    assert (newest(tmp_path).step, disk.final) == (4, [2, 4])


async def test_the_next_one_waits_for_the_one_before(tmp_path: Path) -> None:
    disk = Disk()
    made = checkpoints(tmp_path, disk, background=True)
    disk.lands.clear()
    await made.save(at(2))
    second = asyncio.create_task(made.save(at(4)))
    await asyncio.sleep(0)
    assert not second.done() and complete(tmp_path / "checkpoints") == []
    disk.lands.set()
    await second
    await made.over()
    assert disk.told == ["step-000002", "step-000004"]


async def test_what_went_wrong_behind_is_raised_soon(tmp_path: Path) -> None:
    made = checkpoints(tmp_path, Disk("trainer"), background=True)
    await made.save(at(2))
    with pytest.raises(InfrastructureError, match="No space left on device; free space"):
        for _ in range(100):
            await asyncio.sleep(0)
            await made.check()
    assert complete(tmp_path / "checkpoints") == []


async def test_lost_ranks_leave_the_one_before(tmp_path: Path) -> None:
    disk = Disk()
    made = checkpoints(tmp_path, disk, background=True)
    await made.save(at(2))
    await made.over()
    disk.lands.clear()
    await made.save(at(4))
    await made.give_up()
    assert (newest(tmp_path).step, disk.final) == (2, [2])
