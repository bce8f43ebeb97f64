# SPDX-License-Identifier: Apache-2.0
"""Ends what Ray leaves behind when the driver is killed: its agents outlive raylet and GCS by minutes.

A process beside the driver. It learns the processes that the driver starts while Ray starts, waits until its standard input
closes, and then kills those that are still the same processes. After a clean end there are none. What the driver had
started before is not Ray's, and is left alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from typing import Self

import psutil

LOOK_S = 0.25
"""Between two looks while Ray starts; afterwards its daemons stay the same."""
LET_S = 0.5
"""For those that end by themselves."""


class Reaper:
    """The driver's end of it; one that is killed has ended too."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    def start(cls) -> Self:
        """Before Ray is started."""
        others = [str(child.pid) for child in psutil.Process().children()]
        command = [sys.executable, "-m", "relax_core.runners.ray.reaper", *others]
        return cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True))

    def started(self) -> None:
        """All of Ray's daemons are there."""
        if self._process.stdin is not None:
            self._process.stdin.write(b".")
            self._process.stdin.flush()

    def close(self) -> None:
        """Ray has been shut down."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """Look while Ray starts, wait for the driver's end, then kill."""
    driver, others = psutil.Process(os.getppid()), {os.getpid(), *map(int, sys.argv[1:])}
    known: set[psutil.Process] = set()
    starting = True
    while True:
        told, _, _ = select.select([0], [], [], LOOK_S if starting else None)
        if told and not os.read(0, 1):
            break
        starting = not told
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in driver.children():
                if child.pid not in others:
                    known.update((child, *child.children(recursive=True)))
    time.sleep(LET_S)
    for process in known:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # psutil refuses where the id belongs to another process by now


if __name__ == "__main__":
    main()
