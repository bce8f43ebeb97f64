# SPDX-License-Identifier: Apache-2.0
"""The ranks of one trainer as one object that starts, calls and offloads them all; and the trainer's device lease."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

from relax_core.api.algorithm import Output, Source
from relax_core.api.batch import Ragged, RowBatch
from relax_core.api.component import Chosen
from relax_core.api.errors import DeadlineExceeded, InfrastructureError, RelaxError, WorkerDied
from relax_core.api.family import ModelFamily
from relax_core.api.model_folder import placeholders
from relax_core.api.plan import OffloadPart
from relax_core.api.role import DeviceLease, SpanTrack, Worker, WorkerSpec
from relax_core.api.trainer import (
    Chunk,
    ChunkPlan,
    OptimizerSpec,
    Trainer,
    TrainerSpec,
    TrainerWork,
    UpdateOutcome,
    UpdateResult,
)
from relax_core.api.weights import Manifest, Payload, Version
from relax_core.config.run_config import RunContext
from relax_core.data.media import media_store
from relax_core.devices.client import DEVICE_LEASE_WAIT_S
from relax_core.observe.console import waiting_for
from relax_core.registry.error_text import authored
from relax_core.registry.shapes import LONGEST, WrongShape, checked, returned_by
from relax_core.rpc.waiting import start_all

PING_EVERY_S = 5.0
"""Seconds between pings of a rank during a call, and before the first ping. Most calls are shorter."""
SILENT_S = 15.0
"""Seconds without an answer to a ping before a rank is killed. No library holds the interpreter lock for so long."""
TRAINER: tuple[OffloadPart, ...] = ("weights", "optimizer", "gradients")
START_S = 600.0
CALL_S = 3600.0
"""Time limit of a call. A training call may be long; a rank that dies is noticed at once by its connection."""
GRACE_S = 3.0
"""Seconds to wait for the answers of the remaining ranks after one rank failed: their errors may name the cause."""

MAX_OVERFLOWS = 32
"""Most times that one update is recomputed, each time at half the loss scale: enough to go from 2^32 to 1."""

ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
"""Environment for one malloc arena: a second arena, for the training thread, fragments and takes 1/7 more memory."""

SENDS = ("actor", "actor-fwd")
"""Roles with the engines' weights: `actor` publishes them, `actor-fwd` loads the published ones."""
LOOPBACK = "127.0.0.1"
WORK = frozenset({"begin_step", "begin_update", "accumulate", "finish_update", "forward"})
"""Trainer methods whose time is recorded as work. The time of methods such as publish, save and offload is overhead."""


RETURNS: Mapping[str, Any] = {
    "forward": RowBatch, "finish_update": UpdateResult, "publish": Manifest, "transfer": int,
    "offload": int, "stop_profile": int, "work": TrainerWork,
}  # fmt: skip
"""Types of the results of trainer methods."""


