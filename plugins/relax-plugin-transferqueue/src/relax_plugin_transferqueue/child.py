# SPDX-License-Identifier: Apache-2.0
"""TransferQueue's servers in one child process, for runs without a Ray cluster.

The child runs this module. The child ends when its standard input closes, and so whenever its parent ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from typing import Any

from relax_plugin_transferqueue import package

LOOPBACK = "127.0.0.1"
START_S = 120.0
STOP_S = 5.0


class ChildServers:
    """An implementation of `store.Servers` with one child process."""

    shared = False

    def __init__(self, process: subprocess.Popen[str], addresses: dict[str, Any]) -> None:
        self._process = process
        self.controller: dict[str, Any] = addresses["controller"]
        self.units: list[dict[str, Any]] = addresses["units"]

    @classmethod
    async def start(cls, units: int) -> ChildServers:
        process = await asyncio.to_thread(_spawn, units)
        try:
            async with asyncio.timeout(START_S):
                line = await asyncio.to_thread(_first_line, process)
        except BaseException:
            process.kill()
            process.wait()
            raise
        if not line:
            raise RuntimeError(f"the TransferQueue servers exited with code {process.wait()} before they were ready")
        return cls(process, json.loads(line))

    async def dead(self) -> str:
        """Return a message if the child process has ended, else an empty string."""
        code = self._process.poll()
        return "" if code is None else f"the process of the servers ended with {code}"

    async def close(self) -> None:
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self._process.kill()
        self._process.wait()


def _spawn(units: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "relax_plugin_transferqueue.child", str(units)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,  # a Ctrl-C at the terminal is for the run, which stops this process last
    )  # fmt: skip


def _first_line(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline() if process.stdout is not None else ""


def main(units: int) -> None:
    """Start the servers, write their addresses to standard output, and serve until the parent is gone."""
    answer = os.dup(1)
    os.dup2(2, 1)  # keeps prints of the package out of the answer
    servers = [package.serve_controller(LOOPBACK), *(package.serve_unit(LOOPBACK) for _ in range(units))]
    controller, *stores = [package.describe(server) for server in servers]
    with os.fdopen(answer, "w") as out:
        out.write(json.dumps({"controller": controller, "units": stores}) + "\n")
    sys.stdin.read()
    os._exit(0)  # the package's threads never end


if __name__ == "__main__":
    main(int(sys.argv[1]))
