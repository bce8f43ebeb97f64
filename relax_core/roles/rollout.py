# SPDX-License-Identifier: Apache-2.0
"""The rollout role: admits groups, generates and scores them, puts their rows on the bus, and updates the engines.

The code that makes samples is in `sampling`.
"""

from __future__ import annotations

import asyncio
from asyncio import FIRST_COMPLETED
from collections.abc import Sequence

from relax_core.api.batch import ALGORITHM_INDEX, AttemptId
from relax_core.api.bus import Issue
from relax_core.api.component import Chosen
from relax_core.api.events import FirstStepSeen, Logged, RolloutMeasured, SamplesScored, WeightsPublished
from relax_core.api.family import ROUTED_COLUMNS
from relax_core.api.plan import Operation, Reads
from relax_core.api.role import DeviceLease, Role
from relax_core.api.trajectory import DropReason
from relax_core.api.weights import Manifest, Receipt, Version
from relax_core.config.run_config import RunContext
from relax_core.devices.client import DEVICE_LEASE_WAIT_S
from relax_core.devices.turns import POLICY, EngineTurns, SharedEngines, TurnMember, TurnRule
from relax_core.engines.factories import AUXILIARY_GROUP, engine_events
from relax_core.engines.scaler import Scaler, scaled_pools
from relax_core.observe.first_step import MOST_TASKS
from relax_core.observe.signals import STALENESS_WAIT
from relax_core.sampling.failures import SampleFailures
from relax_core.sampling.groups import InflightGroup, oldest
from relax_core.sampling.rollout_worker import RolloutWorker
from relax_core.sampling.rows import (
    TURN_COLUMNS,
    completion_values,
    measures,
    records,
    row_batch,
    with_row_column,
    with_teacher,
)

POLL_S = 1.0
ROOM_S = 0.1
"""Seconds between checks for room in the engines, since a sample that starts to use its tools sends no event."""
LAST_WEIGHTS_S = 15.0
"""Longest wait at the end of a run for engines that have not loaded the last weights."""
DELIVERIES = 8
"""Batches of finished groups that are scored and delivered concurrently. A slow reward delays only its own batch."""
WAITING_DELIVERIES = 4096
"""Concurrent batches for each engine pool that takes turns on shared devices. Batches that share a turn save turns."""
MAX_FINISH_ITERATIONS = 3
"""Number of event-loop iterations in which the finish loop collects more groups of the same engine batch."""


