# SPDX-License-Identifier: Apache-2.0
"""The host of the run's sandbox component, in a process of its own; callers name boxes by number.

The process runs no code of authors. Processes of authors request boxes through the role that owns the sandbox. These
processes can't make boxes themselves, since they have given up the right to mount.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from relax_core.api.errors import InfrastructureError
from relax_core.api.sandbox import OpenBox, ProgramResult, Sandbox, SandboxLimits
from relax_core.rpc.isolated_host import IsolatedHost


class SandboxHost(IsolatedHost):
    """The host of a sandbox component: it makes boxes and runs programs in them for a `SandboxPool`.

    Invariants:
    - The pool chooses the numbers; a number names one box from `open_box` to `close_box`.
    - Closing a box ends all its programs, even if its caller is gone or the box is still being made.
    - `end` closes every box.
    """

    ends = True

    async def open(self) -> None:
        """Build the component and probe the machine. Raises InfrastructureError if the component can't work here."""
        self._boxes: dict[int, asyncio.Task[OpenBox]] = {}
        self._running: dict[int, set[asyncio.Task[ProgramResult]]] = {}
        self._sandbox: Sandbox = self.build(self.component)
        await self._sandbox.probe()

    async def open_box(self, number: int, limits: SandboxLimits) -> str:
        """Make a box and return the path of a Python interpreter in it."""
        if limits.socket and not self._sandbox.gives_socket:
            fix = 'choose a sandbox that can, such as [sandbox] name = "bubblewrap"'
            raise InfrastructureError(f"sandbox {self.component.name}: it can't give a box a socket; {fix}")
        self._boxes[number] = asyncio.ensure_future(self._sandbox.open(limits))
        self._running[number] = set()
        return (await self._box(number)).python

    async def run(
        self, number: int, command: Sequence[str], stdin: bytes, env: Mapping[str, str], wall_s: float, socket: bool
    ) -> ProgramResult:
        box = await self._box(number)
        running = asyncio.ensure_future(box.run(list(command), stdin, env, wall_s, socket))
        self._running[number].add(running)
        running.add_done_callback(self._running[number].discard)
        return await asyncio.shield(running)

    async def write(self, number: int, path: str, content: bytes) -> None:
        await (await self._box(number)).write(path, content)

    async def read(self, number: int, path: str, at_most: int) -> bytes:
        return await (await self._box(number)).read(path, at_most)

    async def close_box(self, number: int) -> None:
        opened, running = self._boxes.pop(number, None), self._running.pop(number, set())
        for program in running:
            program.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if opened is not None:
            with suppress(Exception):  # the box was never made
                await (await opened).close()

    async def end(self) -> None:
        await asyncio.gather(*map(self.close_box, list(self._boxes)))

    async def _box(self, number: int) -> OpenBox:
        if number not in self._boxes:
            raise InfrastructureError(f"sandbox box {number} is closed")
        return await asyncio.shield(self._boxes[number])
