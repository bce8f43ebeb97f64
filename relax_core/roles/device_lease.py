# SPDX-License-Identifier: Apache-2.0
"""The turns that roles take on their devices: what each phase needs awake, and the trainer's turn through a step.

Nobody waits for rows while holding one. Where a role has its devices to itself, all of this costs nothing.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AsyncExitStack

from relax_core.api.devices import DeviceLease, OffloadPart
from relax_core.config.run_config import RunContext

TURN_S = 3600.0
"""As long as the longest call of a trainer may take: what is before us is somebody's work."""
ENGINE: tuple[OffloadPart, ...] = ("weights", "kv")
TRAINER: tuple[OffloadPart, ...] = ("weights", "optimizer", "gradients")


def generating(context: RunContext) -> AbstractAsyncContextManager[DeviceLease]:
    """A turn of the engines."""
    return context.turns.acquire(context.plan.groups["rollout"].devices, "generate", {"rollout": ENGINE}, TURN_S)


def forwarding(context: RunContext, role: str) -> AbstractAsyncContextManager[DeviceLease]:
    """A turn of a model that is only read."""
    return context.turns.acquire(context.plan.groups[role].devices, "forward", {role: ("weights",)}, TURN_S)


class TrainerDeviceLease:
    """The devices of a trainer while it works on a step: taken once rows are there, kept until the weights are out."""

    def __init__(self, context: RunContext, role: str, live: bool) -> None:
        """`live`: weights go from memory to memory, so that a publish needs the engines' awake too."""
        self._context, self._role = context, role
        self._receivers = ("rollout",) if live and "rollout" in context.plan.neighbours(role) else ()
        self.shared = bool(context.plan.neighbours(role))
        self.freed_bytes = 0
        """Of the last turn."""
        self._stack = AsyncExitStack()
        self._turn: DeviceLease | None = None

    async def train(self) -> None:
        """Have the devices to train on them."""
        if self._turn is None:
            groups = self._context.plan.groups
            devices = frozenset[str]().union(*(groups[name].devices for name in (self._role, *self._receivers)))
            turn = self._context.turns.acquire(devices, "train", {self._role: TRAINER}, TURN_S)
            self._turn = await self._stack.enter_async_context(turn)
            self.freed_bytes = self._turn.freed_bytes

    async def publish(self) -> None:
        """Go on with what a publish needs awake; begun with `train`."""
        if self._turn is not None:
            holders: dict[str, tuple[OffloadPart, ...]] = dict.fromkeys((self._role, *self._receivers), ("weights",))
            await self._turn.become("publish", holders, TURN_S)

    async def let_go(self) -> None:
        self._turn = None
        await self._stack.aclose()

    async def __aenter__(self) -> TrainerDeviceLease:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.let_go()
