# SPDX-License-Identifier: Apache-2.0
"""What roles that only read a model share: claim rows, run them forward without gradient, write columns.

`Filling` says which; who fills them, and under which weights, is the role's own.

The reference role: log-probs of rows under the weights the run started from. Stateless.

The actor_fwd role: rows under the newest published policy: log-probs, and its likeliest tokens. Stateless.

Columns carry the version that produced them; the actor recomputes log-probs that are not of the step's start. It has a
copy of the weights of its own: likeliest tokens are needed by a teacher, before the actor has the rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from relax_core.api.algorithm import top_k
from relax_core.api.batch import Ragged, RowBatch
from relax_core.api.bus import Claim, ClaimRequest
from relax_core.api.errors import RetryLater, StaleFence
from relax_core.api.plan import Operation, Reads
from relax_core.api.role import Role
from relax_core.api.routing import ROUTES
from relax_core.api.trainer import Chosen
from relax_core.api.weights import Manifest, Version
from relax_core.config.run_config import RunContext
from relax_core.roles.device_lease import forwarding
from relax_core.roles.rank_group import RankGroup

POLL_S = 1.0
INPUTS = ("tokens", "loss_mask")
Filled = tuple[Mapping[str, Ragged], Version | None]
"""Columns, and the weights that computed them; None for fixed ones."""


@dataclass(frozen=True, slots=True)
class Filling:
    """Columns of the bus and what they are made of."""

    columns: Mapping[str, str]
    """By column of the bus, its name in what a forward gives."""
    asks: tuple[str, ...] = ("log_probs",)
    """Keys of the outputs that a forward is asked for."""
    inputs: tuple[str, ...] = INPUTS

    def of(self, given: Mapping[str, Ragged]) -> dict[str, Ragged]:
        return {column: given[name] for column, name in self.columns.items()}


def width_of(context: RunContext, column: str) -> int:
    """k of a column [tokens, k] that the run's algorithm reads."""
    algorithm = context.build(context.config.learner)
    return int(next(known.shape[0] for known in algorithm.columns() if known.name == column))


class ForwardLoop:
    """Claims rows as they are ready and writes what `fill` makes of them."""

    def __init__(self, context: RunContext, role: str, filling: Filling, owed_by: str = "") -> None:
        self.context, self.role, self.filling = context, role, filling
        self._names, self._owed_by = ", ".join(filling.columns), owed_by or context.plan.producer
        self._inputs = (*filling.inputs, *(("media",) if context.config.media else ()), *self._routes())
        self._most = context.config.rollout.prompts_per_step
        self._least = self._most if self._interrupts() else 1
        self._patience_s = context.config.rollout.step_timeout_s / 2

    async def run(self) -> None:
        context, last = self.context, self.context.clock.now()
        while not context.stopping:
            await context.pause_point()
            late = context.clock.now() - last > self._patience_s  # the actor closes its step short at its deadline
            request = ClaimRequest(self.role, self._inputs, self._most, 1 if late else self._least)
            with context.waiting(f"rows that lack {self._names}", self._owed_by, POLL_S):
                claim = await context.bus.claim(request, POLL_S)
            if claim is not None:
                await self._work(claim)
                last = context.clock.now()
            elif (await context.bus.version()).step >= context.config.steps:
                return

    @abstractmethod
    async def fill(self, rows: RowBatch) -> Filled:
        """The columns of these rows; takes the turns that it needs."""
        raise NotImplementedError

    def lives(self) -> tuple[str, ...]:
        """Worker groups that do the work."""
        return (self.role,)

    def _routes(self) -> tuple[str, ...]:
        """The policy visits the experts that its tokens visited when they were sampled; other models route for themselves."""
        replays = self.role == "actor-fwd" and self.context.config.model.routing_replay == "rollout"
        return ROUTES if replays else ()

    def _interrupts(self) -> bool:
        """On the engines' devices only whole steps are worth an interruption."""
        return any("rollout" in self.context.plan.neighbours(group) for group in self.lives())

    async def _work(self, claim: Claim) -> None:
        bus = self.context.bus
        try:
            rows = await bus.read(claim, self._inputs)
            columns, version = await self.fill(rows)
            await bus.write(claim, columns, version)
            await bus.acknowledge(claim)
        except StaleFence:
            return  # another incarnation has these rows now and will fill them


class OneModel(ForwardLoop):
    """Fills its columns with one model's outputs."""

    def __init__(self, context: RunContext, role: str, filling: Filling, trainer: RankGroup) -> None:
        super().__init__(context, role, filling)
        self.trainer = trainer

    async def fill(self, rows: RowBatch) -> Filled:
        async with forwarding(self.context, self.role):
            self.context.doing(f"filling {self._names}", groups=len({row.group for row in rows.ids}))
            version = await self.version()
            return self.filling.of(await self.trainer.forward(rows, self.filling.asks)), version

    async def version(self) -> Version | None:
        """The weights that fill the columns; None for fixed ones."""
        return None


class Reference(Role):
    """Log-probs under fixed weights."""

    name = "reference"

    @classmethod
    def operations(cls) -> tuple[Operation, ...]:
        consumes = frozenset({"tokens", "loss_mask"})
        return (Operation("reference.log_probs", cls.name, consumes, frozenset({"ref_log_probs"}), Reads.FIXED),)

    async def run(self, context: RunContext) -> None:
        trainer = await RankGroup.start(context, self.name)
        try:
            await OneModel(context, self.name, Filling({"ref_log_probs": "log_probs"}), trainer).run()
        finally:
            await trainer.stop()


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

    async def run(self, context: RunContext) -> None:
        trainer = await RankGroup.start(context, self.name)
        try:
            await _CurrentWeights(context, self.name, _filling(context), trainer).run()
        finally:
            await trainer.stop()


def _filling(context: RunContext) -> Filling:
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
        except RetryLater as missed:
            self.context.doing(f"goes on with what it has: {missed}")
        if route:
            await self.context.weights.forget(self.role, "actor")  # it reads nothing any more
        return self._loaded or (await self.context.bus.version())._replace(step=0)

    async def _route(self) -> tuple[tuple[Manifest, Chosen], ...]:
        """What leads to the newest version; a live one is wanted and waited for, but not as long as a step trains."""
        weights, within_s = self.context.weights, self.context.config.weights.timeout_s
        route = await weights.route("actor", self._loaded, 0.0, None, self.role, within_s)
        if not route and await weights.newest("actor", self._loaded, 0.0) is not None:
            await weights.want(self.role, "actor")
            route = await weights.route("actor", self._loaded, DOOR_S, None, self.role, within_s)
        return route
