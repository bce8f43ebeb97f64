# SPDX-License-Identifier: Apache-2.0
"""Prepare a run's ledger file before it is opened: check it against a checkpoint, replace it, choose its journal mode.

Only `bus.journal` adds records to the file.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from relax_core.api.errors import InfrastructureError
from relax_core.observe.files import sync_to_disk, write_text

FILE = "ledger.db"
INCARNATION = ".incarnation"
"""Name of the note file; it holds the newest incarnation, so that this number survives the loss of the ledger."""
BUSY_S = 5.0
"""Seconds to wait for another process to release the file."""
LOCAL_FILE_SYSTEMS = frozenset((
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs", "tmpfs", "ramfs", "rootfs",
    "overlay", "overlayfs", "aufs", "fuse.fuse-overlayfs", "vfat", "exfat", "ntfs3", "fuseblk",
))  # fmt: skip
"""File systems on which processes share memory, as sqlite's write-ahead log needs. All others count as networks."""
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class PreparedLedger(NamedTuple):
    """A ledger that can continue from a checkpoint."""

    newest_incarnation: int
    """The largest incarnation in the ledger before any replacement, in its note file and in its checkpoint copies."""
    notice: str
    """One sentence on the fault for which the ledger was replaced; empty if it was not replaced."""


def prepare_ledger(run_dir: Path, checkpoint: Path, step: int, incarnation: int) -> PreparedLedger:
    """Replace a run's ledger by the checkpoint's copy, unless the ledger contains this checkpoint.

    `step` and `incarnation` are those of the checkpoint. The replaced file is kept as `ledger.db.replaced`. Raises
    InfrastructureError if the copy is faulty too, with both files untouched, or if the copy cannot be put in place.
    """
    ledger, copy = run_dir / FILE, checkpoint / FILE
    copies = (run_dir / "checkpoints").glob(f"*/{FILE}")  # includes checkpoints that were set aside
    known = [newest_incarnation(ledger), *(newest_incarnation(path, at_rest=True) for path in {*copies, copy})]
    newest = max((*known, incarnation))
    fault = find_fault(ledger, step, incarnation)
    if not fault:
        return PreparedLedger(newest, "")
    if of_copy := find_fault(copy, step, incarnation, at_rest=True):
        raise InfrastructureError(
            f"{ledger} {fault}, and its copy {copy} {of_copy}; restore either file from a backup, "
            "or resume from an earlier checkpoint with `relax resume RUN --step N`"
        )
    try:
        _replace(ledger, copy)
    except OSError as error:
        raise InfrastructureError(f"{ledger} {fault}, and can't be replaced by {copy}: {error}; free space or "
                                  "fix permissions there, then `relax resume` the run") from error  # fmt: skip
    return PreparedLedger(newest, f"{ledger} {fault}: the run continues with the copy in {checkpoint}")


def find_fault(ledger: Path, step: int, incarnation: int, at_rest: bool = False) -> str:
    """Return why a ledger cannot continue from a checkpoint of this step and incarnation; empty if it can.

    `at_rest`: no process writes the file, so the file is read without a write-ahead log.
    """
    try:
        if not ledger.is_file():
            return "is missing"
        if not ledger.stat().st_size:
            return "is empty"
        with closing(_connect(ledger, at_rest)) as db:
            (damage,) = db.execute("PRAGMA integrity_check(1)").fetchone()
            if damage != "ok":
                return f"is corrupted ({damage.splitlines()[0]})"
            if strange := _strange_value(db):
                return f"is corrupted ({strange})"
            meta = dict(db.execute("SELECT key, value FROM meta").fetchall())
            place = {"step": step, "incarnation": incarnation}
            reaches = "SELECT 1 FROM checkpoints WHERE step = :step AND incarnation = :incarnation"
            if db.execute(reaches, place).fetchone():
                return ""
            last = db.execute("SELECT coalesce(max(step), 0) FROM steps").fetchone()[0]
            if step < meta.get("folded", 0):
                return f"can be rolled back to step {meta['folded']} at most, not to checkpoint {step}"
            if last < step:
                return f"ends at step {last}, before checkpoint {step}"
            return f"has no checkpoint {step} of incarnation {incarnation}"
    except UnicodeDecodeError as error:  # sqlite's error message quotes undecodable bytes of the file
        return f"is corrupted ({error})"
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF in DAMAGED:
            return f"is corrupted ({error})"
        if "no such table" in str(error):
            return f"is not a ledger ({error})"
        raise _unreadable(ledger, error) from error
    except OSError as error:
        raise _unreadable(ledger, error) from error


