# SPDX-License-Identifier: Apache-2.0
"""What authors' code may try on other processes, and children that try to outlive their worker."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import pwd
import resource
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import relax_core

OUTLIVES = """
import signal, socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[1])
line.send(b"up")
signal.pause()
"""


def uncover_proc() -> None:
    """Unmount the topmost /proc."""
    if ctypes.CDLL(None).umount2(b"/proc", 2):
        raise PermissionError


def nameless(folder: str | Path) -> None:
    """Open a file without a name in a folder; nothing is written and nothing remains."""
    os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY))


def opened(path: str | Path, flags: int = os.O_WRONLY) -> None:
    """Open a file and write nothing."""
    os.close(os.open(path, flags))


def share_lock(path: Path) -> None:
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def uncover(path: Path, folder: Path) -> None:
    """Undo the mounts in namespaces of their own, then open a file at a covered path and one in a read-only folder."""
    if not (child := os.fork()):
        libc, attributes = ctypes.CDLL(None), (ctypes.c_uint64 * 4)(0, 1)
        libc.unshare(0x10000000 | 0x00020000)
        libc.umount2(bytes(path.parent), 2)
        libc.syscall(442, -100, b"/", 0x8000, attributes, 32)
        libc.syscall(442, -100, b"/", 0, attributes, 32)
        libc.mount(None, b"/", None, 0x1020, None)
        os._exit(len(succeeding({"file": lambda: opened(path, os.O_RDONLY), "folder": lambda: nameless(folder)})))
    if not os.waitpid(child, 0)[1]:
        raise PermissionError


def succeeding(attempts: dict[str, Callable[[], object]]) -> list[str]:
    """Return the names of the attempts that the kernel does not refuse."""
    done = []
    for name, attempt in attempts.items():
        try:
            attempt()
            done.append(name)
        except OSError:
            pass
    return done


class Attacker:
    """Built without arguments in a child."""

    component: Any = None
    build: Any = None

    def attack(self, victim: int) -> list[str]:
        """Return what succeeded on the process `victim`."""
        attempts: dict[str, Callable[[], object]] = {
            "limits": lambda: resource.prlimit(victim, resource.RLIMIT_NOFILE, (64, 64)),
            "priority": lambda: os.setpriority(os.PRIO_PROCESS, victim, 19),
            "processors": lambda: os.sched_setaffinity(victim, {min(os.sched_getaffinity(0))}),
            "scheduler": lambda: os.sched_setscheduler(victim, os.SCHED_BATCH, os.sched_param(0)),
            "memory": lambda: Path(f"/proc/{victim}/oom_score_adj").write_text("1000"),
            "signal": lambda: os.kill(victim, 0),
            "signal to all": lambda: os.kill(-1, 0),
            "descriptor": lambda: os.pidfd_open(victim),
            "proc": uncover_proc,
        }
        return succeeding(attempts)

    def touch(self, run: str) -> list[str]:
        """Return what succeeded on the files of the machine and on those of a run. Files are opened and never written."""
        own, ledger = Path(relax_core.__file__), Path(run, "ledger.db")
        return succeeding(
            {
                "installation": lambda: nameless(sysconfig.get_path("purelib")),
                "interpreter": lambda: nameless(sys.base_prefix),
                "source": lambda: opened(own),
                "mode of the source": lambda: own.chmod(stat.S_IMODE(own.stat().st_mode)),
                "mode of the interpreter": lambda: os.chmod(os.__file__, stat.S_IMODE(os.stat(os.__file__).st_mode)),
                "owner of the interpreter": lambda: os.chown(os.__file__, *os.stat(os.__file__)[4:6]),
                "home": lambda: nameless(pwd.getpwuid(os.getuid()).pw_dir),
                "settings of the machine": lambda: nameless("/etc"),
                "kernel": lambda: opened("/proc/sys/kernel/core_pattern"),
                "device": lambda: opened("/dev/kmsg"),
                "new device": lambda: os.mknod("disk", stat.S_IFBLK, os.makedev(7, 99)),
                "lock": lambda: share_lock(ledger),
                "ledger": lambda: opened(ledger),
                "recipe": lambda: opened(Path(run, "recipe", "agent.py")),
                "attributes": lambda: os.setxattr(ledger, "user.x", b"x"),
                "mode of the run": lambda: os.chmod(run, 0),
                "entry of the run": lambda: nameless(run),
                "move": lambda: os.rename(run, f"{run}-moved"),
                "undo": lambda: uncover(ledger, own.parent),
            }
        )

    def use(self, writable: list[str], recipe: str) -> list[str]:
        """Use what stays open, and return what succeeded."""
        shutil.copyfile("/etc/hostname", "name")
        return succeeding(
            {
                "mode": lambda: os.chmod("name", 0o600),
                "devices": lambda: [opened(f"/dev/{name}") for name in ("null", "zero", "urandom")],
                "terminal": lambda: [os.close(number) for number in os.openpty()],
                "temporary": lambda: [nameless(folder) for folder in (".", "/var/tmp", "/dev/shm")],
                "writable": lambda: [Path(folder, "new").write_text("x") for folder in writable],
                "read": lambda: [Path(folder, "new").read_text() for folder in writable],
                "recipe": lambda: Path(recipe, "agent.py").read_text(),
                "locks": multiprocessing.Lock,
            }
        )

    def own_rights(self) -> dict[str, Any]:
        """Use the same calls on the own process."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
        os.setpriority(os.PRIO_PROCESS, 0, 19)
        os.sched_setaffinity(0, os.sched_getaffinity(0))
        run = subprocess.run(["nice"], capture_output=True, text=True, check=True)
        return {
            "self": os.readlink("/proc/self") == str(os.getpid()),
            "nice": run.stdout.strip(),
            "session": os.getsid(0),
        }

    def leave_behind(self, alive: str) -> None:
        """Start a grandchild in a session of its own that is connected to the socket `alive` until its end."""
        if os.fork():
            os.wait()
            return
        os.setsid()
        if not os.fork():
            os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", OUTLIVES, alive])
        os._exit(0)

    def end(self, how: str) -> None:
        """End this process by its exit or by a signal."""
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, how))
