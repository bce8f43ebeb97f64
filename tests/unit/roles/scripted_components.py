# SPDX-License-Identifier: Apache-2.0
"""A single-file plugin of components that only pretend: an engine, a trainer, a transport and a reward whose work is time.

What a real one computes is replaced by what a test can check: a forward pass gives the step of the weights it ran on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np

from relax_core.api import (
    Capabilities,
    Chosen,
    Chunk,
    ChunkPlan,
    Delta,
    Engine,
    EngineSpec,
    GenerateRequest,
    Health,
    InfrastructureError,
    Manifest,
    Options,
    Ragged,
    Receipt,
    RetryLater,
    Reward,
    RowBatch,
    Task,
    TensorInfo,
    Trainer,
    TrainerSpec,
    Trajectory,
    UpdateOutcome,
    UpdateResult,
    Version,
    WeightTransport,
)
from relax_core.api.weights import Payload, combined_fingerprint
from relax_core.learn import Denominators
from tests.unit.sampling.toy_policy import Letters

END = 0
SAMPLED = tuple(map(ord, "xyz"))
"""Tokens that engines sample, by the incarnation of their weights."""


def sampled_by(version: Version) -> int:
    return SAMPLED[min(version.incarnation, len(SAMPLED) - 1)]


class ScriptedFamily(Letters):
    """A token a character."""


class ScriptedReward(Reward):
    """One for an even number of characters: half of a group differs from the other."""

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        return float(len(trajectory.response) % 2 == 0)


class ScriptedSlowReward(ScriptedReward):
    """Takes long over one task."""

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        if task.prompt == "p0":
            await asyncio.sleep(9.0)
        return await super().score(task, trajectory)


class ScriptedTransport(WeightTransport):
    """Moves nothing."""

    def send(self, version: Version, payload: Any, base: str, tensors: Any, location: str) -> Manifest:
        return manifest(version)

    def receive(self, manifest: Manifest, resident: Any = None) -> Iterator[Any]:
        return iter(())

    def release(self, manifest: Manifest) -> None:
        """Nothing was kept."""


class EngineOptions(Options):
    token_s: float = 0.1
    """Virtual seconds of one token, however many requests run."""
    update_s: float = 0.05
    """Virtual seconds of a weight update."""
    longest: int = 8
    """Requests end after 1 to `longest` tokens, as their seed says."""
    start_s: float = 0.0
    """Virtual seconds until it serves."""
    slow: str = ""
    """The engine of this name is slow to take weights of another incarnation."""
    slow_s: float = 8.0
    """Virtual seconds that it then takes; it samples meanwhile."""
    refuses: str = ""
    """The engine of this name does not start."""
    straggler: int = 0
    """Tokens of a straggling request; 0: none is special."""
    straggles: float = 1 / 16
    """Share of requests that straggle, as their seed says; 1: all of some tasks."""


class ScriptedEngine(Engine[EngineOptions]):
    """Takes its time, token by token; new weights land between tokens."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        in_flight_updates=True,
        seeds=True,
        offloads=frozenset({"weights", "kv"}),
        transports=frozenset({"scripted-transport"}),
    )

    async def start(self, spec: EngineSpec) -> Mapping[str, Any]:
        self._name, self._version = spec.name, spec.version
        self._unwanted, self._running, self._asleep = set[str](), set[str](), set[str]()
        self._profile: Path | None = None
        if spec.name == self.options.refuses:
            raise InfrastructureError(f"{spec.name}: no memory")
        await asyncio.sleep(self.options.start_s)
        return {"fingerprint": "one", "max_context": spec.max_context}

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[list[Delta]]:
        left = {request.id: self._length(request) for request in requests}
        begun = self._version.step
        self._running.update(left)
        while left:
            await asyncio.sleep(self.options.token_s)
            if self._asleep:
                raise InfrastructureError(f"{self._name}: asked to sample while {self._asleep} sleep")
            step = self._version.step
            cache = self._oldest(begun)
            deltas = []
            for name in list(left):
                if name in self._unwanted:
                    del left[name]
                    self._unwanted.discard(name)
                    deltas.append(Delta(name, (), (), step, cache, "abort"))
                    continue
                left[name] -= 1
                last = left[name] == 0
                token = END if last else sampled_by(self._version)
                deltas.append(Delta(name, (token,), (-0.5,), step, cache, "stop" if last else ""))
                if last:
                    del left[name]
            self._running.difference_update(delta.id for delta in deltas if delta.finish)
            yield deltas

    async def abort(self, ids: Sequence[str]) -> None:
        self._unwanted.update(self._running.intersection(ids))

    async def profile(self, path: str, max_bytes: int) -> None:
        self._profile = Path(path)

    async def offload(self, parts: Sequence[str]) -> int:
        self._asleep |= set(parts)
        return 7

    async def onload(self, parts: Sequence[str]) -> None:
        self._asleep -= set(parts)

    def _length(self, request: GenerateRequest) -> int:
        random = Random(request.seed)
        length = random.randint(1, self.options.longest)
        share, task = self.options.straggles, sum(token for token in request.tokens if token not in SAMPLED)
        if self.options.straggler and (task % 3 == 0 if share == 1 else random.random() < share):
            length = self.options.straggler
        sampled = sum(token in SAMPLED for token in request.tokens)
        return min(max(1, length - sampled), request.max_new_tokens)

    def _oldest(self, begun: int) -> int:
        """Of the weights in the caches of a call that began under these."""
        return self._version.step

    async def update_weights(self, manifest: Manifest, transport: Chosen) -> Receipt:
        other = manifest.version.incarnation != self._version.incarnation
        slow = other and self._name == self.options.slow
        await asyncio.sleep(self.options.slow_s if slow else self.options.update_s)
        if "weights" in self._asleep:
            raise InfrastructureError(f"{self._name}: asked to load weights that sleep")
        if self._profile is not None:
            self._profile.parent.mkdir(exist_ok=True)
            self._profile.write_text(str(self._version.step))
            self._profile = None
        self._version = manifest.version
        return Receipt(self._name, manifest.version, "wire", manifest.wire_fingerprint)

    async def health(self) -> Health:
        return Health(True, self._version)

    async def stop(self) -> None:
        """Nothing to end."""


