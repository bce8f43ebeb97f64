# SPDX-License-Identifier: Apache-2.0
"""Sandboxes: places where programs that nobody trusts run, such as what a policy wrote.

A reward or an environment declares `needs_sandbox` and gets a `SandboxClient`; each sample opens a box of its own, a working
folder with programs run in it one after another or side by side, which ends with everything in it. A `Sandbox` is the component
that makes boxes. How a program ended is data; a box that broke is an InfrastructureError, and never the program's fault.
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
"""Environment variable with the path, inside the box, of the socket that a program is given."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Bounds of a box; a program that meets one of them is ended."""

    wall_s: float = 10.0
    """Longest time of one program; waiting for a place to run does not count."""
    memory_mb: int = 512
    """Memory of one program with all that it starts."""
    pids: int = 64
    """Processes and threads that it has at once."""
    disk_mb: int = 64
    """Files in the box."""
    output_kb: int = 256
    """What it prints, standard output and error together."""
    socket: str = ""
    """Path of a Unix socket outside, which programs that are run with `socket=True` reach, and nothing else; empty: none."""


class ProgramEnd(StrEnum):
    """The way in which a program ended."""

    OK = "ok"
    """With status 0."""
    EXIT = "exit"
    """With another status."""
    SIGNAL = "signal"
    """By a signal of its own making."""
    WALL = "wall"
    """It was ended at its deadline."""
    MEMORY = "memory"
    PIDS = "pids"
    DISK = "disk"
    """It failed with the box full."""
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """One program that has ended."""

    end: ProgramEnd
    code: int = 0
    """Exit status, or the negative number of the signal."""
    stdout: bytes = field(default=b"", repr=False)
    """At most `output_kb` together with `stderr`."""
    stderr: bytes = field(default=b"", repr=False)
    seconds: float = 0.0
    """Wall-clock time from its start to its end."""


class Box(Protocol):
    """One box: a working folder, and programs that run in it. Paths are relative to that folder."""

    python: str
    """A Python interpreter as programs in the box find it."""

    async def run(
        self, command: Sequence[str], stdin: bytes = b"", env: Mapping[str, str] | None = None, wall_s: float = 0.0,
        socket: bool = False,
    ) -> ProgramResult:  # fmt: skip
        """Run a program to its end, with all that it started. `wall_s`: another deadline than that of the limits; `socket`: it
        finds the box's socket at `$RELAX_SOCKET`, and takes no place among those that run, since it waits for whoever answers.

        Raises InfrastructureError where the box is lost."""

    async def write(self, path: str, content: bytes) -> None:
        """Write a file, and the folders above it. Raises ValueError for a path out of the box, or one with a link in it,
        InfrastructureError where it has no room."""

    async def read(self, path: str, at_most: int = 1 << 20) -> bytes:
        """Read the beginning of a regular file; ValueError where there is none, or a link."""


class SandboxClient(Protocol):
    """A client of the run's sandbox."""

    def open(self, limits: SandboxLimits | None = None) -> AbstractAsyncContextManager[Box]:
        """Open a box; without `limits` with those that were declared. At the end nothing of it is left."""


class _NoSandbox:
    def open(self, limits: SandboxLimits | None = None) -> AbstractAsyncContextManager[Box]:
        raise RuntimeError("no sandbox was asked for: declare `needs_sandbox = SandboxLimits(...)` in the class")


NO_SANDBOX: SandboxClient = _NoSandbox()


class OpenBox(ABC):
    """A box that a component has made; as `Box`, and closed by whoever opened it."""

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
        """End every program of the box and delete its files; it may be called again."""


class Sandbox(Configurable[OptionsT], Generic[OptionsT]):
    """Makes boxes, in a process of its own that runs no code of authors or policies."""

    kind: ClassVar[str] = "sandbox"
    isolates: ClassVar[bool] = True
    """False where a program in it could read the user's files or reach the network: such a one is used by name only."""
    hides_names: ClassVar[bool] = True
    """False where a program in one that isolates can still learn that a file of the user is there, and its size and times."""
    gives_socket: ClassVar[bool] = False
    """True where its boxes take `SandboxLimits.socket`."""

    @abstractmethod
    async def probe(self) -> None:
        """Check that this machine lets it do what it promises. Raises InfrastructureError with what is refused and what to do:
        nothing weaker is ever used instead."""

    @abstractmethod
    async def open(self, limits: SandboxLimits) -> OpenBox:
        """Make an empty box."""
