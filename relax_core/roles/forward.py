# SPDX-License-Identifier: Apache-2.0
"""Roles that fill columns of rows: claim, compute, write. `ForwardLoop` is the loop of those that only read a model.

The advantages role credits samples. The reference role fills log-probs under the weights that the run started from. The
actor_fwd role fills log-probs and the likeliest tokens under the newest published policy, with a copy of the weights of its
own: a teacher needs likeliest tokens before the actor has the rows. Columns carry the version that computed them; the actor
computes outdated ones anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from relax_core.api.algorithm import Algorithm, top_k
from relax_core.api.batch import Ragged, RowBatch
from relax_core.api.bus import ClaimRequest
from relax_core.api.errors import RetryLater, StaleFence
from relax_core.api.family import ROUTES
from relax_core.api.plan import Operation, Reads
from relax_core.api.role import DeviceLease, Role
from relax_core.api.weights import Version
from relax_core.config.run_config import RunContext
from relax_core.roles.rank_group import CALL_S, LEASE_S, RankGroup
from relax_core.roles.row_leases import renewed

POLL_S = 1.0
MIN_TURNS = 2
"""Waits for devices, each with a computation after it, that the deadline of one claim allows: a critic learns before it
values, and each of several teachers has its own."""
INPUTS = ("tokens", "loss_mask")
Filled = tuple[Mapping[str, Ragged], Version | None]
"""Columns, and the weights that computed them; None for fixed ones."""


@dataclass(frozen=True, slots=True)
class ForwardColumns:
    """Columns of the bus and the outputs of a model that fill them."""

    columns: Mapping[str, str]
    """By column of the bus, its name in the result of a forward."""
    outputs: tuple[str, ...] = ("log_probs",)
    """Keys of the outputs that a forward is asked for."""
    inputs: tuple[str, ...] = INPUTS

    def of(self, result: Mapping[str, Ragged]) -> dict[str, Ragged]:
        return {column: result[name] for column, name in self.columns.items()}


class ForwardModel(Protocol):
    """The ranks of a trainer, or an engine pool that scores."""

    async def forward(self, rows: RowBatch, columns: Sequence[str]) -> Mapping[str, Ragged]: ...


def forward_lease(context: RunContext, group: str) -> AbstractAsyncContextManager[DeviceLease]:
    """Lease the devices of a worker group whose model is only read; engines need their caches too."""
    return context.devices.acquire(context.plan.groups[group].devices, "forward", {group: ("weights", "kv")}, LEASE_S)


class ForwardLoop:
    """Fills columns of rows with a model's outputs, as rows are ready, until the run's last step is committed.

    A claim: `claimed -> read -> filled under a device lease -> written -> acknowledged | lost to another incarnation`.

    Invariants: no lease on devices is held while rows are waited for. The row lease is renewed however long devices are waited
    for and computed on; work on one claim that never ends ends the role, which gives the rows back. Where the engines share
    the devices, whole steps are claimed, since only those are worth an interruption; past half of a step's deadline whatever
    is ready is claimed, since the actor closes its step short at the deadline.
    """

    def __init__(
        self, context: RunContext, role: str, columns: ForwardColumns, model: ForwardModel | None = None, *,
        task: str = "", owed_by: str = "", groups: Sequence[str] = (), whole_steps: bool = False,
    ) -> None:  # fmt: skip
        """`groups`: worker groups that do the work, where they are not the role's; `model` may be left to `fill`."""
        self.context, self.role, self.columns, self.model = context, role, columns, model
        self._names, self._owed_by = ", ".join(columns.columns), owed_by or context.plan.producer
        self._task = task or role
        self._inputs = (*columns.inputs, *(("media",) if context.config.media else ()))
        self._most = context.config.rollout.prompts_per_step
        interrupts = any("rollout" in context.plan.neighbours(group) for group in groups or (role,))
        self._least = self._most if whole_steps or interrupts else 1
        self._limit_s = max(MIN_TURNS, len(groups)) * (LEASE_S + CALL_S)

    async def run(self) -> None:
        context, last = self.context, self.context.clock.now()
        while not context.stopping:
            await context.pause_point()
            late = context.clock.now() - last > context.config.rollout.step_timeout_s / 2
            request = ClaimRequest(self._task, self._inputs, self._most, 1 if late else self._least)
            with context.waiting(f"rows that lack {self._names}", self._owed_by, POLL_S):
                claim = await context.bus.claim(request, POLL_S)
            if claim is None:
                if await self.over():
                    return
                continue
            with contextlib.suppress(StaleFence):  # another incarnation has these rows now and will fill them
                async with renewed(context, self.role, lambda claim=claim: (claim,), self._limit_s):  # type: ignore[misc]
                    await self.ready()
                    columns, version = await self.fill(await context.bus.read(claim, self._inputs))
                    await context.bus.write(claim, columns, version)
                    await context.bus.acknowledge(claim)
            last = context.clock.now()

    async def ready(self) -> None:
        """Return once the weights may fill the rows that were just claimed."""

    async def fill(self, rows: RowBatch) -> Filled:
        """Compute the columns of these rows under the device leases that they need."""
        if self.model is None:
            raise NotImplementedError(f"{self.role}: give ForwardLoop a model, or override fill")
        async with forward_lease(self.context, self.role):
            self.context.doing(f"filling {self._names}", groups=len({row.group for row in rows.ids}))
            version = await self.version()
            return self.columns.of(await self.model.forward(rows, self.columns.outputs)), version

    async def version(self) -> Version | None:
        """Return the weights that fill the columns; None for fixed ones."""
        return None

    async def over(self) -> bool:
        """Tell whether no rows come any more."""
        return (await self.context.bus.version()).step >= self.context.config.steps


