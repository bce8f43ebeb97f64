# SPDX-License-Identifier: Apache-2.0
"""Runs one role to its end, the same way in a local task and in a Ray shell: beats, commands, restarts, last words."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Callable
from dataclasses import replace

from relax_core.api.errors import InfrastructureError, PluginError, RelaxError
from relax_core.api.events import RoleFailed, RoleRecovered
from relax_core.api.role import Role
from relax_core.api.status import Beat, RoleState
from relax_core.runners.context import RoleContext
from relax_core.runners.garbage import collected_seldom

BEAT_S = 0.5
MAX_RESTARTS = 3
"""In place, of one stateless role; then the run stops at its last checkpoint."""


async def run_role(role: Role, make_context: Callable[[int], RoleContext], without_s: float | None = None) -> None:
    """Until the role returns. A stateless one is restarted after an infrastructure failure; other errors are raised.

    `without_s`: it takes over from one that died, so long ago.
    """
    lost_at: float | None = None
    for restart in range(MAX_RESTARTS + 1):
        first = make_context(0)
        if restart == 0 and without_s is not None:
            lost_at = first.clock.now() - without_s
        registration = await first.bus.register(role.name)
        context = make_context(registration.incarnation)
        try:
            with collected_seldom():
                await _attended(role, context, lost_at)
            return
        except Exception as error:
            fatal = not (role.stateless and isinstance(error, InfrastructureError)) or restart == MAX_RESTARTS
            await _report(context, role, error, fatal)
            if fatal:
                raise
            lost_at = context.clock.now()


async def _attended(role: Role, context: RoleContext, lost_at: float | None) -> None:
    """The role with its heartbeat and its ear for commands."""
    attendants = [asyncio.create_task(_beat(context, lost_at)), asyncio.create_task(_listen(context))]
    try:
        await role.run(context)
        await context.board.beat(_last_beat(context, "stopped"))
    finally:
        for attendant in attendants:
            attendant.cancel()
        await asyncio.gather(*attendants, return_exceptions=True)
        await context.close()


async def _beat(context: RoleContext, lost_at: float | None) -> None:
    """And that it has recovered, once it does more than start."""
    while True:
        beat = context.beat()
        await context.board.beat(beat)
        if lost_at is not None and beat.state != "starting":
            await context.board.emit(RoleRecovered(context.role, context.clock.now() - lost_at, "restarted"))
            lost_at = None
        await context.clock.sleep(BEAT_S)


def _last_beat(context: RoleContext, state: RoleState, doing: str = "") -> Beat:
    """With the time that no beat has told; what it did and waited for is over."""
    return replace(context.beat(), state=state, doing=doing, waits=(), facts={})


async def _listen(context: RoleContext) -> None:
    last = 0
    while True:
        for command in await context.board.commands(context.role, last, 5.0):
            last = command.number
            context.take(command.name)


async def _report(context: RoleContext, role: Role, error: Exception, fatal: bool) -> None:
    code = error.exit_code if isinstance(error, RelaxError) else 1
    frames = error.frames if isinstance(error, PluginError) else ""
    if not isinstance(error, RelaxError):
        frames = "".join(traceback.format_exception(error))
    with contextlib.suppress(RelaxError):
        await context.board.beat(_last_beat(context, "failed", str(error)))
        await context.board.emit(RoleFailed(role.name, f"{error}" or type(error).__name__, code, fatal, frames))
