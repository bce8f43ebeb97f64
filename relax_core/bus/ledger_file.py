# SPDX-License-Identifier: Apache-2.0
"""The file of a run's ledger, before it is opened: does it reach the checkpoint, what takes its place, how is it journalled.

Here nothing is added to a ledger: `bus.journal` does that, once this module has left a whole file for it.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from relax_core.api.errors import InfrastructureError
from relax_core.observe.documents import sync_to_disk, write_text

FILE = "ledger.db"
INCARNATION = ".incarnation"
"""The newest incarnation in a file of its own, so that a ledger that is lost takes no number along."""
BUSY_S = 5.0
"""For another process to let go of the file."""
MOUNTS = Path("/proc/self/mountinfo")
LOCAL_FILE_SYSTEMS = frozenset((
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs", "tmpfs", "ramfs", "rootfs",
    "overlay", "overlayfs", "aufs", "fuse.fuse-overlayfs", "vfat", "exfat", "ntfs3", "fuseblk",
))  # fmt: skip
"""Types whose processes share memory with each other, as sqlite's write-ahead log needs; others are taken for networks."""
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class PreparedLedger(NamedTuple):
    """A ledger that may be continued from a checkpoint."""

    newest_incarnation: int
    """The largest one that it, the file that it replaces, the note beside it or a copy in any checkpoint tells."""
    notice: str
    """What was wrong with the file that was replaced, in one sentence; empty where none was."""


def prepare_ledger(run_dir: Path, checkpoint: Path, step: int, incarnation: int) -> PreparedLedger:
    """Make sure that a run's ledger reaches a checkpoint, of this step and incarnation: else the checkpoint's copy replaces it.

    The file that is replaced stays beside it as `ledger.db.replaced`. Raises InfrastructureError where the copy is no
    better; then nothing was touched.
    """
    ledger, copy = run_dir / FILE, checkpoint / FILE
    copies = (run_dir / "checkpoints").glob(f"*/{FILE}")  # those that were set aside too
    known = [newest_incarnation(ledger), *(newest_incarnation(path, at_rest=True) for path in {*copies, copy})]
    newest = max((*known, incarnation))
    fault = find_fault(ledger, step, incarnation)
    if not fault:
        return PreparedLedger(newest, "")
    if of_copy := find_fault(copy, step, incarnation, at_rest=True):
        raise InfrastructureError(
            f"{ledger} {fault}, and its copy {copy} {of_copy}; put a whole copy of either back from a backup, "
            "or `relax resume RUN --step N` from an earlier checkpoint"
        )
    try:
        _replace(ledger, copy)
    except OSError as error:
        raise InfrastructureError(f"{ledger} {fault}, and can't be replaced by {copy}: {error}; free space or "
                                  "permissions there, then `relax resume` the run") from error  # fmt: skip
    return PreparedLedger(newest, f"{ledger} {fault}: the run goes on with the copy of it in {checkpoint}")


def find_fault(ledger: Path, step: int, incarnation: int, at_rest: bool = False) -> str:
    """Say why a ledger can't be continued from a checkpoint of this step and incarnation; empty where it can.

    Nobody may write a file that is `at_rest`; it is read as it is, without a log beside it.
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
                return f"goes back to step {meta['folded']} at most, not to checkpoint {step}"
            if last < step:
                return f"ends at step {last}, before checkpoint {step}"
            return f"has no checkpoint {step} of incarnation {incarnation}"
    except UnicodeDecodeError as error:  # of a message of sqlite that quotes what it found
        return f"is corrupted ({error})"
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF in DAMAGED:
            return f"is corrupted ({error})"
        if "no such table" in str(error):
            return f"is no ledger ({error})"
        raise _unreadable(ledger, error) from error
    except OSError as error:
        raise _unreadable(ledger, error) from error


def _strange_value(db: sqlite3.Connection) -> str:
    """Name a column that holds other values than it was made for, which sqlite would keep; empty where none does."""
    declared = """SELECT t.name, c.name, lower(c.type) FROM sqlite_master t, pragma_table_info(t.name) c
        WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite_%'"""
    for table, column, kind in db.execute(declared).fetchall():
        table_name, column_name = (name.replace('"', '""') for name in (table, column))
        other = f'SELECT 1 FROM "{table_name}" WHERE typeof("{column_name}") NOT IN (?, \'null\') LIMIT 1'
        if db.execute(other, (kind,)).fetchone():
            return f"column {column} of {table} holds what is no {kind}"
    return ""