def _strange_value(db: sqlite3.Connection) -> str:
    """Describe a value that has not its column's declared type, which sqlite does not refuse; empty if all is well."""
    declared = """SELECT t.name, c.name, lower(c.type) FROM sqlite_master t, pragma_table_info(t.name) c
        WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite_%'"""
    for table, column, kind in db.execute(declared).fetchall():
        table_name, column_name = (name.replace('"', '""') for name in (table, column))
        other = f'SELECT 1 FROM "{table_name}" WHERE typeof("{column_name}") NOT IN (?, \'null\') LIMIT 1'
        if db.execute(other, (kind,)).fetchone():
            return f"column {column} of {table} holds a value that is not {kind}"
    return ""


def note_incarnation(directory: Path, incarnation: int) -> None:
    """Write the number of a new incarnation to the note file, durably, unless the noted number is larger."""
    if incarnation > _noted_incarnation(directory):
        write_text(directory / INCARNATION, f"{incarnation}\n")


def _noted_incarnation(directory: Path) -> int:
    """Read the incarnation in the note file; -1 without a readable number."""
    try:
        found = re.fullmatch(rb"([0-9]{1,18})\n", (directory / INCARNATION).read_bytes())
    except OSError:
        return -1
    return int(found[1]) if found else -1


def has_started(directory: Path) -> bool:
    """Return True if a run has begun an incarnation in this directory, even if its ledger is lost."""
    return (directory / FILE).exists() or _noted_incarnation(directory) >= 0


def newest_incarnation(ledger: Path, at_rest: bool = False) -> int:
    """Return the largest incarnation in a ledger and its note file; 0 if neither holds a number.

    Raises InfrastructureError if the ledger is intact but cannot be read now, for instance because it is locked.
    """
    noted = max(0, _noted_incarnation(ledger.parent))
    try:
        if not ledger.is_file():
            return noted
        with closing(_connect(ledger, at_rest)) as db:
            recorded = "SELECT incarnation FROM steps UNION SELECT incarnation FROM checkpoints"
            recorded += " UNION SELECT value FROM meta WHERE key = 'incarnation'"
            numbers = f"SELECT coalesce(max(incarnation), 0) FROM ({recorded}) WHERE typeof(incarnation) = 'integer'"
            return max(noted, int(db.execute(numbers).fetchone()[0]))
    except UnicodeDecodeError:  # sqlite's error message quotes undecodable bytes of the file
        return noted
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF in (*DAMAGED, sqlite3.SQLITE_ERROR):
            return noted
        raise _unreadable(ledger, error) from error


def _connect(ledger: Path, at_rest: bool) -> sqlite3.Connection:
    how = "mode=ro&immutable=1" if at_rest else "mode=rw"
    return sqlite3.connect(f"{ledger.resolve().as_uri()}?{how}", uri=True, timeout=BUSY_S)


def _unreadable(ledger: Path, error: Exception) -> InfrastructureError:
    return InfrastructureError(
        f"{ledger}: can't read the ledger ({error}); check the disk, and that no second process holds the file, "
        "then `relax resume` the run"
    )


def _replace(ledger: Path, copy: Path) -> None:
    """Put the copy in the ledger's place; after a crash half-way the next resume finds the ledger missing."""
    draft = ledger.with_name(f"{FILE}.partial")
    shutil.copyfile(copy, draft)
    sync_to_disk(draft)
    if ledger.exists():
        os.replace(ledger, ledger.with_name(f"{FILE}.replaced"))
    for left in ("-wal", "-shm", "-journal"):  # sqlite would apply the former file's log to the copy
        ledger.with_name(f"{FILE}{left}").unlink(missing_ok=True)
    os.replace(draft, ledger)
    sync_to_disk(ledger.parent)


def journal_mode(directory: Path) -> str:
    """Return the journal mode for a database in this folder: WAL, or TRUNCATE on a network file system.

    A write-ahead log needs memory that all processes share, which a network file system does not provide.
    """
    kind = file_system_type(directory)
    return "WAL" if not kind or kind in LOCAL_FILE_SYSTEMS else "TRUNCATE"


def file_system_type(path: Path) -> str:
    """Return the kernel's name for the type of a path's file system; empty if unknown."""
    place, mounts = path.resolve(), []
    with suppress(OSError):
        mounts = [mount for mount in psutil.disk_partitions(all=True) if place.is_relative_to(mount.mountpoint)]
    mounts.sort(key=lambda mount: len(Path(mount.mountpoint).parts))
    return mounts[-1].fstype if mounts else ""  # the last one, since a later mount hides an earlier one