class RankGroup:
    """All ranks of one role's trainer; `async with` stops them at its end.

    Life cycle: `start -> calls, offload and onload -> stop | give_up`.

    Invariants:
    - Every call goes to all ranks. If one rank fails, the call ends on all ranks, and the error nearest to the cause is
      raised.
    - If a rank dies or hangs, the group is `lost` and all ranks are killed, since they would wait for it in
      collectives.
    - A dead rank is noticed at once by its closed connection, a suspended or stuck rank by unanswered pings. A busy
      rank answers pings.
    """

    def __init__(
        self, trainer: Trainer, workers: Sequence[Worker], tracks: Sequence[SpanTrack], facts: Mapping[str, Any],
        tokens_per_micro_batch: int,
    ) -> None:  # fmt: skip
        self._trainer, self._workers, self._tracks = trainer, workers, tracks
        with self._charged():
            self.facts: Mapping[str, Any] = checked(facts, Mapping[str, Any], "start()")
        self._tokens_per_micro_batch = tokens_per_micro_batch
        self._whole_groups = False
        self.lost = False
        self._offloads: tuple[OffloadPart, ...] = ()
        self.freed_bytes = 0
        """Bytes that the last offload freed."""
        self.loaded: Version | None = None
        """The published version that all ranks loaded last; None for the starting weights."""
        self._chunks: list[Chunk] = []
        """Chunks of the open update."""

    @classmethod
    async def start(
        cls, context: RunContext, name: str, role: str = "", model: Mapping[str, Any] | None = None
    ) -> RankGroup:
        """Start every rank of worker group `name` and load the model; kill all ranks if one fails.

        `role`: the group's role if it is not `name`. `model`: the `[model]` table to use in place of the run's own.
        """
        group, chosen = context.plan.groups[name], context.config.trainer.chosen
        placed = context.config.placement.roles.get(name)
        if placed is not None:
            # Trainers know only the core's roles. A plugin's role reads a fixed model, as the reference does.
            role = role or "reference"
            if model is None:
                model = {**_model(context, role), "path": str(placed.path or context.config.model.path)}
        ranks, devices = range(group.size), [group.process_devices(rank) for rank in range(group.size)]
        trainer = context.build(chosen, Trainer)
        specs = [
            WorkerSpec(f"{name}-rank-{rank}", chosen, context.config.trainer.python,
                       {"OMP_NUM_THREADS": str(group.threads), **ONE_ARENA}, devices=own, num_gpus=context.plan.num_gpus(own),
                       preload=trainer.preload)
            for rank, own in enumerate(devices)
        ]  # fmt: skip
        tracks = [context.track(spec.name, group.devices_of(rank)) for rank, spec in enumerate(specs)]

        with waiting_for(f"starting the worker processes {', '.join(spec.name for spec in specs)}"):
            workers = await context.workers.start(specs, START_S)
        try:
            rendezvous = await meeting_place(workers)
            given = [trainer_spec(context, role or name, rank, group.size, rendezvous, model) for rank in ranks]
            calls = zip(tracks, workers, given, strict=True)
            starts = (_ask(track, worker, "start", (spec,), START_S) for track, worker, spec in calls)
            with waiting_for(f"loading the model of {name}"):
                found = await start_all(*starts)
            made = cls(trainer, workers, tracks, found[0], context.config.batch.tokens_per_micro_batch)
            made._offloads, made._whole_groups = group.offloads, context.plan.source is Source.PAIRS
            await context.devices.join(name, group.devices, made)
        except BaseException:
            await asyncio.gather(*(worker.kill() for worker in workers))
            raise
        return made

    async def call(self, method: str, *args: Any, timeout_s: float = CALL_S) -> list[Any]:
        """Call one method on every rank; return the results by rank.

        Kill all ranks if one dies or times out, or if one fails and another does not answer within GRACE_S.
        """
        ranks = zip(self._tracks, self._workers, strict=True)
        calls = [asyncio.ensure_future(_ask(track, worker, method, args, timeout_s)) for track, worker in ranks]
        silent: dict[int, WorkerDied] = {}
        pings = [asyncio.create_task(self._ping(rank, method, silent)) for rank in range(self.size)]
        try:
            ended, left = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if left:
                ended, left = await asyncio.wait(calls, timeout=GRACE_S)
            ends = [call.exception() if call in ended else None for call in calls]
            failures = [error for rank, end in enumerate(ends) if end and (error := silent.get(rank, end))]
            if failures:
                if left or any(isinstance(error, WorkerDied | DeadlineExceeded) for error in failures):
                    await self.give_up()
                raise min(failures, key=_remoteness)
            with self._charged(*args):
                for call in calls:
                    checked(call.result(), RETURNS.get(method, Any), f"{method}()")
            return [call.result() for call in calls]
        finally:
            for task in (*calls, *pings):
                task.cancel()
            await asyncio.gather(*calls, *pings, return_exceptions=True)

    def _charged(self, *args: Any) -> AbstractContextManager[None]:
        """Charge errors to the trainer; of a call with the name of a weight transport, to both."""
        others = "".join(f" with {arg.kind} {arg.name}" for arg in args if isinstance(arg, Chosen))
        return authored(f"trainer {type(self._trainer).__qualname__}{others}")

    async def _ping(self, rank: int, method: str, silent: dict[int, WorkerDied]) -> None:
        """Ping a rank during a call. If it does not answer, kill it and put the error into `silent`."""
        worker = self._workers[rank]
        with contextlib.suppress(RelaxError):  # any other failure of the rank is raised by the call itself
            while True:
                await asyncio.sleep(PING_EVERY_S)
                try:
                    await worker.call("ping", timeout_s=SILENT_S)
                except DeadlineExceeded:
                    said = f"worker {worker.name} (pid {worker.pid}) gave no sign of life for {SILENT_S:.0f} s during {method}"
                    silent[rank] = WorkerDied(f"{said} and was killed; its log is logs/{worker.name}.log")
                    await worker.kill()
                    return

    @property
    def size(self) -> int:
        return len(self._workers)

    async def offload(self, parts: Sequence[OffloadPart]) -> int:
        """On every rank, free those of `parts` that the plan offloads; return the measured freed bytes of all ranks."""
        self.freed_bytes = sum(map(int, await self._move("offload", parts)))
        return self.freed_bytes

    async def onload(self, parts: Sequence[OffloadPart]) -> None:
        await self._move("onload", parts)

    async def _move(self, method: str, parts: Sequence[OffloadPart]) -> list[int]:
        """Call `offload` or `onload` on every rank. Return [] for a lost group; its next call raises."""
        able = [part for part in self._offloads if part in parts]
        try:
            return await self.call(method, able) if able and not self.lost else []
        except InfrastructureError:
            if not self.lost:
                raise
            return []

    def pids(self) -> dict[str, int]:
        """Return the process id of each rank by its name."""
        return {worker.name: worker.pid for worker in self._workers}

    def chunk(self, rows: RowBatch, skipped: int = 0) -> Chunk:
        """Plan the micro-batches of each rank. If the loss compares rows of a group, no group is split.

        A plan puts each row on a rank, at most once on each: ranks may share a model's layers.
        """
        by_unit: dict[int, list[int]] = {}
        for index, row in enumerate(rows.ids):
            by_unit.setdefault(row.group if self._whole_groups else index, []).append(index)
        units = list(by_unit.values())
        lengths = rows.columns["tokens"].lengths
        padded = [len(unit) * max(int(lengths[index]) for index in unit) for unit in units]
        with self._charged():
            given, where = (
                self._trainer.plan(padded, self.size, self._tokens_per_micro_batch),
                returned_by(self._trainer.plan),
            )
            plan: ChunkPlan = checked(given, ChunkPlan, where)
            if len(plan.micro_batches) != self.size:
                raise WrongShape(f"{where}: got micro-batches for {len(plan.micro_batches)} ranks; want {self.size}")
            by_rank = [[unit for batch in rank for unit in batch] for rank in plan.micro_batches]
            if {*range(len(units))} != {*chain(*by_rank)} or any(len({*found}) < len(found) for found in by_rank):
                got = f"got rows {', '.join(map(str, sorted(chain(*by_rank))))[:LONGEST]}"
                raise WrongShape(f"{where}: {got}; want each of {len(units)} rows, at most once on a rank")
        micro_batches = tuple(
            tuple(tuple(index for unit in planned for index in units[unit]) for planned in rank)
            for rank in plan.micro_batches
        )
        return Chunk(rows, ChunkPlan(micro_batches), skipped)

    async def forward(self, rows: RowBatch, columns: Sequence[str]) -> dict[str, Ragged]:
        """Run rows forward without gradient; return columns in the order of `rows`. `columns`: keys of `Output`s."""
        parts: list[RowBatch] = await self.call("forward", self.chunk(rows), tuple(columns))
        names = [name for key in columns for name in Output.parse(key).gives]
        with self._charged():
            _check_columns(parts, rows, names)
        place = {row: (part, index) for part in parts for index, row in enumerate(part.ids)}
        if len(parts) == 1 and parts[0].ids == rows.ids:
            return {name: parts[0].columns[name] for name in names}
        views = {id(part): {name: list(part.columns[name].rows()) for name in names} for part in parts}
        return {name: Ragged.of([views[id(place[row][0])][name][place[row][1]] for row in rows.ids]) for name in names}

    async def begin_update(self, denominators: Mapping[str, float]) -> None:
        self._chunks = []
        await self.call("begin_update", denominators)

    async def accumulate(self, rows: RowBatch, skipped: int, last: bool) -> None:
        """Run rows forward and backward. Keep the rows until the update ends, to recompute it after an overflow."""
        self._chunks.append(self.chunk(rows, skipped))
        await self.call("accumulate", self._chunks[-1], last)

    async def finish_update(
        self, denominators: Mapping[str, float], verify: Callable[[], Awaitable[None]] | None = None
    ) -> UpdateResult:
        """End the update. If fp16 gradients overflow, recompute them at the lower loss scale that the trainer has set.

        `verify` is called before each repeated attempt. Raises InfrastructureError if ranks disagree on the outcome.
        """
        overflows = 0
        while True:
            results: list[UpdateResult] = await self.call("finish_update", denominators)
            if len(outcomes := {result.outcome for result in results}) > 1:  # a fault of the machine
                raise InfrastructureError(
                    f"trainer ranks disagree on an update: {sorted(outcomes)}; resume from a checkpoint"
                )
            if results[0].outcome is not UpdateOutcome.OVERFLOW or overflows == MAX_OVERFLOWS:
                break
            overflows += 1
            await self.call("begin_update", denominators)
            for chunk in self._chunks:
                await self.call("accumulate", chunk, chunk is self._chunks[-1])
            if verify is not None:
                await verify()
        self._chunks, result = [], results[0]
        if not overflows:
            return result
        return replace(result, metrics={**result.metrics, "train/overflows": (float(overflows), 1.0)})

    async def work(self) -> TrainerWork:
        """Return the computing of all ranks since the last call in the step."""
        total = TrainerWork()
        for part in await self.call("work"):
            total = total.plus(part)
        return total

    async def publish(
        self, version: Version, transport: Chosen, location: str, payload: Payload = "full", base: str = ""
    ) -> Manifest:
        manifests: list[Manifest] = await self.call("publish", version, transport, location, payload, base)
        return manifests[0]

    async def give_up(self) -> None:
        """Kill all ranks and mark the group as lost."""
        self.lost = True
        await asyncio.gather(*(worker.kill() for worker in self._workers))

    async def stop(self) -> None:
        await asyncio.gather(*(worker.stop() for worker in self._workers))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