class ScriptedLettingEngine(ScriptedEngine):
    """Must let everything go before it takes weights, and records no profiles."""

    capabilities: ClassVar[Capabilities] = Capabilities(seeds=True, transports=frozenset({"scripted-transport"}))
    profile = Engine.profile

    async def update_weights(self, manifest: Manifest, transport: Chosen) -> Receipt:
        if self._running:
            raise InfrastructureError(f"{self._name}: updated while it runs {sorted(self._running)}")
        return await super().update_weights(manifest, transport)


class ScriptedKeepingEngine(ScriptedEngine):
    """Keeps the caches of what it runs over an update."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        in_flight_updates=True, keeps_kv_across_versions=True, seeds=True, transports=frozenset({"scripted-transport"})
    )

    def _oldest(self, begun: int) -> int:
        return begun


class TrainerOptions(Options):
    train_s: float = 1.0
    """Virtual seconds of sixteen rows."""
    critic_s: float = 0.5
    """The same of a critic."""
    publish_s: float = 0.1
    """Virtual seconds of a publish."""
    not_finite: tuple[int, ...] = ()
    """Steps whose update is NaN, every time."""
    explodes: tuple[int, ...] = ()
    """Steps whose gradient norm is a thousand instead of one, every time."""
    explodes_once: str = ""
    """A file with the number of a step; the same of that step, the first time alone: the file is removed."""
    trace_bytes: int = 1000
    """Size of a profile's trace."""


