# SPDX-License-Identifier: Apache-2.0
"""`ledger.db`: the records of the ledger on disk, from one writer, durable when `commit` returns.

A record is a small tuple for each fact that must outlive the process. Its `step` is the completed version: the update
that completes version 3 has step 3. sqlite syncs its log once per commit; on a local disk, readers may read meanwhile.
Groups that can no longer change are folded into counts and ranges of numbers, so the file stays small.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from relax_core.api.batch import AttemptId
from relax_core.api.errors import NO_ROOM, DiskFull, InfrastructureError, continuing
from relax_core.api.trajectory import DropReason
from relax_core.api.weights import Version
from relax_core.bus.ledger_file import FILE, journal_mode, note_incarnation
from relax_core.observe.files import sync_to_disk


class IssuedRecord(NamedTuple):
    """A group was issued; the next new group gets a larger number."""

    group: int
    issue: int
    retry: int
    size: int


class EndedRecord(NamedTuple):
    """An attempt was trained (empty reason) or dropped."""

    attempt: AttemptId
    reason: str
    step: int | None
    newest: int
    with_gradient: bool


class TrainedRecord(NamedTuple):
    """A group was trained; an `EndedRecord` follows for each valid member."""

    group: int
    step: int


class PendingRecord(NamedTuple):
    """A group must be issued again."""

    group: int
    retry: int


class StepRecord(NamedTuple):
    """The actor completed this version."""

    step: int
    incarnation: int


class RollbackRecord(NamedTuple):
    """Versions after this one are undone; records follow for the samples that are dropped."""

    step: int
    incarnation: int


class RegisteredRecord(NamedTuple):
    """A role registered and got this number."""

    role: str
    registration: int


class CheckpointRecord(NamedTuple):
    """A checkpoint of this version was begun; the ledger's copy in the checkpoint contains this record."""

    step: int
    incarnation: int


class FinalRecord(NamedTuple):
    """The checkpoint of this version is complete: only versions after the previous such checkpoint can be undone."""

    step: int


class NoteRecord(NamedTuple):
    """The state that a producer stored at a version, as JSON."""

    name: str
    step: int
    value: str


Record = (
    IssuedRecord | EndedRecord | TrainedRecord | PendingRecord | StepRecord | RollbackRecord | RegisteredRecord
    | CheckpointRecord | FinalRecord | NoteRecord
)  # fmt: skip


class RememberedRecord(NamedTuple):
    """State that a bus restores from the journal on opening."""

    next_group: int = 0
    pending: tuple[tuple[int, int, int], ...] = ()
    """Groups to be issued again: (group, issues so far, retry)."""
    issued: int = 0
    trained: int = 0
    trained_without_gradient: int = 0
    dropped: tuple[tuple[str, int], ...] = ()
    roles: tuple[tuple[str, int], ...] = ()
    notes: tuple[tuple[str, str], ...] = ()


SCHEMA = 2
FORMER_SCHEMA = 1
"""The schema that lacks folded groups; a ledger of this schema is upgraded when opened."""

TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (number INTEGER PRIMARY KEY, issue INTEGER NOT NULL, retry INTEGER NOT NULL,
    size INTEGER NOT NULL, pending INTEGER NOT NULL, step INTEGER);
