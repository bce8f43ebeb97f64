# SPDX-License-Identifier: Apache-2.0
"""Adapters on two ranks: frozen bf16 beside trained float32 in one share, dropout that a continued run draws again."""

from contextlib import contextmanager

import numpy as np
import pytest
from relax_plugin_torch.trainer import TorchTrainer

from relax_core.api import Chosen, OptimizerSpec, TrainerSpec, Version
from relax_core.learn.counts import count
from relax_core.testing.trainer import InMemory, Reinforce, chunk, forward, make_rows, tiny_model
from relax_core.testing.trainer_ranks import RankedTrainer

ALGORITHM, TRANSPORT = Chosen("algorithm", "reinforce"), Chosen("weight-transport", "in-memory")
LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@contextmanager
def started(ranks, sharding, model):
    if ranks == 1:
        trainer, held = TorchTrainer(TorchTrainer.options_model()()), InMemory()
        trainer.build = lambda chosen: Reinforce(chosen.options) if chosen.kind == "algorithm" else held
    else:
        trainer = RankedTrainer(TorchTrainer, {"sharding": sharding}, ranks)
    trainer.facts = trainer.start(TrainerSpec(model, ALGORITHM, OptimizerSpec(1e-2), deterministic=True))
    try:
        yield trainer
    finally:
        trainer.stop()


def step(trainer, number):
    rows = make_rows(number, version=number)
    trainer.begin_step(Version("actor", 0, number))
    trainer.begin_update(count(rows))
    for part in (range(7), range(7, len(rows))):  # in the first chunk the ranks have different numbers of rows
        trainer.accumulate(chunk(trainer, rows.take(list(part)), 40), part.stop == len(rows))
    return trainer.finish_update(count(rows))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_adapters_in_shares_train_as_on_one_rank(folder, dtype, tolerance):
    norms, scores, sent = [], [], []
    for ranks in (1, 2):
        with started(ranks, "fsdp", {"path": folder, "dtype": dtype, "lora": LORA}) as trainer:
            norms.append([step(trainer, number).grad_norm for number in range(2)])
            scores.append(forward(trainer, make_rows(7), 20).values)
            base = trainer.facts["base"]
            sent.append(trainer.publish(Version("actor", 0, 2), TRANSPORT, "", "lora", base))
    assert norms[1] == pytest.approx(norms[0], rel=tolerance)
    np.testing.assert_allclose(scores[1], scores[0], atol=10 * tolerance)
    assert [(i.name, i.shape, i.dtype) for i in sent[0].tensors] == [
        (i.name, i.shape, i.dtype) for i in sent[1].tensors
    ]
    assert sent[0].base == sent[1].base


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_a_continued_run_draws_the_same_dropout_on_every_rank(folder, tmp_path, sharding):
    model = {"path": folder, "lora": {**LORA, "dropout": 0.3}}
    with started(2, sharding, model) as trainer:
        step(trainer, 0)
        trainer.save(str(tmp_path / "checkpoint"))
        want = step(trainer, 1), trainer.publish(Version("actor", 0, 2), TRANSPORT, "").fingerprint
    with started(2, sharding, model) as trainer:
        trainer.load(str(tmp_path / "checkpoint"))
        assert (step(trainer, 1), trainer.publish(Version("actor", 0, 2), TRANSPORT, "").fingerprint) == want
