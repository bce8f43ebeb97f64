# SPDX-License-Identifier: Apache-2.0
"""Roles that claim rows, compute columns and write them. `ForwardLoop` is the loop of roles that run a model forward.

- `advantages` computes advantages and returns of whole groups.
- `reference` fills log-probs under fixed weights, by default those that the run started from.
- `actor-fwd` fills log-probs and top-k tokens under the newest published policy, with its own copy of the weights. A
  teacher needs the top-k tokens before the actor claims the rows.

Columns carry the version that computed them; the actor recomputes outdated log-probs.
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
from relax_core.api.family import ROUTED_COLUMNS
from relax_core.api.plan import Operation, Reads
from relax_core.api.role import DeviceLease, Role
from relax_core.api.weights import Version
from relax_core.config.run_config import RunContext
from relax_core.devices.client import DEVICE_LEASE_WAIT_S
from relax_core.roles.rank_group import CALL_S, RankGroup
from relax_core.roles.row_leases import renewed

POLL_S = 1.0
MIN_TURNS = 2
"""Smallest number of waits for devices, each with a computation after it, that the time limit of a claim allows for. A
critic learns before it fills values; each of several teachers waits for its own devices.
"""
INPUTS = ("tokens", "loss_mask")
Filled = tuple[Mapping[str, Ragged], Version | None]
"""Columns, and the version of the weights that computed them; None for fixed weights."""


@dataclass(frozen=True, slots=True)
class ForwardColumns:
    """Columns of the bus, and the model outputs that fill them."""

    columns: Mapping[str, str]
    """The bus column to fill -> the name of its values in the result of a forward pass."""
    outputs: tuple[str, ...] = ("log_probs",)
    """Keys of the outputs that the forward pass computes."""
    inputs: tuple[str, ...] = INPUTS
    """Columns that the forward pass reads."""

    def of(self, result: Mapping[str, Ragged]) -> dict[str, Ragged]:
        return {column: result[name] for column, name in self.columns.items()}


class ForwardModel(Protocol):
    """A model that fills columns: the ranks of a trainer, or an engine pool that scores rows."""

    async def forward(self, rows: RowBatch, columns: Sequence[str]) -> Mapping[str, Ragged]: ...


def forward_lease(context: RunContext, group: str) -> AbstractAsyncContextManager[DeviceLease]:
    """Lease the devices of a worker group for a forward pass, with its weights and KV cache loaded."""
    devices = context.plan.groups[group].devices
    return context.devices.acquire(devices, "forward", {group: ("weights", "kv")}, DEVICE_LEASE_WAIT_S)


class ForwardLoop:
    """A loop that fills columns of ready rows with a model's outputs until the run's last step is committed.

    A claim: `claimed -> read -> filled under a device lease -> written -> acknowledged | lost to another registration`.

    Invariants:
    - No device lease is held while the loop waits for rows.
    - The row lease is renewed while the loop waits for devices and computes. If the work on one claim exceeds its time
      limit, the role ends and its rows return to the bus.
    - If the rollout's engines share the devices, the loop claims whole steps, since fewer rows are not worth an
      interruption of the engines. After half of `rollout.step_timeout_s` it claims all ready rows, since the actor
      closes its step at the deadline.
    """

    def __init__(
        self, context: RunContext, role: str, columns: ForwardColumns, model: ForwardModel | None = None, *,
        task: str = "", blocked_by: str = "", groups: Sequence[str] = (), whole_steps: bool = False,
    ) -> None:  # fmt: skip
        """Make the loop of a role.

        `task`: name under which rows are claimed; empty: the role's name. `blocked_by`: role that the loop waits for;
        empty: the role that produces rows. `groups`: worker groups that compute, if not the role's own. `model`: None
        if a subclass overrides `fill`. `whole_steps`: always claim the groups of a whole step together.
        """
        self.context, self.role, self.columns, self.model = context, role, columns, model
        self._names, self._blocked_by = ", ".join(columns.columns), blocked_by or context.plan.producer
        self._task = task or role
        self._inputs = (*columns.inputs, *(("media",) if context.config.media else ()))
        self._groups_per_step = context.config.rollout.groups_per_step
        interrupts = any("rollout" in context.plan.neighbours(group) for group in groups or (role,))
        self._min_groups = self._groups_per_step if whole_steps or interrupts else 1
        self._limit_s = max(MIN_TURNS, len(groups)) * (DEVICE_LEASE_WAIT_S + CALL_S)

    async def run(self) -> None:
        context, last = self.context, self.context.clock.now()
        while not context.stopping:
            await context.pause_point()
            late = context.clock.now() - last > context.config.rollout.step_timeout_s / 2
            request = ClaimRequest(self._task, self._inputs, self._groups_per_step, 1 if late else self._min_groups)
            with context.waiting(f"rows that lack {self._names}", self._blocked_by, POLL_S):
                claim = await context.bus.claim(request, POLL_S)
            if claim is None:
                if await self.over():
                    return
                continue
            with contextlib.suppress(StaleFence):  # another registration has these rows now and will fill them
                async with renewed(context, self.role, lambda claim=claim: (claim,), self._limit_s):  # type: ignore[misc]
                    await self.ready()
                    columns, version = await self.fill(await context.bus.read(claim, self._inputs))
                    await context.bus.write(claim, columns, version)
                    await context.bus.acknowledge(claim)
            last = context.clock.now()

    async def ready(self) -> None:
        """Wait until the model may fill the claimed rows. A subclass whose model is trained overrides this."""

    async def fill(self, rows: RowBatch) -> Filled:
        """Lease the devices and compute the columns of these rows."""
        if self.model is None:
            raise NotImplementedError(f"{self.role}: give ForwardLoop a model, or override fill")
        async with forward_lease(self.context, self.role):
            self.context.doing(f"filling {self._names}", groups=len({row.group for row in rows.ids}))
            version = await self.version()
            return self.columns.of(await self.model.forward(rows, self.columns.outputs)), version

    async def version(self) -> Version | None:
        """Return the version of the weights that fill the columns; None for fixed weights."""
        return None

    async def over(self) -> bool:
        """Return True if no more rows will come."""
        return (await self.context.bus.version()).step >= self.context.config.steps


def width_of(context: RunContext, column: str) -> int:
    """Return k of a column of shape [tokens, k] that the run's algorithm reads."""
    algorithm = context.build(context.config.learner, Algorithm)
    return int(next(known.shape[0] for known in algorithm.columns() if known.name == column))