class ScriptedTrainer(Trainer[TrainerOptions]):
    """Refuses rows that a real one must refuse."""

    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")
    profiles: ClassVar[bool] = True

    def plan(self, lengths: Sequence[int], world_size: int, tokens_per_micro_batch: int = 0) -> ChunkPlan:
        return ChunkPlan(tuple((tuple(range(rank, len(lengths), world_size)),) for rank in range(world_size)))

    def start(self, spec: TrainerSpec) -> Mapping[str, Any]:
        if spec.role not in ("actor", "reference", "actor_fwd", "critic"):
            raise ValueError(f"start: got role {spec.role}")
        self._spec, self._step, self._unpublished = spec, 0, False
        return {}

    def begin_step(self, version: Version) -> None:
        if self._unpublished:
            self._step, self._unpublished = self._step + 1, False
        if version.step != self._step:
            raise ValueError(f"begin_step: got {version}, the weights are of step {self._step}")
        self._begun = version.step

    def begin_update(self, denominators: Mapping[str, float]) -> None:
        self._loss, self._denominators = 0.0, Denominators(denominators)

    async def accumulate(self, chunk: Chunk, last: bool) -> None:  # type: ignore[override]
        columns = chunk.rows.columns
        trained = columns["loss_mask"].values.astype(bool)
        if self._spec.role == "critic":
            await self._learn(chunk)
            return
        if "weight_versions" not in columns:  # of a dataset
            await asyncio.sleep(self.options.train_s * len(chunk.rows) / 16)
            self._loss += float(trained.sum())
            self._unpublished = True  # nobody reads what it becomes
            return
        lag = self._step - columns["weight_versions"].values[trained]
        if self._spec.max_staleness >= 0 and not ((lag >= 0) & (lag <= self._spec.max_staleness)).all():
            raise ValueError(f"accumulate: lags {sorted(set(lag.tolist()))} at step {self._step}")
        if "old_log_probs" in columns and set(columns["old_log_probs"].values.tolist()) - {float(self._step)}:
            raise ValueError(f"accumulate: old_log_probs are not of step {self._step}")
        await asyncio.sleep(self.options.train_s * len(chunk.rows) / 16)
        place = np.repeat([row.sample for row in chunk.rows.ids], columns["tokens"].lengths)
        self._loss += float((columns["advantages"].values * place)[trained].sum()) / self._denominators.nominal("rows")

    async def _learn(self, chunk: Chunk) -> None:
        if missing := {"values", "returns"} - set(chunk.rows.columns):
            raise ValueError(f"accumulate: a critic's rows lack {missing}")
        await asyncio.sleep(self.options.critic_s * len(chunk.rows) / 16)
        self._loss += float(len(chunk.rows))

    def finish_update(self, denominators: Mapping[str, float]) -> UpdateResult:
        if self._spec.role == "critic":
            self._step = self._begun + 1
            return UpdateResult(UpdateOutcome.APPLIED, {"critic/loss": (self._loss, 1.0)}, 1.0, self._spec.optimizer.lr)
        if self._step + 1 in self.options.not_finite:
            return UpdateResult(UpdateOutcome.NOT_FINITE, grad_norm=float("nan"))
        loss = self._loss * self._denominators.rescale(denominators)
        step, norm = self._step + 1, 1.0
        once = Path(self.options.explodes_once) if self.options.explodes_once else None
        if once is not None and once.exists() and str(step) == once.read_text():
            once.unlink()
            norm = 1000.0
        if step in self.options.explodes:
            norm = 1000.0
        return UpdateResult(UpdateOutcome.APPLIED, {"train/loss": (loss, 1.0)}, norm, self._spec.optimizer.lr)

    def abort_update(self) -> None:
        self._loss = float("nan")

    def forward(self, chunk: Chunk, columns: Sequence[str]) -> RowBatch:
        tokens = chunk.rows.columns["tokens"]
        values = np.full(len(tokens.values), self._step, np.float32)
        return chunk.rows.with_columns({name: Ragged(values, tokens.lengths) for name in columns})

    async def publish(  # type: ignore[override]
        self, version: Version, transport: Chosen, location: str, payload: Payload = "full", base: str = ""
    ) -> Manifest:
        await asyncio.sleep(self.options.publish_s)
        self._step = version.step
        return manifest(version)

    def load_published(self, manifest: Manifest, transport: Chosen) -> None:
        self._step = manifest.version.step

    def start_profile(self, ranks: Sequence[int]) -> None:
        """Open a profile, of which nothing but its number of calls is known."""
        self._profiled: list[str] | None = [] if self._spec.rank in ranks else None

    def stop_profile(self, path: str, max_bytes: int) -> int:
        if self._profiled is None:
            return 0
        Path(path).parent.mkdir(exist_ok=True)
        Path(f"{path}-rank-{self._spec.rank}").write_text(str(self._step + 1))
        return self.options.trace_bytes

    def offload(self, parts: Sequence[str]) -> int:
        return 5

    def save(self, directory: str) -> None:
        """The step is all there is."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / "step").write_text(str(self._step))

    def load(self, directory: str) -> None:
        self._step = int((Path(directory) / "step").read_text())

    def export(self, directory: str) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / "config.json").write_text(str(self._step))


def manifest(version: Version) -> Manifest:
    """One tensor whose bytes change with every step."""
    tensor = TensorInfo("weight", (1,), "F32", str(version.step), 4)
    return Manifest(version, "full", (tensor,), "", fingerprint=combined_fingerprint((tensor,)))


# -- live weights: nothing is stored, those who come together hand over and take ------------------------------------

MEETING: dict[Version, list[asyncio.Future[None]]] = {}
"""Engines that wait for a transfer, by the version that they want."""


class ScriptedLiveTransport(ScriptedTransport):
    """Is had only while the trainer hands it out."""

    live: ClassVar[bool] = True


class ScriptedLiveTrainer(ScriptedTrainer):
    """Hands out what it published last, and refuses once an update has changed it."""

    _moved = False

    def finish_update(self, denominators: Mapping[str, float]) -> UpdateResult:
        self._moved = True
        return super().finish_update(denominators)

    async def publish(  # type: ignore[override]
        self, version: Version, transport: Chosen, location: str, payload: Payload = "full", base: str = ""
    ) -> Manifest:
        sent = await super().publish(version, transport, location, payload, base)
        self._moved = False
        return replace(sent, live=True)

    async def transfer(  # type: ignore[override]
        self, manifest: Manifest, transport: Chosen, receivers: int, wait_s: float
    ) -> int:
        if self._moved or manifest.version.step != self._step:
            raise ValueError(f"transfer: these weights are no longer {manifest.version}")
        guests, deadline = MEETING.setdefault(manifest.version, []), asyncio.get_running_loop().time() + wait_s
        while len(guests) < receivers and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        await asyncio.sleep(self.options.publish_s)
        seated = [guest for guest in guests if not guest.done()]
        for guest in seated:
            guest.set_result(None)
        guests.clear()
        return len(seated)

    async def load_published(self, manifest: Manifest, transport: Chosen) -> None:  # type: ignore[override]
        await join_rendezvous(manifest)
        super().load_published(manifest, transport)


async def join_rendezvous(manifest: Manifest) -> None:
    """Until it is handed out; ComeAgain where nobody does."""
    seat: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    MEETING.setdefault(manifest.version, []).append(seat)
    try:
        async with asyncio.timeout(5.0):
            await seat
    except TimeoutError:
        raise RetryLater(f"{manifest.version}: nobody hands it out now; come again") from None


class ScriptedLiveEngine(ScriptedEngine):
    """Takes what is handed out, and comes again where nobody does."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        in_flight_updates=True, seeds=True, transports=frozenset({"scripted-live-transport"})
    )

    async def update_weights(self, manifest: Manifest, transport: Chosen) -> Receipt:
        await join_rendezvous(manifest)
        return await super().update_weights(manifest, transport)