class TrainerDeviceLease:
    """The device lease of a trainer during one step.

    Life cycle: `released -> train [-> publish] -> released`. The lease is acquired once rows are ready and kept until
    the weights are published. A role that shares its devices with no worker group acquires nothing.
    """

    def __init__(self, context: RunContext, role: str, live: bool) -> None:
        """`live`: True if weights go from memory to memory: a publish then needs the engines' weights loaded, too."""
        self._context, self._role = context, role
        self._receivers = ("rollout",) if live and "rollout" in context.plan.neighbours(role) else ()
        self.shared = bool(context.plan.neighbours(role))
        self.freed_bytes = 0
        """Bytes that engines and trainers on these devices freed for the last lease."""
        self._stack = AsyncExitStack()
        self._lease: DeviceLease | None = None

    async def train(self) -> None:
        """Acquire the devices for training; do nothing if they are already held."""
        if self._lease is None:
            groups = self._context.plan.groups
            devices = frozenset[str]().union(*(groups[name].devices for name in (self._role, *self._receivers)))
            lease = self._context.devices.acquire(devices, "train", {self._role: TRAINER}, DEVICE_LEASE_WAIT_S)
            self._lease = await self._stack.enter_async_context(lease)
            self.freed_bytes = self._lease.freed_bytes

    async def publish(self) -> None:
        """Change the held lease to publishing: keep only weights loaded, and for a live transport the engines' too."""
        if self._lease is not None:
            holders: dict[str, tuple[OffloadPart, ...]] = dict.fromkeys((self._role, *self._receivers), ("weights",))
            await self._lease.change_phase("publish", holders, DEVICE_LEASE_WAIT_S)

    async def release(self) -> None:
        self._lease = None
        await self._stack.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