class AdvantagesRole(Role):
    """The role that computes `advantages` and `returns` of whole groups for the actor. Stateless."""

    name = "advantages"

    @classmethod
    def operations(cls) -> tuple[Operation, ...]:
        consumes = frozenset({"tokens", "loss_mask", "rewards"})
        return (Operation("advantages.compute", cls.name, consumes, frozenset({"advantages", "returns"})),)

    async def run(self, context: RunContext) -> None:
        # Torch takes seconds to import: import it in a thread while the other roles start, not at the first step.
        credited = (await asyncio.to_thread(importlib.import_module, "relax_core.learn.groups")).credited
        algorithm, columns = context.build(context.config.learner, Algorithm), context.plan.advantage_columns
        groups = context.config.rollout.groups_per_step
        weights = {reward.known_as: reward.weight for reward in context.config.rewards}
        request = ClaimRequest(self.name, columns, groups, groups if context.plan.batch_statistics else 1)
        while not context.stopping:
            await context.pause_point()
            with context.waiting("finished groups", "rollout", POLL_S):
                claim = await context.bus.claim(request, POLL_S)
            if claim is not None:
                context.doing("crediting", groups=len(claim.groups))
                try:
                    rows = await context.bus.read(claim, columns)
                    await context.bus.write(claim, credited(algorithm, rows, claim.samples, columns, weights))
                    await context.bus.acknowledge(claim)
                except StaleFence:
                    pass  # another registration has these rows now and will credit them
            elif (await context.bus.version()).step >= context.config.steps:
                return


class Reference(Role):
    """The role that fills `ref_log_probs` under fixed weights. Stateless."""

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
"""Seconds to wait for live weights, which the actor sends only while it waits for rows. After this wait the role fills
columns with the weights that it already has.
"""


class ActorForward(Role):
    """The role that fills `old_log_probs` and `student_top_k_ids` under the newest published weights. Stateless."""

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
        # Mixture-of-experts models replay the expert routing that was recorded when the tokens were sampled.
        routed = ROUTED_COLUMNS if context.config.model.routing_replay == "rollout" else ()
        async with await RankGroup.start(context, self.name) as trainer:
            forward = ForwardColumns(columns, outputs, (*INPUTS, *routed))
            await _NewestWeights(context, self.name, forward, trainer).run()


class _NewestWeights(ForwardLoop):
    """A forward loop with the newest published weights; before the first publish, with the ranks' starting weights."""

    model: RankGroup

    async def version(self) -> Version:
        """Load a newer published version if there is one; return the version of the loaded weights.

        For live weights, ask the actor to transfer them and wait for at most LIVE_S.
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
            self.context.doing(f"keeping its present weights: {missed}")
        if route:
            await weights.forget(self.role, "actor")  # end the route's lease, so that its versions can be released
        return self.model.loaded or (await self.context.bus.version())._replace(step=0)
