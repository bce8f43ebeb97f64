# SPDX-License-Identifier: Apache-2.0
"""The contract of sandboxes, which run untrusted programs, such as code that a policy wrote.

A reward or an environment declares `needs_sandbox` and gets a `SandboxClient`. Each sample opens its own box: a working
folder in which programs run, in sequence or in parallel. Closing a box ends its programs and deletes its files. A
`Sandbox` is the component that makes boxes. A failed program returns a `ProgramResult`; a broken box raises
InfrastructureError.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Generic, Protocol

from relax_core.api.component import Configurable, OptionsT

SOCKET = "RELAX_SOCKET"
"""Environment variable that gives a program the path, inside the box, of the socket `SandboxLimits.socket`."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """The limits of a box; a program that exceeds a limit is killed."""

    wall_s: float = 10.0
    """Seconds that one program may run; time in the queue for a program slot does not count."""
    memory_mb: int = 512
    """Memory in MiB of one program and all processes that it starts."""
    pids: int = 64
    """Most processes and threads of one program at once."""
    disk_mb: int = 64
    """Size in MiB of all files in the box."""
    output_kb: int = 256
    """Output in KiB of one program, standard output and standard error together."""
    socket: str = ""
    """Path of the one Unix socket outside the box that programs run with `socket=True` can reach; empty: none."""


class ProgramEnd(StrEnum):
    """The reason why a program ended."""

    OK = "ok"
    """The program ended with exit status 0."""
    EXIT = "exit"
    """The program ended with a non-zero exit status."""
    SIGNAL = "signal"
    """The program was killed by a signal that the sandbox did not send."""
    WALL = "wall"
    """The program was killed at its deadline."""
    MEMORY = "memory"
    PIDS = "pids"
    DISK = "disk"
    """The program failed because the box was full, or was killed because its files were too large."""
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The result of a program that has ended."""

    end: ProgramEnd
    code: int = 0
    """Exit status, or the negative number of the signal."""
    stdout: bytes = field(default=b"", repr=False)
    """Standard output; at most `output_kb` together with `stderr`."""
    stderr: bytes = field(default=b"", repr=False)
    seconds: float = 0.0
    """Wall-clock seconds from start to end."""


class Box(Protocol):
    """A working folder with the programs that run in it; paths are relative to the folder."""

    python: str
    """Path of a Python interpreter, as programs in the box see it."""

    async def run(
        self, command: Sequence[str], stdin: bytes = b"", env: Mapping[str, str] | None = None, wall_s: float = 0.0,
        socket: bool = False,
    ) -> ProgramResult:  # fmt: skip
        """Run a program until it and all its processes have ended; raise InfrastructureError if the box is lost.

        `wall_s`: seconds the program may run; 0: the limit of the box. `socket`: give the program the box's socket, at
        `$RELAX_SOCKET`. Such a program mostly waits for answers, so it does not take a program slot.
        """

    async def write(self, path: str, content: bytes) -> None:
        """Write a file, and create its parent folders.

        Raises ValueError for a path that leaves the box or contains a link, InfrastructureError if the box is full.
        """

    async def read(self, path: str, at_most: int = 1 << 20) -> bytes:
        """Return the first `at_most` bytes of a regular file; raise ValueError for a missing file or a link."""


class SandboxClient(Protocol):
    """A client of the run's sandbox."""

    def open(self, limits: SandboxLimits | None = None) -> AbstractAsyncContextManager[Box]:
        """Open a box, by default with the limits `needs_sandbox`; on exit, end its programs and delete its files."""


class _NoSandbox:
    def open(self, limits: SandboxLimits | None = None) -> AbstractAsyncContextManager[Box]:
        raise RuntimeError("needs_sandbox is not set: declare `needs_sandbox = SandboxLimits(...)` in the class")


NO_SANDBOX: SandboxClient = _NoSandbox()


class OpenBox(ABC):
    """A box as a `Sandbox` component returns it: the methods of `Box`, and `close`."""

    python: str

    @abstractmethod
    async def run(
        self, command: Sequence[str], stdin: bytes, env: Mapping[str, str], wall_s: float, socket: bool
    ) -> ProgramResult: ...

    @abstractmethod
    async def write(self, path: str, content: bytes) -> None: ...

    @abstractmethod
    async def read(self, path: str, at_most: int) -> bytes: ...

    @abstractmethod
    async def close(self) -> None:
        """End every program of the box and delete its files; safe to call twice."""


class Sandbox(Configurable[OptionsT], Generic[OptionsT]):
    """A maker of boxes; runs in its own process, without any code of plugin authors or policies."""

    kind: ClassVar[str] = "sandbox"
    isolates: ClassVar[bool] = True
    """False: a program could read the user's files or reach the network, so a configuration must choose it by name."""
    hides_names: ClassVar[bool] = True
    """False: an isolated program can still see which files the user has, with their sizes and times."""
    gives_socket: ClassVar[bool] = False
    """True: boxes support `SandboxLimits.socket`."""

    @abstractmethod
    async def probe(self) -> None:
        """Check that this machine permits the sandbox's isolation; Relax never falls back to a weaker sandbox.

        Raises InfrastructureError with the refused operation and the fix.
        """

    @abstractmethod
    async def open(self, limits: SandboxLimits) -> OpenBox:
        """Return a new, empty box."""
