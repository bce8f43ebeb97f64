# SPDX-License-Identifier: Apache-2.0
"""The actor_fwd role: log-probs of rows under the newest published policy, on devices of its own. Stateless.

The column carries the version that produced it; the actor recomputes what is not of the step's start.
"""

from __future__ import annotations

from relax_core.api.errors import ComeAgain
from relax_core.api.role import Context, Operation, Reads, Role
from relax_core.api.trainer import Chosen
from relax_core.api.version import Version
from relax_core.api.weights import Manifest
from relax_core.roles.forward import ForwardLoop
from relax_core.roles.trainer_group import TrainerGroup

DOOR_S = 5.0
"""For an actor that waits for rows; one that trains does not come, and what is filled then is of older weights."""


class ActorForward(Role):
    """Log-probs under the step's starting weights."""

    name = "actor-fwd"

    @classmethod
    def operations(cls) -> tuple[Operation, ...]:
        consumes = frozenset({"tokens", "loss_mask"})
        return (Operation("actor_fwd.log_probs", cls.name, consumes, frozenset({"old_log_probs"}), Reads.STEP_START),)

    async def run(self, context: Context) -> None:
        trainer = await TrainerGroup.start(context, self.name)
        try:
            await _CurrentWeights(context, self.name, "old_log_probs").run(trainer)
        finally:
            await trainer.stop()


class _CurrentWeights(ForwardLoop):
    _loaded: Version | None = None

    async def version(self, trainer: TrainerGroup) -> Version:
        """Take a newer version if one was published, then say which one this is; it starts with the model folder's."""
        route = await self._route()
        try:
            for link in route:
                await trainer.call("load_published", *link)
                self._loaded = link[0].version
        except ComeAgain as missed:
            self._context.doing(f"goes on with what it has: {missed}")
        if route:
            await self._context.weights.forget(self._role, "actor")  # it reads nothing any more
        return self._loaded or (await self._context.bus.version())._replace(step=0)

    async def _route(self) -> tuple[tuple[Manifest, Chosen], ...]:
        """What leads to the newest version; a live one is wanted and waited for, but not as long as a step trains."""
        weights, within_s = self._context.weights, self._context.run.weights.timeout_s
        route = await weights.route("actor", self._loaded, 0.0, None, self._role, within_s)
        if not route and await weights.newest("actor", self._loaded, 0.0) is not None:
            await weights.want(self._role, "actor")
            route = await weights.route("actor", self._loaded, DOOR_S, None, self._role, within_s)
        return route
