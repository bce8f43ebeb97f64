# SPDX-License-Identifier: Apache-2.0
"""Workers: processes that do a role's work and die together with nothing else.

A worker hosts one component instance and answers calls of its public methods over the wire protocol.
Roles start them through `Workers` and never learn whether one is a child process or a Ray actor.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from relax_core.api.component import Chosen


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One process to start."""

    name: str
    """Unique in the run: `engine-0`, `actor-rank-1`."""
    component: Chosen
    """What it hosts; `options` are plain data."""
    python: str = ""
    """Another interpreter; empty: this one."""
    env: Mapping[str, str] = field(default_factory=dict)
    run_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The run's own variables (`[run] env`), secrets read: over `env`, and never in logs."""
    devices: tuple[str, ...] = ()
    """Of the plan's, `gpu:3`, that are its own or its part of; none named: whatever this process sees."""
    num_gpus: float = 0.0
    """Its share of them: those on one device have equal parts."""
    memory_mb: int = 0
    """Address-space limit of a child process; 0: none."""
    inherit_env: tuple[str, ...] | None = None
    """The only variables of the starting process that a child process sees; None: all of them."""
    target: str = ""
    """Instead of a component: `module:Class`, built without arguments (the core's own hosts)."""


class Worker(Protocol):
    """A handle on a running worker."""

    name: str
    pid: int
    host: str
    """Address of its machine as other machines reach it; loopback where all workers are on one."""

    async def free_port(self, address: str) -> int:
        """A port of its machine, at this address of it, that was free a moment ago."""
        ...

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Await one method. Its plain error comes back as the same built-in type, or PluginError with its frames.

        Raises WorkerDied when the process ended, DeadlineExceeded after `timeout_s` (the call may still run).
        """
        ...

    def stream(self, method: str, *args: Any, timeout_s: float) -> AsyncIterator[Any]:
        """Items of an async-iterating method; `timeout_s` bounds the silence between items."""
        ...

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Let it end, then kill it with its children."""
        ...

    async def kill(self) -> None:
        """SIGKILL it with its children, now."""
        ...


class Workers(Protocol):
    """Starts workers."""

    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float = 120.0) -> tuple[Worker, ...]:
        """All of them, or none: on a failure what was started is killed and the error raised."""
        ...
