# SPDX-License-Identifier: Apache-2.0
"""A sandbox client for tests, which opens boxes in the calling process instead of a run's sandbox process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache

from relax_core.api.component import Chosen
from relax_core.api.sandbox import Box, OpenBox, ProgramResult, Sandbox, SandboxLimits
from relax_core.registry import Catalogue


class DirectSandbox:
    """`api.SandboxClient` of one sandbox component."""

    def __init__(self, sandbox: Sandbox, limits: SandboxLimits) -> None:
        self._sandbox, self._limits = sandbox, limits

    @classmethod
    def of(cls, name: str, limits: SandboxLimits, files: tuple[str, ...]) -> DirectSandbox:
        """Make a client of the sandbox with this name and its default options."""
        return cls(_catalogue(files).build(Chosen("sandbox", name), Sandbox), limits)

    @asynccontextmanager
    async def open(self, limits: SandboxLimits | None = None) -> AsyncIterator[Box]:
        box = await self._sandbox.open(limits or self._limits)
        try:
            yield DirectBox(box)
        finally:
            await box.close()


class DirectBox:
    """`api.Box` of a box that a sandbox component opened."""

    def __init__(self, box: OpenBox) -> None:
        self._box, self.python = box, box.python

    async def run(
        self, command: Sequence[str], stdin: bytes = b"", env: Mapping[str, str] | None = None, wall_s: float = 0.0,
        socket: bool = False,
    ) -> ProgramResult:  # fmt: skip
        return await self._box.run(command, stdin, env or {}, wall_s, socket)

    async def write(self, path: str, content: bytes) -> None:
        await self._box.write(path, content)

    async def read(self, path: str, at_most: int = 1 << 20) -> bytes:
        return await self._box.read(path, at_most)


@cache
def _catalogue(files: tuple[str, ...]) -> Catalogue:
    return Catalogue.load(files)
