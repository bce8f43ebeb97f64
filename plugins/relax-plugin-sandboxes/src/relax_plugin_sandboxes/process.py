# SPDX-License-Identifier: Apache-2.0
"""Boxes that are folders, in which programs run as plain processes under limits, without isolation.

A program can read all of the user's files, use the network, and leave detached processes behind. This sandbox is for
trusted programs and for machines that allow no isolation. It is never a default: a configuration must name it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import ClassVar

from relax_core.api import InfrastructureError, OpenBox, Options, ProgramResult, Sandbox, SandboxLimits
from relax_plugin_sandboxes.files import read_file, size_of, write_file
from relax_plugin_sandboxes.program import Program, bounded, check_socket, descendants, socket_variable


class ProcessOptions(Options):
    """Options of `process`."""

    python: str = ""
    """Path of the interpreter that a box offers as `box.python`; empty: Relax's interpreter."""


class Process(Sandbox[ProcessOptions]):
    """A sandbox of plain processes under limits, without isolation."""

    isolates: ClassVar[bool] = False
    gives_socket: ClassVar[bool] = True

    async def probe(self) -> None:
        """Do nothing: plain processes need no feature that a machine may lack."""

    async def open(self, limits: SandboxLimits) -> ProcessBox:
        check_socket(limits)
        return ProcessBox(limits, self.options.python or sys.executable)


class ProcessBox(OpenBox):
    """A folder in which programs run; `close` deletes the folder."""

    def __init__(self, limits: SandboxLimits, python: str) -> None:
        self.python, self._limits = python, limits
        self._folder, self._closed = tempfile.mkdtemp(prefix="relax-box-"), False

    async def run(
        self, command: Sequence[str], stdin: bytes, env: Mapping[str, str], wall_s: float, socket: bool
    ) -> ProgramResult:
        if self._closed:
            raise InfrastructureError("sandbox process: the box is closed")
        own = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": self._folder, "TMPDIR": self._folder, "LANG": "C.UTF-8"}
        own |= socket_variable(self._limits, socket, self._limits.socket)
        words = [
            word for word in bounded(self._limits) if not word.startswith("--nproc")
        ]  # --nproc counts all processes of the user

        def kill(pid: int, ended: bool) -> None:
            for one in [*(() if ended else descendants(pid)), -pid]:
                with suppress(OSError):
                    os.kill(one, signal.SIGKILL)

        program = Program([*words, *command], {**own, **env}, self._limits, kill, full=self._is_full, cwd=self._folder)
        return await program.run(stdin, wall_s)

    async def write(self, path: str, content: bytes) -> None:
        if size_of(self._folder) + len(content) > self._limits.disk_mb << 20:
            raise InfrastructureError(f"sandbox file {path!r}: the box is full; raise disk_mb in its limits")
        await asyncio.to_thread(write_file, self._folder, path, content)

    async def read(self, path: str, at_most: int) -> bytes:
        return await asyncio.to_thread(read_file, self._folder, path, at_most)

    async def close(self) -> None:
        self._closed = True
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _is_full(self) -> bool:
        return size_of(self._folder) >= self._limits.disk_mb << 20
