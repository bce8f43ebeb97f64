# SPDX-License-Identifier: Apache-2.0
"""The trainer contract at its hardest: two pipeline stages, a vocabulary split over two ranks, one plan for all four.

The model is a table of embeddings and a head; each rank is a thread, and what the threads say to each other stands
for collectives. The loss sees log-probs only, on the last stage, as every algorithm does.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from relax_core.api import (
    Algorithm,
    AttemptId,
    Chosen,
    Chunk,
    ChunkPlan,
    Loss,
    LossBatch,
    Manifest,
    OptimizerSpec,
    Options,
    PolicyOutputs,
    Ragged,
    RowBatch,
    RowId,
    Term,
    Trainer,
    TrainerSpec,
    UpdateOutcome,
    UpdateResult,
    Version,
)
from relax_core.api.weights import Payload
from relax_core.learn.counts import Denominators, count, reduce
from relax_core.learn.packed import Outputs, PackedBatch
from relax_core.learn.plan import plan_micro_batches

VOCABULARY, WIDTH, STAGES, SHARDS = 6, 3, 2, 2


class Weighted(Algorithm[Options]):
    """Advantage-weighted likelihood, averaged over tokens."""

    def loss(self, batch: LossBatch, policy: PolicyOutputs) -> Loss:
        return Loss({"policy": Term(-policy.log_probs * batch.advantages)})


class World:
    """Four ranks' collectives: everybody's value, in order of the ranks."""

    def __init__(self, size: int) -> None:
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        everything = list(self._values)
        self._barrier.wait()
        return everything


class PipelineOptions(Options):
    tokens: int = 8
    """Padded tokens of a micro-batch."""


class Pipeline(Trainer[PipelineOptions]):
    """Stage 0 embeds; the ranks of stage 1 hold half of the vocabulary's head each."""

    world: ClassVar[World] = World(STAGES * SHARDS)

    def start(self, spec: TrainerSpec) -> Mapping[str, Any]:
        self.spec, self.algorithm = spec, Weighted()
        self.stage, self.shard = divmod(spec.rank, SHARDS)
        generator = torch.Generator().manual_seed(spec.seed)
        embedding, head = (torch.randn(VOCABULARY, WIDTH, generator=generator) for _ in range(2))
        half = VOCABULARY // SHARDS
        self.weight = (head[self.shard * half :][:half] if self.stage else embedding).clone()
        return {"vocab_size": VOCABULARY, "max_context": 64}

    def plan(self, lengths: Sequence[int], world_size: int, tokens_per_micro_batch: int = 0) -> ChunkPlan:
        """Ranks of one replica get the same micro-batches, in the same order."""
        ranks = STAGES * SHARDS
        replicas = plan_micro_batches(lengths, world_size // ranks, tokens_per_micro_batch or self.options.tokens)
        return ChunkPlan(tuple(replicas.micro_batches[rank // ranks] for rank in range(world_size)))

    def begin_update(self, denominators: Mapping[str, float]) -> None:
        self.gradient, self.denominators = torch.zeros_like(self.weight), Denominators(denominators)

    def accumulate(self, chunk: Chunk, last: bool) -> None:
        """All micro-batches of the chunk go down the pipeline, then all come back."""
        batches, sent = self._send(chunk)
        scores = self._scores(batches, sent)
        returned = self.world.gather(
            self.spec.rank, [self._backward(*each) for each in zip(batches, sent, scores, strict=True)]
        )
        if self.stage == 0:
            for batch, *arrived in zip(batches, *returned[SHARDS:], strict=True):
                self.gradient.index_add_(0, _before(batch), torch.stack(arrived).sum(0))

    def finish_update(self, denominators: Mapping[str, float]) -> UpdateResult:
        factor = self.denominators.rescale(denominators) if self.stage else 1.0
        factor = self.world.gather(self.spec.rank, factor)[-1]
        self.weight -= self.spec.optimizer.lr * self.gradient * factor
        return UpdateResult(UpdateOutcome.APPLIED, lr=self.spec.optimizer.lr)

    def forward(self, chunk: Chunk, columns: Sequence[str]) -> RowBatch:
        """The first rank of the last stage answers for its replica; the others have no rows to give."""
        batches, sent = self._send(chunk)
        log_probs = torch.cat([log_probs for log_probs, _ in self._scores(batches, sent)])
        if (self.stage, self.shard) != (1, 0):
            return RowBatch((), {})
        ids = tuple(row for batch in batches for row in batch.rows.ids)
        lengths = np.concatenate([batch.rows.columns["tokens"].lengths for batch in batches])
        return RowBatch(ids, {"log_probs": Ragged(log_probs.numpy(), lengths)})

    def publish(
        self, version: Version, transport: Chosen, location: str, payload: Payload = "full", base: str = ""
    ) -> Manifest:
        raise NotImplementedError

    def save(self, directory: str) -> None:
        raise NotImplementedError

    def load(self, directory: str) -> None:
        raise NotImplementedError

    def export(self, directory: str) -> None:
        raise NotImplementedError

    def _send(self, chunk: Chunk) -> tuple[list[PackedBatch], list[Tensor]]:
        """This rank's micro-batches, and the states that stage 0 sends for each."""
        batches = [PackedBatch(chunk.rows.take(rows)) for rows in chunk.plan.micro_batches[self.spec.rank]]
        states = [self.weight[_before(batch)] for batch in batches] if self.stage == 0 else []
        return batches, self.world.gather(self.spec.rank, states)[0]

    def _scores(self, batches: Sequence[PackedBatch], sent: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """(log-probs, log of the normaliser) [tokens] of every micro-batch: each rank sums over its half."""
        shares = [self._share(*each) for each in zip(batches, sent, strict=True)] if self.stage else []
        scores = []
        for parts in zip(*self.world.gather(self.spec.rank, shares)[SHARDS:], strict=True):
            normaliser = torch.stack([part[1] for part in parts]).sum(0).log()
            scores.append((torch.stack([part[0] for part in parts]).sum(0) - normaliser, normaliser))
        return scores

    def _share(self, batch: PackedBatch, states: Tensor) -> tuple[Tensor, Tensor]:
        """(the token's logit where this rank has it, else 0; its part of the normaliser), [tokens]."""
        logits = states @ self.weight.T
        return (logits * self._one_hot(batch)).sum(1), logits.exp().sum(1)

    def _one_hot(self, batch: PackedBatch) -> Tensor:
        first = self.shard * len(self.weight)
        return (batch.tokens[:, None] == torch.arange(first, first + len(self.weight))).float()

    def _backward(self, batch: PackedBatch, states: Tensor, scores: tuple[Tensor, Tensor]) -> Tensor:
        """The algorithm differentiates by log-probs; from there on the trainer's own split is its own affair."""
        if self.stage == 0:
            return states
        log_probs, normaliser = scores
        given = log_probs.requires_grad_()
        loss = reduce(self.algorithm.loss(batch, Outputs({"log_probs": given})), batch, self.denominators)
        (upstream,) = torch.autograd.grad(loss["policy"], given)
        chosen = (states @ self.weight.T - normaliser[:, None]).exp()
        by_logit = upstream[:, None] * (self._one_hot(batch) - chosen)
        self.gradient += by_logit.T @ states
        return by_logit @ self.weight


def _before(batch: PackedBatch) -> Tensor:
    """[tokens] the token before each; a row's first looks at itself and is masked."""
    previous = batch.tokens.roll(1)
    starts = batch.lengths.cumsum(0) - batch.lengths
    previous[starts] = batch.tokens[starts]
    return previous


def rows() -> RowBatch:
    lengths = np.array([3, 5, 2, 4])
    random, total = np.random.default_rng(0), int(lengths.sum())
    mask = np.ones(total, np.uint8)
    mask[np.cumsum(lengths) - lengths] = 0
    columns: dict[str, np.ndarray] = {
        "tokens": random.integers(0, VOCABULARY, total).astype(np.int32),
        "loss_mask": mask,
        "advantages": random.normal(size=total).astype(np.float32),
    }
    ids = tuple(RowId(*AttemptId(0, sample, 0), 0) for sample in range(len(lengths)))
    return RowBatch(ids, {name: Ragged(values, lengths) for name, values in columns.items()})


def spec(rank: int) -> TrainerSpec:
    return TrainerSpec({}, Chosen("algorithm", "weighted"), OptimizerSpec(lr=0.5), rank=rank, world_size=4)


def step(trainer: Pipeline, chunks: Sequence[Chunk], late: Mapping[str, float]) -> UpdateResult:
    trainer.begin_update({"tokens": 1.0})
    for chunk in chunks:
        trainer.accumulate(chunk, chunk is chunks[-1])
    return trainer.finish_update(late)


def reference(batch: RowBatch) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, embedding, head) after one update of the model in one piece."""
    generator = torch.Generator().manual_seed(0)
    embedding, head = (torch.randn(VOCABULARY, WIDTH, generator=generator, requires_grad=True) for _ in range(2))
    packed = PackedBatch(batch)
    logits = embedding[_before(packed)] @ head.T
    log_probs = logits.log_softmax(1).gather(1, packed.tokens[:, None])[:, 0]
    loss = -(log_probs * packed.advantages * packed.loss_mask).sum() / packed.loss_mask.sum()
    by_embedding, by_head = torch.autograd.grad(loss, (embedding, head))
    return log_probs.detach(), (embedding - 0.5 * by_embedding).detach(), (head - 0.5 * by_head).detach()


def test_one_chunk_plan_serves_stages_and_shards_and_gives_the_same_update() -> None:
    batch, trainers = rows(), [Pipeline() for _ in range(4)]
    shell = Pipeline(PipelineOptions(tokens=6))
    halves = [batch.take([0, 1]), batch.take([2, 3])]
    chunks = [Chunk(half, shell.plan(half.columns["tokens"].lengths.tolist(), 4)) for half in halves]
    whole = Chunk(batch, shell.plan(batch.columns["tokens"].lengths.tolist(), 4, tokens_per_micro_batch=64))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda each: each[1].start(spec(each[0])), enumerate(trainers)))
        answers = list(pool.map(lambda trainer: trainer.forward(whole, ("log_probs",)), trainers))
        results = list(pool.map(lambda trainer: step(trainer, chunks, count(batch)), trainers))
    log_probs, embedding, head = reference(batch)
    assert [len(answer) for answer in answers] == [0, 0, 4, 0]
    given = answers[2].take([answers[2].ids.index(row) for row in batch.ids])
    np.testing.assert_allclose(given.columns["log_probs"].values, log_probs.numpy(), atol=1e-5)
    assert {result.outcome for result in results} == {UpdateOutcome.APPLIED}
    torch.testing.assert_close(trainers[0].weight, embedding)
    torch.testing.assert_close(torch.cat([trainers[2].weight, trainers[3].weight]), head)
