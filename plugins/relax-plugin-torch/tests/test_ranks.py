# SPDX-License-Identifier: Apache-2.0
"""Two ranks are one trainer: the same loss, metrics and weights, checkpoints that fit both, and no hang when one dies."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager, nullcontext

import numpy as np
import pytest
from relax_plugin_torch.trainer import TorchTrainer
from safetensors.numpy import load_file

from relax_core.api import Chosen, ConfigError, OptimizerSpec, TrainerSpec, Version
from relax_core.api.errors import InfrastructureError, WorkerDied
from relax_core.learn.counts import count
from relax_core.roles.rank_group import RankGroup
from relax_core.rpc.host import free_port
from relax_core.runners.local.workers import LocalWorkers
from relax_core.testing.trainer import forward, make_rows, with_values
from tests.processes import stop
from tests.trainers import ALGORITHM, make_trainer, running, train

pytestmark = pytest.mark.one_process("ranks")  # whose fork server loads torch and Megatron once
LOOPBACK = "127.0.0.1"
TOLERANCE = 1e-6


def rows_of(number):
    """Some rows without gradient, and an engine that is a little off."""
    rows = make_rows(number, version=number)
    column = rows.columns["advantages"]
    silent = np.repeat(np.arange(len(rows)) % 3 > 0, column.lengths).astype(np.float32)
    rows = with_values(rows, "advantages", column.values * silent)
    return with_values(rows, "rollout_log_probs", -4 - np.abs(column.values))


def step(trainer, number):
    """A step of one update in three chunks: one of a single row, so that a rank has none; counts known at the end only."""
    rows = rows_of(number)
    return train(trainer, number, rows, cuts=(7, 8), budget=30, nominal={**count(rows), "tokens": 10.0})


def exported(trainer, path):
    trainer.export(str(path))
    return load_file(path / "model.safetensors")


def assert_near(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], rtol=0, atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_two_ranks_train_as_one_does(folder, tmp_path, sharding):
    results, after, scores = [], [], []
    for ranks in (1, 2):
        with running(folder, ranks, options={"sharding": sharding}) as trainer:
            results.append([step(trainer, number) for number in range(2)])
            after.append(exported(trainer, tmp_path / str(ranks)))
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
    with running(folder, before[0], options={"sharding": before[1]}) as trainer:
        step(trainer, 0)
        trainer.save(str(tmp_path / "checkpoint"))
        want = step(trainer, 1).grad_norm, exported(trainer, tmp_path / "want")
    with running(folder, after[0], options={"sharding": after[1]}, seed=7) as trainer:
        trainer.load(str(tmp_path / "checkpoint"))
        assert step(trainer, 1).grad_norm == pytest.approx(want[0], rel=TOLERANCE)
        assert_near(exported(trainer, tmp_path / "have"), want[1])


class Quiet:
    """A track that nobody watches."""

    def span(self, kind, name, blocked_by=""):
        return nullcontext()

    def say(self, work):
        pass


@asynccontextmanager
async def working(folder, tmp_path):
    """Two ranks in processes of their own, in the middle of an update, as one group."""
    from relax_core.api.role import WorkerSpec

    options = {"sharding": "fsdp"}
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


@pytest.mark.faults
async def test_a_rank_that_is_killed_ends_the_call_of_all(folder, tmp_path):
    """It is stopped first, so that the other one surely waits for it."""
    async with working(folder, tmp_path) as (group, ranks):
        await asyncio.to_thread(stop, ranks[1].pid)
        call = asyncio.create_task(group.call("accumulate", group.chunk(make_rows()), True, timeout_s=120))
        await asyncio.sleep(0)
        os.kill(ranks[1].pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            with pytest.raises(WorkerDied, match=r"rank-1 .* during accumulate"):
                await call
            with pytest.raises(InfrastructureError):  # the other one is of no use alone
                await group.finish_update(count(make_rows()))


@pytest.mark.faults
async def test_a_rank_that_hangs_in_a_collective_is_found_and_ends_the_call_of_all(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("relax_core.roles.rank_group.PING_EVERY_S", 0.2)
    async with working(folder, tmp_path) as (group, ranks):
        await asyncio.to_thread(stop, ranks[1].pid)
        async with asyncio.timeout(100):
            with pytest.raises(WorkerDied, match=r"rank-1 .* no sign of life .* during accumulate"):
                await group.call("accumulate", group.chunk(rows_of(0)), True, timeout_s=120)
        assert group.lost


def test_a_rank_without_the_others_gives_up(folder):
    trainer = make_trainer(collective_timeout_s=1)
    spec = TrainerSpec(
        {"path": folder}, ALGORITHM, OptimizerSpec(1e-3), world_size=2, rendezvous=f"{LOOPBACK}:{free_port(LOOPBACK)}"
    )
    with pytest.raises(InfrastructureError, match="rank 0 of 2 lost another rank in start"):
        trainer.start(spec)


def test_ranks_need_a_place_to_meet(folder):
    with pytest.raises(ConfigError, match="rendezvous"), running(folder, world_size=2):
        pass
