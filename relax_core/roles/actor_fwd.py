# SPDX-License-Identifier: Apache-2.0
"""The actor_fwd role: rows under the newest published policy: log-probs, and its likeliest tokens. Stateless.

Columns carry the version that produced them; the actor recomputes log-probs that are not of the step's start. It has a
copy of the weights of its own: likeliest tokens are needed by a teacher, before the actor has the rows.
"""

from __future__ import annotations

from relax_core.api.algorithm import top_k
from relax_core.api.errors import ComeAgain
from relax_core.api.role import Context, Operation, Reads, Role
from relax_core.api.trainer import Chosen
from relax_core.api.version import Version
from relax_core.api.weights import Manifest
from relax_core.roles.forward import Filling, OneModel, width_of
from relax_core.roles.trainer_group import TrainerGroup

DOOR_S = 5.0
"""For an actor that waits for rows; one that trains does not come, and what is filled then is of older weights."""


class ActorForward(Role):
    """Log-probs under the step's starting weights."""

    name = "actor-fwd"

    @classmethod
    def operations(cls) -> tuple[Operation, ...]:
        consumes = frozenset({"tokens", "loss_mask"})
        return (
            Operation("actor_fwd.log_probs", cls.name, consumes, frozenset({"old_log_probs"}), Reads.STEP_START),
            Operation("actor_fwd.top_k", cls.name, consumes, frozenset({"student_top_k_ids"}), Reads.STEP_START),
        )

    async def run(self, context: Context) -> None:
        trainer = await TrainerGroup.start(context, self.name)
        try:
            await _CurrentWeights(context, self.name, _filling(context), trainer).run()
        finally:
            await trainer.stop()


def _filling(context: Context) -> Filling:
    """What the plan needs of it, in one pass."""
    columns: dict[str, str] = {}
    asks: tuple[str, ...] = ()
    if context.plan.has("actor_fwd.log_probs"):
        columns, asks = {"old_log_probs": "log_probs"}, ("log_probs",)
    if context.plan.has("actor_fwd.top_k"):
        width = width_of(context, "student_top_k_ids")
        columns, asks = {**columns, "student_top_k_ids": "top_k_ids"}, (*asks, top_k(width).key)
    return Filling(columns, asks)


class _CurrentWeights(OneModel):
    _loaded: Version | None = None

    async def version(self) -> Version:
        """Take a newer version if one was published, then say which one this is; it starts with the model folder's."""
        route = await self._route()
        try:
            for link in route:
                await self.trainer.call("load_published", *link)
                self._loaded = link[0].version
        except ComeAgain as missed:
            self.context.doing(f"goes on with what it has: {missed}")
        if route:
            await self.context.weights.forget(self.role, "actor")  # it reads nothing any more
        return self._loaded or (await self.context.bus.version())._replace(step=0)

    async def _route(self) -> tuple[tuple[Manifest, Chosen], ...]:
        """What leads to the newest version; a live one is wanted and waited for, but not as long as a step trains."""
        weights, within_s = self.context.weights, self.context.run.weights.timeout_s
        route = await weights.route("actor", self._loaded, 0.0, None, self.role, within_s)
        if not route and await weights.newest("actor", self._loaded, 0.0) is not None:
            await weights.want(self.role, "actor")
            route = await weights.route("actor", self._loaded, DOOR_S, None, self.role, within_s)
        return route
