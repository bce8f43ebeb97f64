# SPDX-License-Identifier: Apache-2.0
"""A ledger is continued only where it reaches the checkpoint; else the checkpoint's copy takes its place, said in words."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest

from relax_core.api.batch import AttemptId
from relax_core.api.bus import BusSettings
from relax_core.api.errors import InfrastructureError
from relax_core.api.weights import Version
from relax_core.bus.journal import (
    CheckpointRecord,
    EndedRecord,
    FinalRecord,
    IssuedRecord,
    LedgerJournal,
    RollbackRecord,
    StepRecord,
    TrainedRecord,
)
from relax_core.bus.ledger_file import file_system_type, journal_mode, prepare_ledger
from relax_core.bus.service import open_bus
from relax_core.bus.store import InProcessBus

STEPS, COVERED = 6, 4


def write(journal: LedgerJournal, records) -> None:
    journal.add(records)
    journal.commit()


def step(journal: LedgerJournal, number: int, incarnation: int = 0) -> None:
    """One group issued and trained by the step that completes this version."""
    ended = [EndedRecord(AttemptId(number - 1, sample, 0), "", number, number - 1, True) for sample in (0, 1)]
    write(journal, [IssuedRecord(number - 1, 0, 0, 2), TrainedRecord(number - 1, number), *ended])
    write(journal, [StepRecord(number, incarnation)])


def checkpoint_of(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"step-{number:06d}"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was killed after step 6, with checkpoints of 2 and 4; `old.db` is its ledger as of step 3."""
    journal = LedgerJournal(str(tmp_path))
    for number in range(1, STEPS + 1):
        step(journal, number)
        if number == 3:
            journal.copy(str(tmp_path / "old"))
        if number in (2, COVERED):
            write(journal, [CheckpointRecord(number, 0)])
            journal.copy(str(checkpoint_of(tmp_path, number)))
            write(journal, [FinalRecord(number)])
    journal.close()
    return tmp_path


def lose(ledger: Path) -> None:
    ledger.unlink()


def empty(ledger: Path) -> None:
    ledger.write_bytes(b"")


