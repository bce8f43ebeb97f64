# SPDX-License-Identifier: Apache-2.0
"""A child process in a session of its own, awaited through its pidfd.

asyncio's own subprocess transport is not used: cancelled while it connects its pipes, it never returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Self


class Child:
    """One process and whatever it starts."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen, self.pid = popen, popen.pid
        self._ended = asyncio.Event()
        self._descriptor = os.pidfd_open(popen.pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._reap)

    @classmethod
    def start(cls, command: Sequence[str], env: Mapping[str, str], log: int | None, keep: int) -> Self:
        """`log` takes both outputs, `keep` is a descriptor that the child inherits."""
        return cls(
            subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=dict(env),
                pass_fds=(keep,),
                start_new_session=True,
            )
        )

    @property
    def returncode(self) -> int | None:
        return self._popen.returncode

    async def tell(self, data: bytes) -> None:
        """Write to its standard input; one that has ended already is noticed by its silence."""
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(_write, self._popen.stdin.fileno(), data)

    async def wait(self) -> None:
        await self._ended.wait()

    def let_go(self) -> None:
        """Close its standard input: it ends by itself."""
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()

    async def kill(self) -> None:
        """SIGKILL it with its children."""
        if not self._ended.is_set():
            self._kill_session()
        await self._ended.wait()
        self.let_go()

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _reap(self) -> None:
        """What it started ends with it; only until it is waited for is its number surely its own."""
        self._kill_session()
        self._popen.wait()
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._ended.set()


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
