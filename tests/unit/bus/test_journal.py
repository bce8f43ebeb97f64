# SPDX-License-Identifier: Apache-2.0
"""The ledger on disk: durable before effect, whole copies, nothing lost when the disk is full."""

from __future__ import annotations

import sqlite3

import pytest

from relax_core.api.batch import AttemptId
from relax_core.api.bus import BusSettings
from relax_core.api.errors import DiskFull, InfrastructureError
from relax_core.api.role import SystemClock
from relax_core.api.trajectory import DropReason
from relax_core.api.weights import Version
from relax_core.bus.journal import (
    CheckpointRecord,
    EndedRecord,
    FinalRecord,
    IssuedRecord,
    LedgerJournal,
    NoteRecord,
    PendingRecord,
    RegisteredRecord,
    RememberedRecord,
    StepRecord,
    TrainedRecord,
)
from relax_core.bus.queue import TransferQueue
from relax_core.bus.service import BusService, open_bus
from relax_core.bus.store import InProcessBus, MemoryStore

START = Version("actor", 0, 0)
SETTINGS = BusSettings(2, 2, 1)


def write(journal: LedgerJournal, records) -> None:
    journal.add(records)
    journal.commit()


def ended(group: int, sample: int, reason: str = "", step: int | None = None, newest: int = 0) -> EndedRecord:
    return EndedRecord(AttemptId(group, sample, 0), reason, step, newest, True)


def fill_up(journal: LedgerJournal) -> None:
    """The disk takes not one page more."""
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count = {pages}")


def make_room(journal: LedgerJournal) -> None:
    journal._db.execute("PRAGMA max_page_count = 1000000")


def many(count: int) -> list[IssuedRecord]:
    return [IssuedRecord(group, 0, 0, 2) for group in range(count)]


def test_a_process_of_an_earlier_start_writes_nothing_once_a_later_one_has_the_ledger(tmp_path):
    earlier = LedgerJournal(str(tmp_path), epoch=1)
    earlier.remember(START)
    write(earlier, [RegisteredRecord("actor", 1)])
    later = LedgerJournal(str(tmp_path), epoch=3)
    write(earlier, [RegisteredRecord("actor", 2)])  # it was opened, and not taken over yet
    assert later.remember(Version("actor", 1, 0)).roles == (("actor", 2),)
    earlier.add([RegisteredRecord("actor", 9), IssuedRecord(5, 0, 0, 2)])
    with pytest.raises(InfrastructureError, match="start 3.*this process belongs to start 1"):
        earlier.commit()
    write(later, [RegisteredRecord("actor", 3)])
    third = LedgerJournal(str(tmp_path), epoch=4).remember(Version("actor", 2, 0))
    assert (third.roles, third.next_group) == ((("actor", 3),), 0)


def test_committed_records_are_there_for_the_next_process(tmp_path):
    journal = LedgerJournal(str(tmp_path))
    write(journal, [IssuedRecord(0, 0, 0, 2), RegisteredRecord("rollout", 3)])
    write(journal, [TrainedRecord(0, 1), ended(0, 0, "", 1), ended(0, 1, "failed"), StepRecord(1, 0)])
    for _ in range(2):  # nor does remembering change what is remembered
        again = LedgerJournal(str(tmp_path)).remember(Version("actor", 0, 1))
        assert again == RememberedRecord(1, (), 2, 1, 0, (("failed", 1),), (("rollout", 3),))


def test_groups_in_flight_and_put_off_are_issued_again(tmp_path):
    journal = LedgerJournal(str(tmp_path))
    write(journal, [IssuedRecord(group, 0, group, 2) for group in range(4)])
    write(journal, [ended(1, 0, "regenerated"), ended(1, 1, "regenerated"), PendingRecord(1, 7)])
    write(journal, [ended(2, 0, "filtered"), ended(2, 1, "filtered")])
    again = journal.remember(START)
    assert again.pending == ((0, 1, 0), (1, 1, 7), (3, 1, 3)), "(group, issue, retry); 2 is over"
    assert dict(again.dropped) == {"regenerated": 2, "filtered": 2, "resumed": 4}
    assert again.issued == 8 and again.next_group == 4


def test_a_full_disk_names_the_file_and_loses_nothing(tmp_path):
    journal = LedgerJournal(str(tmp_path))
    fill_up(journal)
    with pytest.raises(DiskFull, match=r"ledger\.db: can't write the ledger .*full.*relax resume"):
        write(journal, many(5000))
    assert journal.behind
    make_room(journal)
    journal.commit()
    assert journal.remember(START).next_group == 5000


