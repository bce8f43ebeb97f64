# SPDX-License-Identifier: Apache-2.0
"""Ends what Ray leaves behind when the driver is killed: its agents outlive raylet and GCS by minutes.

A process beside the driver: told process ids on its command line, it waits until its standard input closes, and then
kills those that are still the same processes. After a clean end there are none.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import psutil

LET_S = 0.5
"""For those that end by themselves."""


def start() -> subprocess.Popen[bytes]:
    """Watch over all that this process has started so far; close its standard input to end it."""
    names = [_name(child) for child in psutil.Process().children(recursive=True)]
    command = [sys.executable, "-m", "relax_core.runners.ray.reaper", *filter(None, names)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


def main() -> None:
    """Wait for the driver's end, then kill."""
    while os.read(0, 4096):
        pass
    time.sleep(LET_S)
    for name in sys.argv[1:]:
        pid = int(name.partition(":")[0])
        with contextlib.suppress(psutil.NoSuchProcess):
            if _name(psutil.Process(pid)) == name:
                psutil.Process(pid).kill()


def _name(process: psutil.Process) -> str:
    """Its id with its birth: ids are used again."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return f"{process.pid}:{process.create_time():.2f}"
    return ""


if __name__ == "__main__":
    main()