def _check_columns(parts: Sequence[RowBatch], rows: RowBatch, names: Sequence[str]) -> None:
    """Raise WrongShape unless the ranks' results have the columns `names` for each of the rows."""
    for part in parts:
        if not all(name in part.columns for name in names):
            got = f"got {', '.join(part.columns) or 'none'}; want {', '.join(names)}"
            raise WrongShape(f"forward(): columns: {got}")
        for name in names:
            column = part.columns[name]
            if len(column) != len(part) or int(column.lengths.sum()) != len(column.values):
                got = f"got {len(column)} rows of {len(column.values)} values; want {len(part)}"
                raise WrongShape(f"forward(): columns[{name!r}]: {got}")
    found = {row for part in parts for row in part.ids}
    if missing := [row for row in rows.ids if row not in found]:
        raise WrongShape(f"forward(): ids: got {len(rows) - len(missing)} of {len(rows)} rows")


def _remoteness(error: BaseException) -> int:
    """Return an error's distance from the cause: 0 rank died, 1 rank raised, 2 lost another rank, 3 timed out."""
    if isinstance(error, WorkerDied):
        return 0
    return 1 + isinstance(error, InfrastructureError) + isinstance(error, DeadlineExceeded)


async def _ask(track: SpanTrack, worker: Worker, method: str, args: Sequence[Any], timeout_s: float) -> Any:
    """Call one rank, and record the time on its span track."""
    with track.span("work" if method in WORK else "overhead", method):
        return await worker.call(method, *args, timeout_s=timeout_s)