CREATE TABLE IF NOT EXISTS ended (number INTEGER, sample INTEGER, issue INTEGER, reason TEXT NOT NULL, step INTEGER,
    newest INTEGER NOT NULL, with_gradient INTEGER NOT NULL, PRIMARY KEY (number, issue, sample)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS folded (reason TEXT, with_gradient INTEGER, attempts INTEGER NOT NULL,
    PRIMARY KEY (reason, with_gradient)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS folded_groups (first INTEGER PRIMARY KEY, last INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, incarnation INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS checkpoints (step INTEGER PRIMARY KEY, incarnation INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS roles (role TEXT PRIMARY KEY, incarnation INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS notes (name TEXT, step INTEGER, value TEXT NOT NULL, PRIMARY KEY (name, step)) WITHOUT ROWID;
"""

OVER = """(g.pending = 0 AND g.step IS NULL AND (SELECT count(*) FROM ended e
    WHERE e.number = g.number AND e.issue = g.issue) >= g.size)"""
"""SQL condition: the group is neither trained nor pending, and all its members ended."""
LARGER = "ON CONFLICT (key) DO UPDATE SET value = max(value, excluded.value)"

STATEMENTS: dict[type, tuple[str, ...]] = {
    # sqlite demands that each statement uses all values of its record: hence `?2 IS NOT NULL`.
    IssuedRecord: ("INSERT OR REPLACE INTO groups VALUES (?1, ?2, ?3, ?4, 0, NULL)",),
    EndedRecord: ("INSERT OR REPLACE INTO ended VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",),
    TrainedRecord: ("UPDATE groups SET step = ?2, pending = 0 WHERE number = ?1",),
    PendingRecord: ("UPDATE groups SET pending = 1, retry = ?2, step = NULL WHERE number = ?1",),
    StepRecord: ("INSERT OR REPLACE INTO steps VALUES (?1, ?2)",),
    RollbackRecord: (
        "DELETE FROM ended WHERE reason = '' AND step > ?1 AND ?2 IS NOT NULL",
        "UPDATE groups SET step = NULL WHERE step > ?1 AND ?2 IS NOT NULL",
        "DELETE FROM steps WHERE step > ?1 AND ?2 IS NOT NULL",
        "DELETE FROM checkpoints WHERE step > ?1 AND ?2 IS NOT NULL",
        "DELETE FROM notes WHERE step >= ?1 AND ?2 IS NOT NULL",
        "UPDATE meta SET value = min(value, ?1) WHERE key = 'final' AND ?2 IS NOT NULL",
        f"INSERT INTO meta SELECT 'incarnation', ?2 WHERE ?1 IS NOT NULL {LARGER}",
    ),
    RegisteredRecord: ("INSERT OR REPLACE INTO roles VALUES (?1, ?2)",),
    CheckpointRecord: ("INSERT OR REPLACE INTO checkpoints VALUES (?1, ?2)",),
    FinalRecord: (),  # see `LedgerJournal._fold`
    NoteRecord: ("INSERT OR REPLACE INTO notes VALUES (?1, ?2, ?3)",),
}


class LedgerJournal:
    """The only writer of a run's `ledger.db`; calls may come from any thread, one at a time.

    Invariants:
    - Records reach the disk in the order they were added; the records of a commit reach it together or not at all.
    - A commit that fails loses nothing: its records stay in memory and are written by the next commit.
    - An incarnation is written to the note file before the commit with which it begins (`note_incarnation`).
    - After a later start of the run has taken the ledger over (`remember`), this journal writes nothing more.
    - Each number below the next group's is in `groups` or in one range of `folded_groups`, never in both.
    - Folded groups can't be undone: they were dropped, or trained up to version `folded`, the first to resume from.
    """

    def __init__(self, directory: str, epoch: int = 0) -> None:
        """`epoch`: number of this start of the run; 0 disables the check for later starts."""
        self.path = Path(directory) / FILE
        self._added: deque[Record] = deque()
        self._waiting: list[Record] = []
        self._lock = threading.Lock()
        self._epoch = epoch
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            self._db.execute(f"PRAGMA journal_mode = {journal_mode(Path(directory))}")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(TABLES)
            found = self._db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
            if found is None:
                self._db.execute("INSERT INTO meta VALUES ('schema', ?)", (SCHEMA,))
            elif found[0] == FORMER_SCHEMA:
                self._db.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (SCHEMA,))
            elif found[0] != SCHEMA:
                raise sqlite3.DatabaseError(f"schema {found[0]}, this version of relax-core writes {SCHEMA}")
        except (sqlite3.Error, OSError) as error:
            raise self._error("open", error) from error

    def add(self, records: Iterable[Record]) -> None:
        """Queue records for the next commit without waiting."""
        self._added.extend(records)

    @property
    def behind(self) -> bool:
        """True while records wait for a commit, including those of a failed commit."""
        return bool(self._added or self._waiting)

    def commit(self) -> None:
        """Write all queued records in one transaction. Raises InfrastructureError, or DiskFull if no space is left."""
        with self._lock:
            while self._added:
                self._waiting.append(self._added.popleft())
            if not self._waiting:
                return
            try:
                with self._transaction():
                    self._check_own()
                    for kind, found in groupby(self._waiting, type):
                        rows = [_row(record) for record in found]
                        for statement in STATEMENTS[kind]:
                            self._db.executemany(statement, rows)
                        for (step,) in rows if kind is FinalRecord else ():
                            self._fold(step)
                        for _, incarnation in rows if kind is RollbackRecord else ():
                            note_incarnation(self.path.parent, incarnation)
            except (sqlite3.Error, OSError) as error:
                raise self._error("write", error) from error
            self._waiting = []

    def _fold(self, final: int) -> None:
        """Fold the groups that can't be undone once the checkpoint of version `final` is complete.

        That checkpoint may turn out to be unreadable, so keep the state that the previous complete checkpoint needs.
        """
        run = self._db.execute
        (before,) = run("SELECT coalesce(max(value), 0) FROM meta WHERE key = 'final'").fetchone()
        run(f"INSERT INTO meta VALUES ('final', ?), ('folded', ?) {LARGER}", (final, before))
        over = run(f"SELECT number FROM groups g WHERE step <= ? OR {OVER}", (before,)).fetchall()
        self._db.executemany("DELETE FROM groups WHERE number = ?", over)
        ranges: list[tuple[int, int]] = []
        for first, last in sorted([*run("SELECT first, last FROM folded_groups"), *((n, n) for (n,) in over)]):
            if ranges and ranges[-1][1] + 1 == first:
                first = ranges.pop()[0]
            ranges.append((first, last))
        run("DELETE FROM folded_groups")
        self._db.executemany("INSERT INTO folded_groups VALUES (?, ?)", ranges)
        # Ends of a group's present issue show which members have ended; ends of earlier issues are only counted.
        present = (
            "EXISTS (SELECT 1 FROM groups g WHERE g.number = ended.number AND g.issue = ended.issue AND pending = 0)"
        )
        run(
            f"INSERT INTO folded SELECT reason, with_gradient, count(*) FROM ended WHERE NOT {present} GROUP BY 1, 2 "
            "ON CONFLICT (reason, with_gradient) DO UPDATE SET attempts = attempts + excluded.attempts"
        )
        run(f"DELETE FROM ended WHERE NOT {present}")
        run("DELETE FROM steps WHERE step < ?", (before,))
        run("DELETE FROM checkpoints WHERE step < ?", (before,))
        newest = "SELECT max(n.step) FROM notes n WHERE n.name = notes.name AND n.step < ?1"
        run(f"DELETE FROM notes WHERE step < ({newest})", (before,))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def copy(self, directory: str) -> None:
        """Copy the ledger into a checkpoint; the file gets its final name only when complete."""
        target = Path(directory) / FILE
        partial = target.with_suffix(".partial")
        with self._lock:
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                partial.unlink(missing_ok=True)
                copy = sqlite3.connect(partial)
                try:
                    self._db.backup(copy)
                finally:
                    copy.close()
                sync_to_disk(partial)
                os.replace(partial, target)
                sync_to_disk(target.parent)
            except (sqlite3.Error, OSError) as error:
                fix = f"free space, or move the run to another disk, then {continuing(target) or '`relax resume` it'}"
                raise _kind(error)(f"{target}: {error}; {fix}") from error

    def remember(self, version: Version) -> RememberedRecord:
        """Take the ledger over at the trainer's restored version: undo later steps, end all attempts in flight.

        Nothing in memory survived, so every sample that may still be trained is issued again, as the same work. Returns
        the state as of this version. Raises InfrastructureError if the ledger does not contain the version's step, or
        has folded later steps.
        """
        with self._lock:
            try:
                with self._transaction():
                    self._check_reaches(version.step)
                    self._db.execute("INSERT OR REPLACE INTO meta VALUES ('epoch', ?)", (self._epoch,))
                    self._db.execute(f"INSERT INTO meta VALUES ('incarnation', ?) {LARGER}", (version.incarnation,))
                    self._db.execute("INSERT OR REPLACE INTO meta VALUES ('final', ?)", (version.step,))
                    self._undo_steps(version)
                    self._end_in_flight()
                    note_incarnation(self.path.parent, version.incarnation)
                return self._read()
            except (sqlite3.Error, OSError, TypeError, ValueError) as error:  # also for values of a wrong type
                raise self._error("restore", error) from error

    def _check_own(self) -> None:
        (newest,) = self._db.execute("SELECT coalesce(max(value), 0) FROM meta WHERE key = 'epoch'").fetchone()
        if self._epoch and self._epoch != newest:
            raise InfrastructureError(
                f"{self.path}: the run was started again (start {newest}); this process belongs to start "
                f"{self._epoch} and must not write the ledger any more; end this process"
            )

    def _check_reaches(self, step: int) -> None:
        known = "SELECT step FROM steps WHERE step = ?1 UNION SELECT step FROM checkpoints WHERE step = ?1"
        (folded,) = self._db.execute("SELECT coalesce(max(value), 0) FROM meta WHERE key = 'folded'").fetchone()
        if step < folded or (step and self._db.execute(known, (step,)).fetchone() is None):
            raise InfrastructureError(
                f"{self.path}: the ledger does not know step {step}, from which the run resumes; make sure that this "
                "is the run's own directory, and the same one on every machine, then `relax resume` the run"
            )

    def _undo_steps(self, version: Version) -> None:
        """Undo the steps after a version, and mark their groups for another issue.

        A trainer that keeps its incarnation replays these steps bit for bit, so their samples count as resumed.
        """
        step, run = version.step, self._db.execute
        (incarnation,) = run("SELECT max(incarnation) FROM steps WHERE step > ?", (step,)).fetchone()
        replays = incarnation is None or incarnation == version.incarnation
        run(
            "UPDATE ended SET reason = CASE WHEN newest > ?1 AND NOT ?2 THEN ?3 ELSE ?4 END, step = NULL "
            "WHERE reason = '' AND step > ?1",
            (step, replays, DropReason.ABANDONED.value, DropReason.RESUMED.value),
        )
        run("UPDATE groups SET pending = 1, step = NULL WHERE step > ?", (step,))
        run("DELETE FROM steps WHERE step > ?", (step,))
        run("DELETE FROM checkpoints WHERE step > ?", (step,))
        run("DELETE FROM notes WHERE step >= ?", (step,))

    def _end_in_flight(self) -> None:
        """End the groups that are neither trained nor ended, and mark them for another issue."""
        open_groups = self._db.execute(
            "SELECT g.number, g.issue, g.size, "
            "(SELECT group_concat(e.sample) FROM ended e WHERE e.number = g.number AND e.issue = g.issue) "
            f"FROM groups g WHERE g.pending = 0 AND g.step IS NULL AND NOT {OVER}"
        ).fetchall()
        for number, issue, size, ended in open_groups:
            known = {int(sample) for sample in (ended or "").split(",") if sample}
            left = [AttemptId(number, sample, issue) for sample in range(size) if sample not in known]
            rows = [_row(EndedRecord(attempt, DropReason.RESUMED.value, None, -1, True)) for attempt in left]
            self._db.executemany(STATEMENTS[EndedRecord][0], rows)
            self._db.execute("UPDATE groups SET pending = 1 WHERE number = ?", (number,))

    def _read(self) -> RememberedRecord:
        ask = self._db.execute
        ends = "SELECT reason, with_gradient FROM ended"
        every = f"SELECT *, count(*) AS attempts FROM ({ends}) GROUP BY 1, 2 UNION ALL SELECT * FROM folded"
        counts = dict(ask(f"SELECT reason, sum(attempts) FROM ({every}) GROUP BY reason").fetchall())
        trained = counts.pop("", 0)
        without = f"SELECT coalesce(sum(attempts), 0) FROM ({every}) WHERE reason = '' AND with_gradient = 0"
        (idle,) = ask(without).fetchone()
        numbers = "SELECT number FROM groups UNION ALL SELECT last FROM folded_groups"
        (cursor,) = ask(f"SELECT coalesce(max(number) + 1, 0) FROM ({numbers})").fetchone()
        pending = ask("SELECT number, issue + 1, retry FROM groups WHERE pending = 1 ORDER BY number").fetchall()
        roles = ask("SELECT role, incarnation FROM roles").fetchall()
        notes = ask("SELECT name, value FROM notes n WHERE step = (SELECT max(step) FROM notes WHERE name = n.name)")
        issued = trained + sum(counts.values())
        dropped = tuple(sorted(counts.items()))
        return RememberedRecord(
            cursor, tuple(pending), issued, trained, idle, dropped, tuple(roles), tuple(notes.fetchall())
        )

    def close(self) -> None:
        self._db.close()

    def _error(self, what: str, error: Exception) -> InfrastructureError:
        fix = f"free space or fix permissions there, then {continuing(self.path) or '`relax resume` the run'}"
        return _kind(error)(f"{self.path}: can't {what} the ledger ({error}); {fix}")


def _kind(error: Exception) -> type[InfrastructureError]:
    """Return the Relax error class for an error of sqlite or the disk."""
    no_room = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return DiskFull if no_room or (isinstance(error, OSError) and error.errno in NO_ROOM) else InfrastructureError


def _row(record: Record) -> tuple[Any, ...]:
    if isinstance(record, EndedRecord):
        return (*record.attempt, record.reason, record.step, record.newest, record.with_gradient)
    return tuple(record)
