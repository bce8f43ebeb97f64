# SPDX-License-Identifier: Apache-2.0
"""The engines' turns on devices that others need too: generate until somebody wants them, pause, go on after.

What is under way at a pause keeps its tokens. An engine pool with its devices to itself is left alone.
"""

from __future__ import annotations

import asyncio

from relax_core.api.role import Context
from relax_core.roles.turn import generating
from relax_core.rollout.pool import EnginePool


async def generate_in_turns(context: Context, pool: EnginePool, undisturbed: asyncio.Lock) -> None:
    """Until cancelled. `undisturbed`: held by who must not be paused half way (an evaluation)."""
    if not context.plan.neighbours("rollout"):
        return
    await pool.pause()
    await context.turns.join("rollout", context.plan.groups["rollout"].devices, pool)
    while True:
        await pool.asked()
        async with generating(context) as turn:
            context.doing("generating", freed_bytes=turn.freed_bytes)
            await pool.resume()
            await turn.wanted()
            async with undisturbed:
                await pool.pause()
