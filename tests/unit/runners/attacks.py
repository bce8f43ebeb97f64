# SPDX-License-Identifier: Apache-2.0
"""What authors' code may try on other processes, and children that try to outlive their worker."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
        done = []
        for name, attempt in attempts.items():
            try:
                attempt()
                done.append(name)
            except OSError:
                pass
        return done

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
