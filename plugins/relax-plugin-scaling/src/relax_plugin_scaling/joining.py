# SPDX-License-Identifier: Apache-2.0
"""An engine that asks the control API of a run to let it join, and asks again after the run has lost it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from relax_core.api.errors import ConfigError, InfrastructureError
from relax_core.api.role import Clock
from relax_core.api.run_commands import Command, ScaleRequest
from relax_core.runs import Answered

ASK_S = 5.0
"""Seconds between two requests to join."""
FOLLOW_S = 0.5
"""Seconds between two looks at the operation of a request."""
LATER = frozenset({"run", "pool", "operation", "engine"})
"""Fields of a refusal that may become an acceptance: no process runs the run, it has not started its engines, its pool is
busy, or it has not noticed the loss of this engine yet."""


class Api(Protocol):
    """The calls of `ControlClient` that this module uses. They block."""

    def ask(self, command: Command) -> dict[str, Any]: ...

    def get(self, path: str) -> dict[str, Any]: ...


class Uses(Protocol):
    """The ends of the runs' uses of an engine: `EngineHost.ends`."""

    async def get(self) -> str: ...


async def join_until_left(
    api: Api | None, address: str, ends: Uses, clock: Clock, patience_s: float, say: Callable[[str], None]
) -> None:
    """Keep an engine in a run: `asking -> joining -> serving -> left`; a lost connection leads back to `asking`.

    Return when the run lets the engine go. `api` is None if a person asks the run instead. Raises ConfigError or
    InfrastructureError if the run refuses the engine for good, the engine can't join, or no run takes it within
    `patience_s`.
    """
    while True:
        if api is not None:
            await _join(api, address, clock, patience_s, say)
        if await ends.get() == "left":
            say("the run needs this engine no more")
            return
        say("the connection to the run is lost")


async def _join(api: Api, address: str, clock: Clock, patience_s: float, say: Callable[[str], None]) -> None:
    """Ask until the run takes the engine, and follow the join to its end."""
    deadline = clock.now() + patience_s
    while True:
        try:
            operation = await asyncio.to_thread(api.ask, ScaleRequest(uuid.uuid4().hex, address=address))
            break
        except (ConfigError, InfrastructureError) as error:
            if isinstance(error, ConfigError) and not (isinstance(error, Answered) and error.refused in LATER):
                raise
            if clock.now() >= deadline:
                raise InfrastructureError(f"no run took this engine within {patience_s:.0f} s: {error}") from error
            say(f"not yet: {error}")
            await clock.sleep(ASK_S)
    while operation["state"] == "requested":
        await clock.sleep(FOLLOW_S)
        operation = await asyncio.to_thread(api.get, f"/operations/{operation['id']}")
    if operation["state"] == "failed":
        raise InfrastructureError(f"this engine did not join: {operation['detail']}")
    say(f"this engine serves: {operation['detail']}")