class Rollout(Role):
    """The role that generates and scores samples, in six loops: admit, finish, audit, lease devices, scale, follow weights.

    A group: `admitted -> generated -> scored -> on the bus | dropped`. An attempt is in `_held` from its admission
    until the bus has its rows.

    Invariants:
    - All held attempts are reported to the bus.
    - An evaluation is never paused for another role's device lease.
    """

    name = "rollout"
    stateless = True

    @classmethod
    def operations(cls) -> tuple[Operation, ...]:
        always = {"tokens", "loss_mask", "rollout_log_probs", "weight_versions", "rewards"}
        turns = {column.name for column in TURN_COLUMNS}
        produced = frozenset(always | turns | {"teacher_index", "algorithm_index", "media", *ROUTED_COLUMNS})
        return (Operation("rollout.generate", cls.name, frozenset(), produced, Reads.LATEST),)

    async def run(self, context: RunContext) -> None:
        self._context = context
        self._finished: asyncio.Queue[InflightGroup] = asyncio.Queue()
        self._held: set[AttemptId] = set()
        self._issues: dict[asyncio.Task[None], Issue] = {}
        self._admitted = 0
        self._kept_at = -1
        """Step at which the sampler's state was last stored on the bus."""
        self._undescribed = 0 if context.config.guards.first_step == "off" else MOST_TASKS
        """Number of groups of step 1 that are still to be described for the checks of that step."""
        self._given_up: dict[AttemptId, int] = {}
        """Sampled tokens of attempts that were cancelled during generation; sent with the next report."""
        self._profiled: Version | None = None
        """Version whose engine was asked for a profile last."""
        self._trained = asyncio.Event()
        """Set when no more versions will be served: no more groups are admitted."""
        self._waves: set[asyncio.Task[None]] = set()
        """Running weight updates of the engines; several if an engine is slow."""
        self._deliveries: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._worker = worker = await RolloutWorker.open(context, engine_events(context), in_turns=True)
        await worker.selection.restore(context.bus)
        self._failures = SampleFailures(context.config, context.run_dir)
        scaler = Scaler(scaled_pools(context, worker.auxiliary_pools, worker.pool), self.name, context)
        context.doing("ready", failures=self._failures.facts, engines=worker.pool.facts,
                      held=lambda: len(self._held), judging=worker.scorer.unanswered,
                      under_way=lambda: oldest(worker.inflight.values(), context.clock.now()),
                      pools=worker.auxiliary_pools.facts, scheduling=worker.scheduling,
                      scaling=scaler.facts)  # fmt: skip
        self._evaluating = asyncio.Lock()
        work = (self._admit(), self._finish(), self._attend(), self._lease_devices(), scaler.run(), self._follow())
        loops = [asyncio.create_task(loop) for loop in work]
        try:
            while not loops[-1].done():  # `_follow` ends the role; the first error of any loop is raised
                going = [task for task in loops if not task.done()]
                await asyncio.wait([*going, self._failed], return_when=FIRST_COMPLETED)
                for task in (*loops, self._failed):
                    if task.done() and (error := task.exception()):
                        raise error
        finally:
            if not self._failed.cancel():
                self._failed.exception()  # mark this error as retrieved: a loop failed too, and its error is raised
            owned = (*loops, *self._issues, *self._waves, *self._deliveries)
            for task in owned:
                task.cancel()
            await asyncio.gather(*owned, return_exceptions=True)
            await self._worker.close()

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        """End the role with the error of a task."""
        if not task.cancelled() and (error := task.exception()) and not self._failed.done():
            self._failed.set_exception(error)

    async def _lease_devices(self) -> None:
        """Lease shared devices to generate; pause the engines while another role has them. If none are shared, return.

        Samples in progress keep their tokens during a pause. Engine pools on the same devices take turns with the
        policy's engines within this lease, also during an evaluation, which may need judges.
        """
        context, engines = self._context, self._worker.engines
        if not context.plan.neighbours("rollout"):
            return
        await engines.pause()
        devices = context.plan.groups["rollout"].devices
        await context.devices.join("rollout", devices, engines)
        shared = self._share_devices()
        while True:
            await shared.wanted()
            acquired = context.devices.acquire(devices, "generate", shared.holders(), DEVICE_LEASE_WAIT_S)
            async with acquired as lease:
                context.doing("generating", freed_bytes=lease.freed_bytes)
                leaving = asyncio.create_task(self._leave(lease))
                try:
                    await shared.run(lease, leaving, DEVICE_LEASE_WAIT_S)
                    await leaving  # raise if the device scheduler is lost
                finally:
                    leaving.cancel()
                    await asyncio.wait([leaving])
                    if not leaving.cancelled() and leaving.exception() is None:
                        self._evaluating.release()

    def _share_devices(self) -> SharedEngines:
        """Make the turns in which the policy's engines and the pools on their devices use one lease."""
        context, pools = self._context, self._worker.auxiliary_pools.taking_turns
        tables = {AUXILIARY_GROUP + table.name: table for table in context.config.engines}
        rules = {
            name: TurnRule(
                tables[name].turn_requests if tables[name].devices == "shared" else 0, tables[name].turn_wait_s
            )
            for name in pools
        }
        members: dict[str, TurnMember] = {POLICY: self._worker.engines, **pools}
        shared = SharedEngines(members, EngineTurns(rules, context.clock.now()), context.clock)
        self._worker.engines.on_change = shared.on_change
        for client in pools.values():
            client.on_change = client.pool.supervisor.on_change = shared.on_change
        return shared

    async def _leave(self, lease: DeviceLease) -> None:
        """Wait until another role wants the devices and no evaluation runs; return with the evaluation lock held."""
        await lease.wanted()
        await self._evaluating.acquire()

    # -- admit --------------------------------------------------------------------------------------------------

    async def _admit(self) -> None:
        context, engines = self._context, self._worker.engines
        while not self._trained.is_set() and not context.stopping:
            await context.pause_point()
            version, room = engines.newest(), self._worker.room()
            done = version.step >= context.config.steps  # no step is left to train new groups
            if not done and version.step + (context.plan.max_staleness or 0) + 1 < context.config.steps:
                self._worker.prelaunch()  # more groups may be admitted later
            if done or room <= 0:
                await self._group_or_poll(POLL_S if done else ROOM_S)
                continue
            if not engines.serving:
                with context.waiting("weights that may be sampled", "actor (it publishes)", POLL_S):
                    await self._group_or_poll(POLL_S)
                continue
            with context.waiting(STALENESS_WAIT, "actor (its version bounds staleness)", POLL_S):
                issues = await context.bus.admit("rollout", version, room, POLL_S)
            if issues:
                context.doing("generating")
            for issue in issues:
                self._held.update(issue.attempts)
                self._admitted += len(issue.attempts)
                task = asyncio.create_task(self._generate(issue, engines.newest()))
                self._issues[task] = issue
                task.add_done_callback(self._issues.pop)
                task.add_done_callback(self._note_failure)

            await asyncio.sleep(0)  # let the tasks begin, so that the next call of room() counts them

    async def _group_or_poll(self, timeout_s: float) -> None:
        await asyncio.wait([*self._issues, self._failed], timeout=timeout_s, return_when=FIRST_COMPLETED)

    async def _generate(self, issue: Issue, version: Version) -> None:
        with self._context.working("generating"):
            made = await self._worker.make(issue, version)
        self._finished.put_nowait(made)

    # -- finish -------------------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        """Deliver finished groups in several concurrent batches; one batch at a time if the run is deterministic."""
        most = len(self._worker.auxiliary_pools.taking_turns) * WAITING_DELIVERIES or DELIVERIES
        room = asyncio.Semaphore(1 if self._context.config.deterministic else most)
        while True:
            await room.acquire()
            groups = [await self._finished.get()]
            for _ in range(MAX_FINISH_ITERATIONS):
                await asyncio.sleep(0)
                groups += [self._finished.get_nowait() for _ in range(self._finished.qsize())]
            delivery = asyncio.create_task(self._deliver(groups))
            self._deliveries.add(delivery)
            delivery.add_done_callback(self._deliveries.discard)
            delivery.add_done_callback(self._note_failure)
            delivery.add_done_callback(lambda _: room.release())

    async def _deliver(self, groups: Sequence[InflightGroup]) -> None:
        """Score groups and put their rows on the bus."""
        context, worker, run = self._context, self._worker, self._context.config
        with context.working("judging"):
            judged = await worker.score(groups)
        self._failures.record(judged, sum(group.num_in_play for group in worker.inflight.values()))
        if first := [group for group in judged if group.version.step == 0][: self._undescribed]:
            self._undescribed -= len(first)
            facts = await worker.first_step_facts(first)  # before the actor can train on these groups
            await context.run_status.emit(FirstStepSeen(self.name, facts))
        # Store the sampler's state before the actor can train on these groups, so that a checkpoint has both.
        step = worker.engines.newest().step
        if step != self._kept_at or run.deterministic:
            await worker.selection.keep(context.bus)
            self._kept_at = step
        rejected = [attempt for one in judged if one.rejected_by for attempt in one.issue.attempts]
        if rejected:
            await context.bus.drop(rejected, DropReason.FILTERED, regenerate=False)
            self._held.difference_update(rejected)
        kept = [sample for one in judged if not one.rejected_by for sample in one.samples]
        columns = {*context.plan.consumed, *(("media",) if run.media else ())}
        masks = run.rollout.truncated == "mask"
        batch, sealed = row_batch(kept, context.plan.greedy, columns, worker.routing, masks)
        if len(run.teachers) > 1 and "teacher" in context.plan.roles:  # teachers are chosen by task; rows have no task
            batch = with_teacher(batch, {group.issue.group: group.task for group in groups}, run.teachers)
        if len(run.algorithms) > 1:  # a row is trained with the algorithm of its environment
            algorithm_of = {group.issue.group: run.algorithm_of(group.task.environment) for group in groups}
            batch = with_row_column(batch, ALGORITHM_INDEX, [algorithm_of[row.group] for row in batch.ids])
        # Every step frees room on the bus, so the wait is bounded by the time limit of a step.
        with context.waiting("room on the bus", "actor (a step frees it)", run.rollout.step_timeout_s) as wait:
            while not await context.bus.put(batch, sealed, POLL_S):
                context.check(wait)
                await context.pause_point()
        self._held.difference_update(seal.attempt for seal in sealed)
        await self._audit()
        step = max(group.version.step for group in groups) + 1  # the first step that may train these groups
        await context.run_status.emit(SamplesScored(step, records(judged)))
        values = completion_values([trajectory for one in judged for trajectory in one.trajectories])
        await context.run_status.emit(RolloutMeasured(step, measures(judged), values))

    async def _attend(self) -> None:
        """Audit regularly, since the bus may end groups in progress. Raise if the engine pool has failed."""
        while True:
            await self._context.clock.sleep(POLL_S)
            self._worker.pool.check()
            await self._audit()
            if self._context.config.media:
                self._worker.media.release_below((await self._context.bus.statistics())["oldest_group"])

    async def _audit(self) -> None:
        """Report held attempts to the bus; cancel the generation of groups that the bus has ended."""
        given_up = dict(self._given_up)
        ended = await self._context.bus.report_held("rollout", frozenset(self._held), self._admitted, given_up)
        for attempt in given_up:
            self._given_up.pop(attempt, None)
        for task, issue in self._issues.items():
            if ended.issuperset(issue.attempts) and not task.cancelling():
                if group := self._worker.inflight.get(issue):
                    self._given_up.update(group.lengths)
                task.cancel()
        self._held.difference_update(ended)

    # -- follow -------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Update the engines to each new version and evaluate versions that are due. Evaluations delay the next update.

        The loop continues once the first engine serves a version, so that a slow engine does not delay the run. In a
        deterministic run it waits for all engines.
        """
        context, engines = self._context, self._worker.engines
        known = engines.newest() if engines.serving else None
        requested = False
        while not context.stopping:
            if known is not None:
                async with self._evaluating:
                    with context.working("evaluating"):
                        requested |= context.take_evaluation_request()
                        judged = await self._worker.evaluation.run(known, requested)
                last = known.step >= context.config.steps
                abandoned = (last or bool(judged)) and await context.bus.abandoned(known)
                for event in () if abandoned else judged:  # after a rollback the step is evaluated with its new weights
                    await context.run_status.emit(event)
                requested &= abandoned or not judged
                if last and not abandoned:
                    break
            await self._profile(known)
            newest = await context.weights.newest("actor", known, POLL_S)
            if newest is not None:
                if known is not None and newest[0].version.incarnation != known.incarnation:
                    await self._audit()  # cancel the groups that the bus has ended, before their requests move
                    done = self._worker.evaluation.done  # of removed steps, to be evaluated again with new weights
                    done.difference_update([version for version in [*done] if await context.bus.abandoned(version)])
                served = asyncio.Event()
                wave = asyncio.create_task(self._spread(*newest, served))
                self._waves.add(wave)
                wave.add_done_callback(self._waves.discard)
                wave.add_done_callback(self._note_failure)
                first = asyncio.create_task(served.wait())
                try:
                    await asyncio.wait(
                        {wave} if context.config.deterministic else {wave, first}, return_when=FIRST_COMPLETED
                    )
                finally:
                    first.cancel()
                known = newest[0].version
        if self._waves:  # nothing is generated with the last weights, so slow engines may miss them
            await asyncio.wait(self._waves, timeout=LAST_WEIGHTS_S)
        self._trained.set()

    async def _profile(self, version: Version | None) -> None:
        """Record a profile of one engine with this version, if the actor's next step is to be profiled too."""
        context, table = self._context, self._context.config.profile
        if version is None or version == self._profiled or context.config.run.runner == "inline":
            return  # in one process, the actor and the engine can't record at the same time
        number = version.step + 1
        if not context.profiles_left and number not in table.steps:
            return
        self._profiled = version
        context.profiles_left = max(context.profiles_left - 1, 0)
        path, engine = f"{context.run_dir}/profile/step-{number:06d}", context.config.engine.name
        try:
            if name := await self._worker.pool.profile(path, table.max_mb * 1_000_000):
                said = f"a profile of {name} until its next update will be in the run's folder profile/"
                await context.run_status.emit(Logged("info", self.name, said, {"step": number}))
        except NotImplementedError:
            said = f"engine {engine} can't record profiles, so only the actor is profiled"
            await context.run_status.emit(Logged("warning", self.name, said, {"step": number}))

    async def _spread(self, manifest: Manifest, transport: Chosen, served: asyncio.Event) -> None:
        """Update all engines to a version; set `served` when the first engine serves it."""
        context, start, times = self._context, self._context.clock.now(), dict(manifest.seconds)

        async def arrived(receipt: Receipt | None) -> None:
            for what, seconds in receipt.times.items() if receipt is not None else ():
                times[what] = max(seconds, times.get(what, 0.0))
            await context.bus.serves("rollout", self._worker.engines.newest())
            served.set()

        receivers = await self._worker.engines.update(manifest, transport, arrived)
        seconds = context.clock.now() - start
        await context.run_status.emit(
            WeightsPublished(manifest.version, seconds, manifest.size_bytes, receivers, times)
        )