def test_a_file_that_is_not_a_ledger_and_a_folder_that_is_a_file_are_named(tmp_path):
    (tmp_path / "ledger.db").write_text("not a database, and long enough that sqlite looks at its header " * 20)
    with pytest.raises(InfrastructureError, match=r"ledger\.db: can't open"):
        LedgerJournal(str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(InfrastructureError, match="ledger"):
        LedgerJournal(str(tmp_path / "file"))


def test_a_copy_is_whole_and_readable_alone(tmp_path):
    journal = LedgerJournal(str(tmp_path))
    write(journal, many(50))
    journal.copy(str(tmp_path / "checkpoint"))
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["ledger.db"]
    write(journal, [IssuedRecord(50, 0, 0, 2)])
    assert LedgerJournal(str(tmp_path / "checkpoint")).remember(START).next_group == 50
    (tmp_path / "file").write_text("")
    with pytest.raises(InfrastructureError, match="file"):
        journal.copy(str(tmp_path / "file"))


async def test_issues_and_steps_are_durable_when_their_calls_return(tmp_path):
    bus = await open_bus(InProcessBus(), SETTINGS, str(tmp_path), START)
    issues = await bus.admit("rollout", START, 3, 1.0)
    reader = sqlite3.connect(f"file:{tmp_path}/ledger.db?mode=ro", uri=True)
    assert reader.execute("SELECT number FROM groups").fetchall() == [(issue.group,) for issue in issues]
    assert await bus.trained([], 0) == Version("actor", 0, 1)
    assert reader.execute("SELECT step, incarnation FROM steps").fetchall() == [(1, 0)]
    await bus.close()


async def test_an_admission_that_cannot_be_written_is_not_lost(tmp_path):
    journal = LedgerJournal(str(tmp_path))
    settings = BusSettings(4000, 2, 1)
    bus = BusService(TransferQueue(settings, START), MemoryStore(), journal, SystemClock())
    write(journal, many(1))
    fill_up(journal)
    journal.add(many(5000))
    with pytest.raises(InfrastructureError, match=r"ledger\.db"):
        await bus.admit("rollout", START, 1, 1.0)
    make_room(journal)
    issues = await bus.admit("rollout", START, 1, 1.0)
    assert [(issue.group, issue.retry) for issue in issues] == [(0, 0)], "the same work, to whoever asks next"
    account = await bus.account()
    assert account.balanced and account.dropped == {DropReason.REGENERATED: 4000}
    await bus.close()


def test_of_a_producers_state_the_journal_keeps_what_the_last_two_checkpoints_need(tmp_path) -> None:
    journal = LedgerJournal(str(tmp_path))
    for step in range(7):
        write(journal, [NoteRecord("sampler", step, f"at {step}")])
        if step in (2, 4, 6):
            write(journal, [CheckpointRecord(step, 0), FinalRecord(step)])
    rows = journal._db.execute("SELECT step FROM notes ORDER BY step").fetchall()
    assert [row[0] for row in rows] == [3, 4, 5, 6]
    assert journal.remember(Version("actor", 1, 4)).notes == (("sampler", "at 3"),)


def test_the_ledgers_size_does_not_grow_with_the_length_of_a_run(tmp_path) -> None:
    journal, sizes = LedgerJournal(str(tmp_path)), {}
    # Of every four groups one is filtered; the second sample of each ninth step had no gradient.
    for step in range(1, 401):
        groups = range(4 * step - 4, 4 * step)
        journal.add([IssuedRecord(group, 0, 0, 2) for group in groups])
        journal.add([ended(groups[0], sample, "filtered") for sample in (0, 1)])
        for group in groups[1:]:
            journal.add([TrainedRecord(group, step), ended(group, 0, "", step)])
            journal.add([EndedRecord(AttemptId(group, 1, 0), "", step, 0, step % 9 != 0)])
        write(journal, [StepRecord(step, 0)])
        if step % 10 == 0:
            write(journal, [CheckpointRecord(step, 0)])
            journal.copy(str(tmp_path / "checkpoint"))
            write(journal, [FinalRecord(step)])
            sizes[step] = (tmp_path / "checkpoint" / "ledger.db").stat().st_size
    assert sizes[400] <= sizes[40]
    again = journal.remember(Version("actor", 1, 395))
    assert (again.trained, again.trained_without_gradient) == (395 * 6, 43 * 3)
    assert again.dropped == (("filtered", 400 * 2), ("resumed", 5 * 6)) and again.next_group == 1600
    assert [group for group, *_ in again.pending] == [
        g for step in range(395, 400) for g in range(4 * step + 1, 4 * step + 4)
    ]


def test_a_ledger_of_the_former_schema_is_continued(tmp_path) -> None:
    journal = LedgerJournal(str(tmp_path))
    write(journal, [IssuedRecord(0, 0, 0, 2), TrainedRecord(0, 1), ended(0, 0, "", 1), ended(0, 1, "", 1)])
    write(journal, [StepRecord(1, 0), CheckpointRecord(1, 0)])
    for table in ("folded", "folded_groups"):
        journal._db.execute(f"DROP TABLE {table}")
    journal._db.execute("DELETE FROM meta")
    journal._db.execute("INSERT INTO meta VALUES ('schema', 1)")
    journal.close()
    again = LedgerJournal(str(tmp_path))
    assert again.remember(Version("actor", 1, 1)) == RememberedRecord(1, (), 2, 2)
    write(again, [StepRecord(2, 1), CheckpointRecord(2, 1), FinalRecord(2)])
    assert again._db.execute("SELECT count(*) FROM ended").fetchone() == (0,)
    assert again.remember(Version("actor", 2, 2)).trained == 2
