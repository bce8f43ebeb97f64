# SPDX-License-Identifier: Apache-2.0
"""Crash points: a child runs real writers and is killed at its n-th write to the disk, for every n until it ends by itself.

A point is each fsync, rename and removal of a file, before and after it, and each commit of the ledger. After the kill the
files are looked at twice: as the process left them, and as a power cut may leave them, where what nobody synced is lost
(`DurableDisk`). What a child promised before it died (`promise`) is compared with what production code reads then.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import sqlite3
import stat
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_core.bus import journal

KILLED = -signal.SIGKILL
LEDGER = ("ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.db-journal")
"""sqlite syncs these itself, and the names of new ones; they are taken as it left them."""
Writers = Callable[[Path, Callable[[Any], None]], None]
"""A scripted sequence: a directory to write in, and how to promise that something is on the disk."""


@dataclass
class DurableDisk:
    """The part of a directory tree that survives a power cut: content and names as of the last fsync of each.

    Invariant: what was there at the beginning is durable; a file whose name is durable and whose bytes are not is empty.
    """

    root: Path
    content: dict[int, bytes] = field(default_factory=dict)
    names: dict[int, dict[str, tuple[int, bool]]] = field(default_factory=dict)
    """By the folder's inode: inode of each name, and whether it is a folder."""

    def begin(self) -> None:
        for folder, _, files in os.walk(self.root):
            self.sync(Path(folder))
            for name in files:
                self.sync(Path(folder) / name)

    def sync(self, path: Path) -> None:
        told = path.lstat()
        if stat.S_ISDIR(told.st_mode):
            with os.scandir(path) as found:
                self.names[told.st_ino] = {one.name: (one.inode(), one.is_dir(follow_symlinks=False)) for one in found}
        elif stat.S_ISREG(told.st_mode):
            self.content[told.st_ino] = path.read_bytes()

    def sync_ledger(self, folder: Path) -> None:
        """Take the ledger's files as sqlite has them when a commit returns."""
        names = self.names.setdefault(folder.stat().st_ino, {})
        for name in LEDGER:
            path = folder / name
            if path.exists():
                names[name] = (path.stat().st_ino, False)
                self.content[path.stat().st_ino] = path.read_bytes()

    def restore(self, inode: int, into: Path) -> None:
        """Write what is left into a new folder."""
        into.mkdir()
        for name, (child, is_folder) in self.names.get(inode, {}).items():
            if is_folder:
                self.restore(child, into / name)
            else:
                (into / name).write_bytes(self.content.get(child, b""))


class CrashingDisk:
    """Counts what a process does to the disk, and kills the process at the point that it was made for.

    Point 2n is before the n-th operation, point 2n + 1 after it.
    """

    def __init__(self, root: Path, point: int, left: Path) -> None:
        self._point, self._at, self._left = point, 0, left
        self._root_inode = root.stat().st_ino
        self._durable = DurableDisk(root)
        self._durable.begin()

    def install(self) -> None:
        for name in ("replace", "rename", "unlink", "remove", "rmdir"):
            setattr(os, name, self._counted(getattr(os, name)))
        fsync = os.fsync

        def syncs(descriptor: int) -> None:
            def work() -> None:
                fsync(descriptor)
                self._durable.sync(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

            self._operation(work)

        os.fsync = syncs  # type: ignore[assignment]
        commit = journal.LedgerJournal.commit

        def commits(ledger: journal.LedgerJournal) -> None:
            def work() -> None:
                commit(ledger)
                self._durable.sync_ledger(ledger.path.parent)

            if ledger.behind:
                self._operation(work)

        journal.LedgerJournal.commit = commits  # type: ignore[method-assign]
        opened = journal.LedgerJournal.__init__

        def opens(ledger: journal.LedgerJournal, directory: str, epoch: int = 0) -> None:
            opened(ledger, directory, epoch)
            self._durable.sync_ledger(Path(directory))

        journal.LedgerJournal.__init__ = opens  # type: ignore[method-assign]

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **more: Any) -> Any:
            return self._operation(lambda: function(*args, **more))

        return operation

    def _operation(self, work: Callable[[], Any]) -> Any:
        self._pass()
        try:
            return work()
        finally:
            self._pass()

    def _pass(self) -> None:
        if self._at == self._point:
            self._left.write_bytes(pickle.dumps((self._durable, self._root_inode)))
            os.kill(os.getpid(), signal.SIGKILL)
        self._at += 1


@dataclass
class Crash:
    """One killed child: its files, what a power cut leaves of them, and what it had promised."""

    point: int
    as_left: Path
    after_power_cut: Path
    promises: list[Any]


def crashes(writers: Writers, prepare: Callable[[Path], None] = lambda root: None, every: int = 1) -> Iterator[Crash]:
    """Yield the crash at each point, or at every n-th one; the last child ends by itself and is not yielded."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="crash-", dir=memory) as name:
        place = Path(name)
        first = place / "prepared"
        first.mkdir()
        prepare(first)
        point = 0
        while True:
            root, left, told = place / "root", place / "left.pickle", place / "promises.jsonl"
            shutil.copytree(first, root, symlinks=True)
            if _ended_by_itself(writers, root, point, left, told):
                return
            durable, inode = pickle.loads(left.read_bytes())
            durable.restore(inode, place / "power-cut")
            promises = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
            yield Crash(point, root, place / "power-cut", promises)
            for path in (root, place / "power-cut"):
                shutil.rmtree(path)
            for path in (left, told):
                path.unlink(missing_ok=True)
            point += every


def _ended_by_itself(writers: Writers, root: Path, point: int, left: Path, told: Path) -> bool:
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            descriptor = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            disk = CrashingDisk(root, point, left)
            disk.install()
            writers(root, lambda what: _say(descriptor, what))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, KILLED):
        raise AssertionError(f"the writers failed with {code} before point {point}")
    return code == 0


def _say(descriptor: int, what: Any) -> None:
    os.write(descriptor, (json.dumps(what) + "\n").encode())


def attempts_by_step(ledger: Path) -> dict[int, set[tuple[int, int, int]]]:
    """Read which attempts a ledger has as trained; those of folded steps are counts alone."""
    with sqlite3.connect(ledger) as db:
        found: dict[int, set[tuple[int, int, int]]] = {}
        for step, *attempt in db.execute("SELECT step, number, sample, issue FROM ended WHERE reason = ''"):
            found.setdefault(step, set()).add(tuple(attempt))
    db.close()
    return found