def note_incarnation(directory: Path, incarnation: int) -> None:
    """Write down beside the ledger that an incarnation begins, durably; a smaller number changes nothing."""
    if incarnation > _noted_incarnation(directory):
        write_text(directory / INCARNATION, f"{incarnation}\n")


def _noted_incarnation(directory: Path) -> int:
    """Read the number beside the ledger; -1 where there is no number."""
    try:
        found = re.fullmatch(rb"([0-9]{1,18})\n", (directory / INCARNATION).read_bytes())
    except OSError:
        return -1
    return int(found[1]) if found else -1


def has_begun(directory: Path) -> bool:
    """Tell whether a run has begun an incarnation in this directory, also where its ledger is lost."""
    return (directory / FILE).exists() or _noted_incarnation(directory) >= 0


def newest_incarnation(ledger: Path, at_rest: bool = False) -> int:
    """Return the largest incarnation that a ledger, or the note beside it, tells; 0 where neither can be read."""
    noted = max(0, _noted_incarnation(ledger.parent))
    try:
        if not ledger.is_file():
            return noted
        with closing(_connect(ledger, at_rest)) as db:
            told = "SELECT incarnation FROM steps UNION SELECT incarnation FROM checkpoints"
            told += " UNION SELECT value FROM meta WHERE key = 'incarnation'"
            numbers = f"SELECT coalesce(max(incarnation), 0) FROM ({told}) WHERE typeof(incarnation) = 'integer'"
            return max(noted, int(db.execute(numbers).fetchone()[0]))
    except UnicodeDecodeError:  # of a message of sqlite that quotes what it found
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
        f"{ledger}: can't read the ledger ({error}); see that the disk is well and that no other process holds the file, "
        "then `relax resume` the run"
    )


def _replace(ledger: Path, copy: Path) -> None:
    """Put the copy in the ledger's place; a crash half-way leaves none, which the next resume finds missing."""
    draft = ledger.with_name(f"{FILE}.partial")
    shutil.copyfile(copy, draft)
    sync_to_disk(draft)
    if ledger.exists():
        os.replace(ledger, ledger.with_name(f"{FILE}.replaced"))
    for left in ("-wal", "-shm", "-journal"):  # sqlite would apply a log of the former file to the copy
        ledger.with_name(f"{FILE}{left}").unlink(missing_ok=True)
    os.replace(draft, ledger)
    sync_to_disk(ledger.parent)


def journal_mode(directory: Path, mounts: Path = MOUNTS) -> str:
    """Return the journal mode for a database in this folder: a write-ahead log needs memory that a network does not share."""
    kind = file_system_type(directory, mounts)
    return "WAL" if not kind or kind in LOCAL_FILE_SYSTEMS else "TRUNCATE"


def file_system_type(path: Path, mounts: Path = MOUNTS) -> str:
    """Return the type of the file system that a path is on, as the kernel names it; empty where it tells none."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    place, found, depth = path.resolve(), "", -1
    for line in lines:
        mount, separator, source = line.partition(" - ")
        fields = mount.split()
        if not separator or len(fields) < 5:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4]))
        if place.is_relative_to(point) and len(point.parts) >= depth:  # the later of two at one place hides the other
            found, depth = source.split()[0], len(point.parts)
    return found