def cut_off(ledger: Path) -> None:
    ledger.write_bytes(ledger.read_bytes()[: ledger.stat().st_size // 2 + 100])


def scribble(ledger: Path) -> None:
    ledger.write_text("not a database, and long enough that sqlite looks at its header " * 20)


def damage(ledger: Path) -> None:
    """Pages other than the first hold something else."""
    data = bytearray(ledger.read_bytes())
    data[4096 : len(data)] = b"\x5a" * (len(data) - 4096)
    ledger.write_bytes(data)


def go_back(ledger: Path) -> None:
    shutil.copy(ledger.parent / "old" / "ledger.db", ledger)


FAULTS = {
    lose: "is missing", empty: "is empty", cut_off: "is corrupted", scribble: "is corrupted", damage: "is corrupted",
    go_back: "ends at step 3, before checkpoint 4",
}  # fmt: skip


def test_a_ledger_that_reaches_the_checkpoint_is_left_alone(run):
    before = (run / "ledger.db").read_bytes()
    assert prepare_ledger(run, checkpoint_of(run, COVERED), COVERED, 0).notice == ""
    assert (run / "ledger.db").read_bytes() == before and not (run / "ledger.db.replaced").exists()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_another_ledger_is_replaced_by_the_copy_in_the_checkpoint(run, fault):
    fault(run / "ledger.db")
    (run / "ledger.db-wal").write_bytes(b"of the former file")
    notice = prepare_ledger(run, checkpoint_of(run, COVERED), COVERED, 0).notice
    assert FAULTS[fault] in notice and f"{run}/ledger.db" in notice and str(checkpoint_of(run, COVERED)) in notice
    assert "\n" not in notice
    found = LedgerJournal(str(run)).remember(Version("actor", 1, COVERED))
    assert (found.trained, found.next_group, found.pending) == (2 * COVERED, COVERED, ())
    assert (run / "ledger.db.replaced").exists() == (fault is not lose)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_if_ledger_and_copy_are_damaged_both_are_named_and_kept(run, fault):
    copy = checkpoint_of(run, COVERED) / "ledger.db"
    (copy.parent / "old").mkdir()
    shutil.copy(run / "old" / "ledger.db", copy.parent / "old")
    fault(run / "ledger.db")
    fault(copy)
    with pytest.raises(InfrastructureError) as raised:
        prepare_ledger(run, copy.parent, COVERED, 0)
    assert f"{run}/ledger.db {FAULTS[fault]}" in str(raised.value) and f"{copy} {FAULTS[fault]}" in str(raised.value)
    assert "backup" in str(raised.value) and raised.value.exit_code == 4
    assert not (run / "ledger.db.replaced").exists()


def test_a_ledger_of_other_weights_at_that_step_does_not_reach_it(run):
    assert "no checkpoint 4 of incarnation 3" in str(
        pytest.raises(InfrastructureError, prepare_ledger, run, checkpoint_of(run, COVERED), COVERED, 3).value
    )


def test_the_checkpoint_before_the_newest_is_reached_with_all_that_came_after_it(run):
    found = LedgerJournal(str(run)).remember(Version("actor", 1, 2))
    assert (found.trained, [group for group, *_ in found.pending]) == (4, [2, 3, 4, 5])
    assert found.dropped == (("abandoned", 6), ("resumed", 2)), (
        "the first of them was sampled from weights that survive"
    )


def test_an_older_checkpoint_brings_its_own_ledger_where_the_newer_one_has_folded_what_it_needs(run):
    assert prepare_ledger(run, checkpoint_of(run, 2), 2, 0).notice == "", "the one before the newest is still reached"
    journal = LedgerJournal(str(run))
    write(journal, [CheckpointRecord(6, 0), FinalRecord(6)])
    journal.close()
    with pytest.raises(InfrastructureError, match="does not know step 2"):
        LedgerJournal(str(run)).remember(Version("actor", 1, 2))
    notice = prepare_ledger(run, checkpoint_of(run, 2), 2, 0).notice
    assert "can be rolled back to step 4 at most" in notice
    found = LedgerJournal(str(run)).remember(Version("actor", 1, 2))
    assert (found.trained, found.next_group) == (4, 2)


def test_a_ledger_of_another_release_is_not_treated_as_damaged(run):
    journal = LedgerJournal(str(run))
    journal._db.execute("UPDATE meta SET value = 99 WHERE key = 'schema'")
    journal.close()
    prepare_ledger(run, checkpoint_of(run, COVERED), COVERED, 0)
    with pytest.raises(InfrastructureError, match="schema 99"):
        LedgerJournal(str(run))


def test_a_ledger_that_is_held_by_another_process_is_not_taken_for_a_damaged_one(run, monkeypatch):
    monkeypatch.setattr("relax_core.bus.ledger_file.BUSY_S", 0.0)
    other = sqlite3.connect(run / "ledger.db", isolation_level=None)
    other.execute("PRAGMA journal_mode = DELETE")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(InfrastructureError, match="locked"):
        prepare_ledger(run, checkpoint_of(run, COVERED), COVERED, 0)
    other.close()


async def test_a_bus_refuses_a_ledger_without_the_step_to_continue_from(tmp_path):
    with pytest.raises(InfrastructureError, match=r"ledger\.db.* does not know step 4"):
        await open_bus(InProcessBus(), BusSettings(2, 2, 1), str(tmp_path), Version("actor", 1, 4))


# -- incarnations -----------------------------------------------------------------------------------------------------


def test_an_incarnation_is_journalled_when_it_begins_and_the_next_one_is_above_all_of_them(run):
    assert prepare_ledger(run, checkpoint_of(run, COVERED), COVERED, 0).newest_incarnation == 0
    for crash in (1, 2, 3):  # none of them gets as far as a step
        journal = LedgerJournal(str(run))
        journal.remember(Version("actor", crash, COVERED))
        journal.close()
        assert prepare_ledger(run, checkpoint_of(run, COVERED), COVERED, 0).newest_incarnation == crash
    journal = LedgerJournal(str(run))
    write(journal, [RollbackRecord(COVERED, 7)])
    journal.close()
    assert prepare_ledger(run, checkpoint_of(run, COVERED), COVERED, 0).newest_incarnation == 7


def test_the_incarnations_of_a_replaced_ledger_and_of_other_checkpoints_count_too(run):
    journal = LedgerJournal(str(run))
    journal.remember(Version("actor", 5, COVERED))
    step(journal, 5, 5)
    write(journal, [CheckpointRecord(5, 5)])
    journal.copy(str(checkpoint_of(run, 5)))
    write(journal, [FinalRecord(5), CheckpointRecord(6, 5), FinalRecord(6), RollbackRecord(6, 8)])
    journal.close()
    assert prepare_ledger(run, checkpoint_of(run, 2), 2, 0).newest_incarnation == 8, "it was replaced"


@pytest.mark.parametrize("fault", [lose, empty, cut_off, scribble, damage], ids=lambda fault: fault.__name__)
def test_incarnations_that_only_a_lost_ledger_had_journalled_are_not_used_again(run, fault):
    journal = LedgerJournal(str(run))
    journal.remember(Version("actor", 5, COVERED))
    write(journal, [RollbackRecord(COVERED, 6), RollbackRecord(COVERED, 8)])
    journal.close()
    for log in ("-wal", "-shm"):
        (run / f"ledger.db{log}").unlink(missing_ok=True)
    fault(run / "ledger.db")
    assert prepare_ledger(run, checkpoint_of(run, COVERED), COVERED, 0).newest_incarnation == 8
    assert prepare_ledger(run, checkpoint_of(run, 2), 2, 0).newest_incarnation == 8, "the copy in its place is older"


@pytest.mark.parametrize("content", [b"", b"many", b"-3", b"\xff\xfe", b"9" * 5000])
def test_a_note_of_incarnations_that_is_not_a_number_is_not_counted(run, content):
    (run / ".incarnation").write_bytes(content)
    assert prepare_ledger(run, checkpoint_of(run, COVERED), COVERED, 0).newest_incarnation == 0


# -- the file system ----------------------------------------------------------------------------------------------------

MOUNTS = [
    SimpleNamespace(mountpoint=point, fstype=kind)
    for point, kind in (
        ("/", "ext4"), ("/data", "nfs4"), ("/data/local disk", "xfs"), ("/cloud", "fuse.s3fs"), ("/over", "tmpfs"),
        ("/over", "lustre"),
    )
]  # fmt: skip
"""Mounts in the order in which they were made."""


@pytest.mark.parametrize(
    ("path", "kind", "mode"),
    [
        ("/home/me/runs", "ext4", "WAL"),
        ("/data/runs", "nfs4", "TRUNCATE"),
        ("/data/local disk/runs", "xfs", "WAL"),
        ("/database", "ext4", "WAL"),
        ("/cloud/a", "fuse.s3fs", "TRUNCATE"),
        ("/over/a", "lustre", "TRUNCATE"),
    ],
)
def test_a_network_file_system_gets_a_rollback_journal(monkeypatch, path, kind, mode):
    monkeypatch.setattr("psutil.disk_partitions", lambda **_: MOUNTS)
    assert file_system_type(Path(path)) == kind
    assert journal_mode(Path(path)) == mode


def test_a_machine_that_names_no_mounts_keeps_the_write_ahead_log(monkeypatch, tmp_path):
    monkeypatch.setattr("psutil.disk_partitions", lambda **_: [])
    assert file_system_type(tmp_path) == "" and journal_mode(tmp_path) == "WAL"


def test_a_ledger_that_moves_to_a_network_file_system_leaves_its_wal_and_stays_durable(run, monkeypatch):
    monkeypatch.setattr("relax_core.bus.journal.journal_mode", lambda directory: "TRUNCATE")
    journal = LedgerJournal(str(run))
    assert journal._db.execute("PRAGMA journal_mode").fetchone() == ("truncate",)
    step(journal, 7)
    assert not (run / "ledger.db-wal").exists()
    reader = sqlite3.connect(f"file:{run}/ledger.db?mode=ro", uri=True)
    assert reader.execute("SELECT max(step) FROM steps").fetchone() == (7,)
    reader.close()
    journal.close()
