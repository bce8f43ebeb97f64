# SPDX-License-Identifier: Apache-2.0
"""A process that kills Ray's processes when the driver is killed: Ray's agents outlive raylet and GCS by minutes.

The reaper records the processes that the driver starts during Ray's start. When the reaper's standard input closes, it
kills the recorded processes that are still alive; after a clean end none are left. Processes that the driver started
earlier are not touched.
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
"""Seconds between two checks for new processes while Ray starts. After the start, Ray's daemons stay the same."""
LET_S = 0.5
"""Seconds for processes to end by themselves before they are killed."""


class Reaper:
    """The driver's handle on the reaper process. A killed driver closes the reaper's standard input, too."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    def start(cls) -> Self:
        """Start the reaper. Call it before Ray is started."""
        others = [str(child.pid) for child in psutil.Process().children()]
        command = [sys.executable, "-m", "relax_core.runners.ray.reaper", *others]
        return cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True))

    def started(self) -> None:
        """Tell the reaper that all of Ray's daemons have started."""
        if self._process.stdin is not None:
            self._process.stdin.write(b".")
            self._process.stdin.flush()

    def close(self) -> None:
        """End the reaper and wait for it. Call it after Ray was shut down."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """Record new processes while Ray starts, wait for the driver's end, then kill the processes that remain."""
    driver, others = psutil.Process(os.getppid()), {os.getpid(), *map(int, sys.argv[1:])}
    known: set[psutil.Process] = set()
    starting = True
    while True:
        readable, _, _ = select.select([0], [], [], LOOK_S if starting else None)
        if readable and not os.read(0, 1):
            break
        starting = not readable
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in driver.children():
                if child.pid not in others:
                    known.update((child, *child.children(recursive=True)))
    time.sleep(LET_S)
    for process in known:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # psutil refuses if the process id was reused


if __name__ == "__main__":
    main()
