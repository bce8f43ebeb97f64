# SPDX-License-Identifier: Apache-2.0
"""Checkpoints appear whole or not at all, the newest few stay, and a run continues from the newest complete one."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_core.api.errors import ConfigError, InfrastructureError
from relax_core.api.version import Version
from relax_core.roles.checkpoint import Checkpoints, complete, newest


class Disk:
    """Trainer and bus that write a file each; one of them may fail half-way."""

    def __init__(self, fails: str = "", error: BaseException | None = None) -> None:
        self.fails, self.error = fails, error or OSError(errno.ENOSPC, "No space left on device")

    async def call(self, method: str, directory: str) -> None:
        self._write(Path(directory) / "weights", "trainer")

    async def checkpoint(self, step: int, directory: str) -> None:
        self._write(Path(directory) / "ledger.db", "bus")

    def _write(self, path: Path, who: str) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text("half")
        if self.fails == who:
            raise self.error
        path.write_text("whole")


def checkpoints(folder: Path, disk: Disk, every: int = 2, keep: int = 2) -> Checkpoints:
    run: Any = SimpleNamespace(checkpoint=SimpleNamespace(every=every, keep=keep))
    context: Any = SimpleNamespace(run=run, run_dir=str(folder), bus=disk)
    return Checkpoints(context, disk)  # type: ignore[arg-type]


def at(step: int, incarnation: int = 0) -> Version:
    return Version("actor", incarnation, step)


async def test_a_finished_checkpoint_holds_everything(tmp_path: Path) -> None:
    path = Path(await checkpoints(tmp_path, Disk()).save(at(4, 1)))
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
    assert await made.save(at(4)) == await made.save(at(4, 1))
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