def width_of(context: RunContext, column: str) -> int:
    """Return k of a column [tokens, k] that the run's algorithm reads."""
    algorithm = context.build(context.config.learner, Algorithm)
    return int(next(known.shape[0] for known in algorithm.columns() if known.name == column))


class AdvantagesRole(Role):
    """Credits the samples of whole groups and writes the column that the actor trains on. Stateless."""

    name = "advantages"

    @classmethod
    def operations(cls) -> tuple[Operation, ...]:
        consumes = frozenset({"tokens", "loss_mask", "rewards"})
        return (
            Operation("advantages.compute", cls.name, consumes, frozenset({"advantages", "returns"}), scope="group"),
        )

    async def run(self, context: RunContext) -> None:
        # Torch takes seconds to import: do it beside the other roles' start, not on the loop at the first step.
        credited = (await asyncio.to_thread(importlib.import_module, "relax_core.learn.groups")).credited
        algorithm, columns = context.build(context.config.learner, Algorithm), context.plan.advantage_columns
        groups = context.config.rollout.prompts_per_step
        request = ClaimRequest(self.name, columns, groups, groups if context.plan.batch_statistics else 1)
        while not context.stopping:
            await context.pause_point()
            with context.waiting("finished groups", "rollout", POLL_S):
                claim = await context.bus.claim(request, POLL_S)
            if claim is not None:
                context.doing("crediting", groups=len(claim.groups))
                try:
                    rows = await context.bus.read(claim, columns)
                    await context.bus.write(claim, credited(algorithm, rows, claim.samples, columns))
                    await context.bus.acknowledge(claim)
                except StaleFence:
                    pass  # another incarnation has these rows now and will credit them
            elif (await context.bus.version()).step >= context.config.steps:
                return


class Reference(Role):
    """Log-probs under fixed weights. Stateless."""

    name = "reference"

    @classmethod
    def operations(cls) -> tuple[Operation, ...]:
        return (
            Operation("reference.log_probs", cls.name, frozenset(INPUTS), frozenset({"ref_log_probs"}), Reads.FIXED),
        )

    async def run(self, context: RunContext) -> None:
        async with await RankGroup.start(context, self.name) as trainer:
            await ForwardLoop(context, self.name, ForwardColumns({"ref_log_probs": "log_probs"}), trainer).run()


LIVE_S = 5.0
"""Wait for an actor that waits for rows; one that trains does not serve, and the columns are of older weights then."""


class ActorForward(Role):
    """Log-probs and likeliest tokens under the step's starting weights. Stateless."""

    name = "actor-fwd"

    @classmethod
    def operations(cls) -> tuple[Operation, ...]:
        rows = frozenset(INPUTS)
        return (
            Operation("actor_fwd.log_probs", cls.name, rows, frozenset({"old_log_probs"}), Reads.STEP_START),
            Operation("actor_fwd.top_k", cls.name, rows, frozenset({"student_top_k_ids"}), Reads.STEP_START),
        )

    async def run(self, context: RunContext) -> None:
        columns: dict[str, str] = {}
        outputs: tuple[str, ...] = ()
        if context.plan.has("actor_fwd.log_probs"):
            columns, outputs = {"old_log_probs": "log_probs"}, ("log_probs",)
        if context.plan.has("actor_fwd.top_k"):
            columns["student_top_k_ids"] = "top_k_ids"
            outputs = (*outputs, top_k(width_of(context, "student_top_k_ids")).key)
        # The policy visits the experts that its tokens visited when they were sampled.
        routes = ROUTES if context.config.model.routing_replay == "rollout" else ()
        async with await RankGroup.start(context, self.name) as trainer:
            forward = ForwardColumns(columns, outputs, (*INPUTS, *routes))
            await _NewestWeights(context, self.name, forward, trainer).run()


class _NewestWeights(ForwardLoop):
    """Fills columns under the newest published weights; it starts with those of its ranks, the model folder's as a rule."""

    model: RankGroup

    async def version(self) -> Version:
        """Load a newer version if one was published, then say which one this is.

        A live version is wanted and waited for, but not as long as a step trains.
        """
        weights, within_s = self.context.weights, self.context.config.weights.timeout_s
        route = await weights.route("actor", self.model.loaded, 0.0, None, self.role, within_s)
        if not route and await weights.newest("actor", self.model.loaded, 0.0) is not None:
            await weights.want(self.role, "actor")
            route = await weights.route("actor", self.model.loaded, LIVE_S, None, self.role, within_s)
        try:
            for manifest, transport in route:
                await self.model.call("load_published", manifest, transport)
                self.model.loaded = manifest.version
        except RetryLater as missed:
            self.context.doing(f"goes on with what it has: {missed}")
        if route:
            await weights.forget(self.role, "actor")  # it reads nothing any more
        return self.model.loaded or (await self.context.bus.version())._replace(step=0)
