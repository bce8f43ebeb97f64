# SPDX-License-Identifier: Apache-2.0
"""Checkpoints appear whole or not at all, the newest few stay, and a run continues from the newest complete one."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_core.api.errors import ConfigError, DiskFull, InfrastructureError
from relax_core.api.events import CheckpointSaved, Logged
from relax_core.api.role import Resume
from relax_core.api.weights import Version
from relax_core.observe.epoch import RunEpoch
from relax_core.roles.checkpoint import Checkpoints, DamagedCheckpoint, choose, complete, discard_partial, read_whole


class Disk:
    """Trainer and bus that write a file each; one of them may fail half-way."""

    def __init__(self, fails: str = "", error: BaseException | None = None) -> None:
        self.fails, self.error = fails, error or OSError(errno.ENOSPC, "No space left on device")

        self.lands = asyncio.Event()
        """Until then a snapshot is on its way."""
        self.lands.set()
        self.written_down = asyncio.Event()
        """Until then the controller has not written down all events."""
        self.written_down.set()
        self.in_time = True
        self.incarnation = 0
        """Of the weights, as the bus knows it."""
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

    async def version(self) -> Version:
        return at(0, self.incarnation)

    async def finalize(self, step: int) -> None:
        self.final.append(step)

    async def recorded(self, wait_s: float) -> bool:
        assert wait_s
        await self.written_down.wait()
        return self.in_time

    async def emit(self, event: CheckpointSaved | Logged) -> None:
        self.told.append(event.message if isinstance(event, Logged) else Path(event.path).name)

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


def checkpoints(
    folder: Path, disk: Disk, every: int = 2, keep: int = 2, background: bool = False, epoch: RunEpoch | None = None
) -> Checkpoints:
    run: Any = SimpleNamespace(checkpoint=SimpleNamespace(every=every, keep=keep, background=background))
    plan = SimpleNamespace(fit_columns={})
    context: Any = SimpleNamespace(
        config=run, run_dir=str(folder), bus=disk, plan=plan, clock=disk, run_status=disk,
        epoch=epoch.number if epoch else 0, changing_files=epoch.hold if epoch else nullcontext,
    )  # fmt: skip
    return Checkpoints(context, disk, disk)  # type: ignore[arg-type]


async def saved(made: Checkpoints, version: Version) -> Path:
    await made.save(version)
    return complete(made._root)[-1]


async def under_way(folder: Path) -> tuple[Disk, Checkpoints]:
    """A checkpoint of step 2 that is whole, and one of step 4 whose snapshot is on its way."""
    disk = Disk()
    made = checkpoints(folder, disk, background=True)
    await made.save(at(2))
    await made.over()
    disk.lands.clear()
    await made.save(at(4))
    return disk, made


def chosen(folder: Path) -> Resume:
    return choose(folder).resume


def at(step: int, incarnation: int = 0) -> Version:
    return Version("actor", incarnation, step)


async def test_a_finished_checkpoint_holds_everything(tmp_path: Path) -> None:
    disk = Disk()
    disk.incarnation = 1
    path = await saved(checkpoints(tmp_path, disk), at(4, 1))
    assert (disk.final, disk.told) == ([4], ["step-000004"])
    assert sorted(os.listdir(path)) == ["files.json", "ledger.db", "state.json", "trainer"]
    assert json.loads((path / "state.json").read_text()) == {"schema": 1, "step": 4, "incarnation": 1, "listed": True}
    listed = json.loads((path / "files.json").read_text())["files"]
    assert sorted(listed) == ["ledger.db", "state.json", "trainer/weights"] and listed["ledger.db"][0] == len("whole")
    found = chosen(tmp_path)
    assert (found.step, found.directory, found.state["incarnation"]) == (4, str(path), 1)


@pytest.mark.parametrize("who", ["trainer", "bus"])
async def test_a_full_disk_leaves_the_former_one_and_nothing_half(tmp_path: Path, who: str) -> None:
    await checkpoints(tmp_path, Disk()).save(at(2))
    with pytest.raises(
        DiskFull, match=r"step-000004: .*No space left on device, [0-9.]+ MB free\); free some, then `relax resume"
    ):
        await checkpoints(tmp_path, Disk(who)).save(at(4))
    assert chosen(tmp_path).step == 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]


async def test_an_incomplete_checkpoint_does_not_count_and_is_removed(
    tmp_path: Path,
) -> None:
    async def cut_short() -> None:
        with pytest.raises(KeyboardInterrupt):
            await checkpoints(tmp_path, Disk("bus", KeyboardInterrupt())).save(at(4))
        assert len(list((tmp_path / "checkpoints").iterdir())) == 1 and complete(tmp_path / "checkpoints") == []

    await cut_short()
    discard_partial(tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    await cut_short()
    await checkpoints(tmp_path, Disk()).save(at(4))
    assert chosen(tmp_path).step == 4
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000004"]


async def test_the_same_step_may_be_saved_again(tmp_path: Path) -> None:
    made = checkpoints(tmp_path, disk := Disk())
    first = await saved(made, at(4))
    disk.incarnation = 1
    assert first == await saved(made, at(4, 1))
    assert chosen(tmp_path).state["incarnation"] == 1


async def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    made = checkpoints(tmp_path, Disk(), keep=2)
    for step in (2, 999_999, 1_000_000, 1_000_001):
        await made.save(at(step))
    assert [path.name for path in complete(tmp_path / "checkpoints")] == ["step-1000000", "step-1000001"]
    assert chosen(tmp_path).step == 1_000_001


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no complete checkpoint to resume from"):
        chosen(tmp_path)


async def test_a_checkpoint_written_in_the_background_counts_once_complete_on_disk(tmp_path: Path) -> None:
    disk, made = await under_way(tmp_path)
    await asyncio.sleep(0)
    await made.check()
    assert (chosen(tmp_path).step, disk.final) == (2, [2])
    disk.lands.set()
    await made.over()
    assert (chosen(tmp_path).step, disk.final) == (4, [2, 4])


async def test_a_checkpoint_counts_once_the_metrics_of_its_steps_are_written(tmp_path: Path) -> None:
    disk = Disk()
    disk.written_down.clear()
    made = checkpoints(tmp_path, disk, background=True)
    await made.save(at(2))
    for _ in range(100):
        await asyncio.sleep(0.001)
    assert complete(tmp_path / "checkpoints") == [] and disk.final == []
    disk.written_down.set()
    await made.over()
    assert (chosen(tmp_path).step, disk.final, disk.told) == (2, [2], ["step-000002"])
    disk.in_time = False
    await made.save(at(4))
    await made.over()
    assert chosen(tmp_path).step == 4 and "checkpoint 4: the metrics of its steps were not recorded" in disk.told[1]


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


async def test_an_error_in_the_background_is_raised_soon(tmp_path: Path) -> None:
    made = checkpoints(tmp_path, Disk("trainer"), background=True)
    await made.save(at(2))
    with pytest.raises(DiskFull, match="No space left on device.*free some, then `relax resume"):
        for _ in range(100):
            await asyncio.sleep(0)
            await made.check()
    assert complete(tmp_path / "checkpoints") == []


async def test_lost_ranks_leave_the_one_before(tmp_path: Path) -> None:
    disk, made = await under_way(tmp_path)
    await made.give_up()
    assert (chosen(tmp_path).step, disk.final) == (2, [2])


# -- an earlier start of the run ------------------------------------------------------------------------------------


async def test_a_checkpoint_of_an_earlier_start_never_appears(tmp_path: Path) -> None:
    stopped = Disk()
    earlier = checkpoints(tmp_path, stopped, background=True, epoch=RunEpoch.begin(tmp_path))
    await earlier.save(at(2))
    await earlier.over()
    stopped.lands.clear()
    await earlier.save(at(4))
    await asyncio.sleep(0)
    disk = Disk()
    disk.incarnation = 1
    resumed = checkpoints(tmp_path, disk, epoch=RunEpoch.begin(tmp_path))
    await resumed.save(at(4, 1))
    stopped.lands.set()
    with pytest.raises(InfrastructureError, match=r"started again \(start 2\); this process belongs to start 1"):
        await earlier.over()
    assert chosen(tmp_path).state["incarnation"] == 1
    assert stopped.final == [2], "the ledger is told of nothing either"


async def test_a_checkpoint_of_steps_that_a_successor_has_undone_never_appears(tmp_path: Path) -> None:
    disk, made = await under_way(tmp_path)
    disk.incarnation = 1
    disk.lands.set()
    with pytest.raises(
        InfrastructureError, match=r"step-000004: actor@0\.4 was rolled back while it was saved; the run is at actor@1"
    ):
        await made.over()
    assert (chosen(tmp_path).step, disk.final) == (2, [2])


async def test_an_earlier_start_begins_no_checkpoint_and_deletes_none(tmp_path: Path) -> None:
    earlier = checkpoints(tmp_path, Disk(), keep=1, epoch=RunEpoch.begin(tmp_path))
    await earlier.save(at(2))
    resumed = checkpoints(tmp_path, Disk(), keep=5, epoch=RunEpoch.begin(tmp_path))
    await resumed.save(at(4))
    with pytest.raises(InfrastructureError, match="started again"):
        await earlier.save(at(6))
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step-000002", "step-000004"]


# -- damage ---------------------------------------------------------------------------------------------------------


async def three(folder: Path) -> list[Path]:
    made = checkpoints(folder, Disk(), keep=3)
    for step in (2, 4, 6):
        await made.save(at(step))
    return complete(folder / "checkpoints")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


WRONG = {
    truncate: r"has \d+ bytes, but \d+ were written",
    flip: "has a different checksum than when it was written",
    Path.unlink: "is missing",
}


@pytest.mark.parametrize("name", ["state.json", "files.json", "ledger.db", "trainer/weights"])
@pytest.mark.parametrize("spoil", WRONG)
async def test_a_damaged_checkpoint_is_passed_over_with_a_line_that_names_the_file_and_what_is_wrong(
    tmp_path: Path, name: str, spoil: Callable[[Path], None]
) -> None:
    *_, before, last = await three(tmp_path)
    spoil(last / name)
    if not (last / "state.json").exists():  # without it there is no checkpoint at all
        assert chosen(tmp_path).step == 4
        return
    with pytest.raises(DamagedCheckpoint):
        read_whole(last)
    point = choose(tmp_path)
    assert (point.resume.step, point.resume.directory, point.undone) == (4, str(before), (last,))
    (line,) = point.notices
    assert line.startswith("checkpoint step-000006 is damaged: ") and "resuming from step 4 before it" in line
    assert re.search(f"damaged: {name} {WRONG[spoil]}", line) or name in ("state.json", "files.json")


async def test_several_damaged_ones_lead_to_the_last_whole_one_and_are_set_aside(tmp_path: Path) -> None:
    first, second, last = await three(tmp_path)
    truncate(last / "ledger.db")
    flip(second / "trainer/weights")
    point = choose(tmp_path)
    assert point.resume.step == 2 and len(point.notices) == 2
    point.set_aside()
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step-000002", "undone-000004", "undone-000006"}
    again = choose(tmp_path)
    assert (again.resume.directory, again.notices, again.undone) == (str(first), (), ())


async def test_without_a_whole_checkpoint_each_fault_is_reported(tmp_path: Path) -> None:
    for path in await three(tmp_path):
        truncate(path / "ledger.db")
    with pytest.raises(DamagedCheckpoint, match=r"every checkpoint is damaged.*000006.*000004.*000002.*restore"):
        choose(tmp_path)


async def test_a_step_may_be_chosen_and_later_ones_are_set_aside(tmp_path: Path) -> None:
    *_, last = await three(tmp_path)
    point = choose(tmp_path, 4)
    assert (point.resume.step, point.undone) == (4, (last,))
    assert "checkpoint step-000006 is kept as undone-000006, which you may delete" in point.notices[0]
    with pytest.raises(ConfigError, match=r"--step.*5.*these steps: 2, 4, 6"):
        choose(tmp_path, 5)
    with pytest.raises(ConfigError, match=r"these steps: 12, 14, 16"):
        choose(tmp_path, 6, steps_before=10)
    assert choose(tmp_path, 14, steps_before=10).resume.step == 4
    truncate(last / "ledger.db")
    with pytest.raises(DamagedCheckpoint, match=r"ledger.db has 4 bytes.*these steps: 2, 4, 6"):
        choose(tmp_path, 6)


async def test_a_checkpoint_without_a_file_list_is_used_with_a_notice(tmp_path: Path) -> None:
    path = await saved(checkpoints(tmp_path, Disk()), at(4))
    (path / "files.json").unlink()
    (path / "state.json").write_text(json.dumps({"schema": 1, "step": 4, "incarnation": 0}))
    point = choose(tmp_path)
    assert point.resume.step == 4
    assert "has no list of its files because an earlier version wrote it; it is used" in point.notices[0]


async def test_a_checkpoint_of_another_schema_is_refused_and_not_skipped(tmp_path: Path) -> None:
    *_, last = await three(tmp_path)
    (last / "state.json").write_text(json.dumps({"schema": 2, "step": 6, "incarnation": 0}))
    with pytest.raises(ConfigError, match="of schema 2; resume with the relax version that wrote it"):
        choose(tmp_path)


async def test_a_half_deleted_checkpoint_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = checkpoints(tmp_path, Disk(), keep=1)
    await made.save(at(2))
    with monkeypatch.context() as patch:
        patch.setattr("relax_core.roles.checkpoint.shutil.rmtree", lambda *_, **__: None)
        await made.save(at(4))
    assert (tmp_path / "checkpoints/step-000002/trainer/weights").exists()
    assert [path.name for path in complete(tmp_path / "checkpoints")] == ["step-000004"]