CRITIC_LR = 10.0
"""Learning rate of a critic without `critic.lr`, as a multiple of the policy's; as in verl (1e-5 and 1e-6)."""


def trainer_spec(
    context: RunContext, role: str, rank: int, world_size: int, rendezvous: str, model: Mapping[str, Any] | None
) -> TrainerSpec:
    run = context.config
    optimizer, samples = run.optimizer, context.plan.source is Source.ROLLOUT
    lr = optimizer.lr if role != "critic" else run.critic.lr or CRITIC_LR * optimizer.lr
    return TrainerSpec(
        model=_model(context, role) if model is None else model,
        algorithm=run.learner,
        optimizer=OptimizerSpec(
            lr, optimizer.schedule, optimizer.warmup_steps, optimizer.betas, optimizer.weight_decay,
            optimizer.grad_clip, run.steps, 0 if role == "critic" else context.plan.warm_up_steps,
        ),
        role=role.replace("-", "_"), seed=run.seed, deterministic=run.deterministic,
        max_staleness=-1 if context.plan.max_staleness is None else context.plan.max_staleness,
        tokens_per_micro_batch=run.batch.tokens_per_micro_batch, rank=rank, world_size=world_size, rendezvous=rendezvous,
        temperature=run.rollout.temperature if samples else 1.0, media=media_store(context) if run.media else "",
        # Placeholder tokens of media: the engines never sample them, so the policy gives them no probability.
        suppress_tokens=tuple(placeholders(Path(run.model.path)).values()) if samples else (),
        publish_dtype=run.engine_dtype if role in SENDS else "",
    )  # fmt: skip


def _model(context: RunContext, role: str) -> dict[str, Any]:
    """Return the role's `[model]` table; names of parts in `freeze` are replaced by the model family's module patterns.

    A critic freezes the same parts as the policy, even with a model folder of its own.
    """
    config = context.config
    table = config.model.model_dump(mode="json")
    own = {"critic": config.critic.path, "reference": config.reference.path}.get(role)
    if own is not None:
        table["path"] = str(own)
    if table["freeze"]:
        parts = context.build(context.config.family.chosen, ModelFamily).parts(table)
        table["freeze"] = [pattern for name in table["freeze"] for pattern in parts.get(name, (name,))]
    return dict(table)


async def meeting_place(workers: Sequence[Worker]) -> str:
    """Return `host:port` of the ranks' rendezvous, on the first rank's machine; loopback if all ranks are on it.

    Return an empty string for a single rank.
    """
    if len(workers) < 2:
        return ""
    first = workers[0]
    address = LOOPBACK if all(worker.host == first.host for worker in workers) else first.host
    return f"{address}:{await first.free_port(address)}"
