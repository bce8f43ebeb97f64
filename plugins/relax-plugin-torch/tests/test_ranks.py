# SPDX-License-Identifier: Apache-2.0
"""Two ranks are one trainer: the same loss, metrics and weights, checkpoints that fit both, and no hang when one dies."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager, contextmanager, nullcontext

import numpy as np
import pytest
from relax_plugin_torch.trainer import TorchTrainer
from safetensors.numpy import load_file

from relax_core.api import Chosen, Chunk, ConfigError, OptimizerSpec, TrainerSpec, Version
from relax_core.api.errors import InfrastructureError, WorkerDied
from relax_core.learn.counts import count
from relax_core.roles.rank_group import RankGroup
from relax_core.rpc.host import free_port
from relax_core.runners.local.workers import LocalWorkers
from relax_core.testing.trainer import InMemory, Reinforce, forward, make_rows, tiny_model, with_values
from relax_core.testing.trainer_ranks import RankedTrainer
from tests.processes import stop

LOOPBACK = "127.0.0.1"
ALGORITHM = Chosen("algorithm", "reinforce")
SHARDINGS = pytest.mark.parametrize("sharding", ["none", "fsdp"])
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@contextmanager
def started(folder, ranks=1, sharding="auto", **changes):
    if ranks == 1:
        trainer = TorchTrainer(TorchTrainer.options_model()())
        held = InMemory()
        trainer.build = lambda chosen: Reinforce(chosen.options) if chosen.kind == "algorithm" else held
    else:
        trainer = RankedTrainer(TorchTrainer, {"sharding": sharding}, ranks)
    trainer.start(TrainerSpec({"path": folder}, ALGORITHM, OptimizerSpec(1e-3), **changes))
    try:
        yield trainer
    finally:
        trainer.stop()


def rows_of(step):
    """Some rows without gradient, and an engine that is a little off."""
    rows = make_rows(step, version=step)
    column = rows.columns["advantages"]
    silent = np.repeat(np.arange(len(rows)) % 3 > 0, column.lengths).astype(np.float32)
    rows = with_values(rows, "advantages", column.values * silent)
    return with_values(rows, "rollout_log_probs", -4 - np.abs(column.values))


def train(trainer, step):
    """A step of one update in three chunks: one of a single row, so that a rank has none; counts known at the end only."""
    rows = rows_of(step)
    trainer.begin_step(Version("actor", 0, step))
    trainer.begin_update({**count(rows), "tokens": 10.0})
    for part, budget in ((range(7), 30), (range(7, 8), 0), (range(8, len(rows)), 0)):
        chunk = rows.take(list(part))
        lengths = [int(length) for length in chunk.columns["tokens"].lengths]
        trainer.accumulate(Chunk(chunk, trainer.plan(lengths, 1, budget)), part.stop == len(rows))
    return trainer.finish_update(count(rows))


def weights(trainer, path):
    trainer.export(str(path))
    return load_file(path / "model.safetensors")


def assert_near(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], rtol=0, atol=TOLERANCE, err_msg=name)


@SHARDINGS
def test_two_ranks_train_as_one_does(folder, tmp_path, sharding):
    results, after, scores = [], [], []
    for ranks in (1, 2):
        with started(folder, ranks, sharding) as trainer:
            results.append([train(trainer, step) for step in range(2)])
            after.append(weights(trainer, tmp_path / str(ranks)))
            scores.append(forward(trainer, rows_of(2), 20).values)
    for alone, shared in zip(*results, strict=True):
        assert shared.outcome is alone.outcome
        assert shared.grad_norm == pytest.approx(alone.grad_norm, rel=TOLERANCE)
        assert shared.metrics.keys() == alone.metrics.keys()
        for name in alone.metrics:
            if name.endswith("_p99"):  # of each micro-batch, and those differ
                continue
            assert shared.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-5, abs=TOLERANCE), name
    assert_near(*after)
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-5)


@pytest.mark.parametrize(
    ("before", "after"), [((2, "fsdp"), (1, "auto")), ((1, "auto"), (2, "fsdp")), ((2, "none"), (2, "fsdp"))]
)
def test_a_checkpoint_continues_on_another_number_of_ranks(folder, tmp_path, before, after):
    with started(folder, *before) as trainer:
        train(trainer, 0)
        trainer.save(str(tmp_path / "checkpoint"))
        want = train(trainer, 1).grad_norm, weights(trainer, tmp_path / "want")
    with started(folder, *after, seed=7) as trainer:
        trainer.load(str(tmp_path / "checkpoint"))
        assert train(trainer, 1).grad_norm == pytest.approx(want[0], rel=TOLERANCE)
        assert_near(weights(trainer, tmp_path / "have"), want[1])


class Quiet:
    """A track that nobody watches."""

    def span(self, kind, name, owed_by=""):
        return nullcontext()

    def say(self, work):
        pass


@asynccontextmanager
async def working(folder, tmp_path, sharding):
    """Two ranks in processes of their own, in the middle of an update, as one group."""
    from relax_core.api.role import WorkerSpec

    options = {"sharding": sharding}
    workers = LocalWorkers(log_dir=tmp_path)
    try:
        ranks = await workers.start(
            [
                WorkerSpec(f"rank-{r}", Chosen("trainer", "torch", options), preload=TorchTrainer.preload)
                for r in range(2)
            ]
        )
        plain = TorchTrainer(TorchTrainer.options_model()(**options))
        group = RankGroup(plain, ranks, [Quiet(), Quiet()], {}, 0)
        algorithm, meet = Chosen("algorithm", "grpo"), f"{LOOPBACK}:{free_port(LOOPBACK)}"
        specs = [TrainerSpec({"path": folder}, algorithm, OptimizerSpec(1e-3), rank=r, world_size=2, rendezvous=meet)
                 for r in range(2)]  # fmt: skip
        await asyncio.gather(
            *(rank.call("start", spec, timeout_s=120) for rank, spec in zip(ranks, specs, strict=True))
        )
        await group.call("begin_step", Version("actor", 0, 0))
        await group.call("begin_update", count(make_rows()))
        yield group, ranks
    finally:
        await workers.close()


@SHARDINGS
async def test_a_rank_that_is_killed_ends_the_call_of_all(folder, tmp_path, sharding):
    """It is stopped first, so that the other one surely waits for it."""
    async with working(folder, tmp_path, sharding) as (group, ranks):
        await asyncio.to_thread(stop, ranks[1].pid)
        call = asyncio.create_task(group.call("accumulate", group.chunk(make_rows()), True, timeout_s=120))
        await asyncio.sleep(0)
        os.kill(ranks[1].pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            with pytest.raises(WorkerDied, match=r"rank-1 .* during accumulate"):
                await call
            with pytest.raises(InfrastructureError):  # the other one is of no use alone
                await group.finish_update(count(make_rows()))


async def test_a_rank_that_hangs_in_a_collective_is_found_and_ends_the_call_of_all(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("relax_core.roles.rank_group.PING_EVERY_S", 0.2)
    async with working(folder, tmp_path, "fsdp") as (group, ranks):
        await asyncio.to_thread(stop, ranks[1].pid)
        async with asyncio.timeout(100):
            with pytest.raises(WorkerDied, match=r"rank-1 .* no sign of life .* during accumulate"):
                await group.call("accumulate", group.chunk(rows_of(0)), True, timeout_s=120)
        assert group.lost


def test_a_rank_without_the_others_gives_up(folder):
    trainer = TorchTrainer(TorchTrainer.options_model()(collective_timeout_s=1))
    trainer.build = lambda chosen: Reinforce(chosen.options)
    spec = TrainerSpec(
        {"path": folder}, ALGORITHM, OptimizerSpec(1e-3), world_size=2, rendezvous=f"{LOOPBACK}:{free_port(LOOPBACK)}"
    )
    with pytest.raises(InfrastructureError, match="rank 0 of 2 lost another rank in start"):
        trainer.start(spec)


def test_ranks_need_a_place_to_meet(folder):
    trainer = TorchTrainer(TorchTrainer.options_model()())
    trainer.build = lambda chosen: Reinforce(chosen.options)
    with pytest.raises(ConfigError, match="rendezvous"):
        trainer.start(TrainerSpec({"path": folder}, ALGORITHM, OptimizerSpec(1e-3), world_size=2))
