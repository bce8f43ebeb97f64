# SPDX-License-Identifier: Apache-2.0
"""Adapters on two ranks: frozen bf16 beside trained float32 in one share, dropout that a continued run draws again."""

import numpy as np
import pytest

from relax_core.api import Version
from relax_core.testing.trainer import forward, make_rows
from tests.trainers import TRANSPORT, running, train

pytestmark = pytest.mark.one_process("ranks")  # whose fork server loads torch and Megatron once
LORA = {"rank": 4, "alpha": 8.0}


def step(trainer, number):
    return train(trainer, number, cuts=[7], budget=40)  # in the first chunk the ranks have different numbers of rows


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_adapters_in_shares_train_as_on_one_rank(folder, dtype, tolerance):
    norms, scores, sent = [], [], []
    for ranks in (1, 2):
        with running(folder, ranks, options={"sharding": "fsdp"}, model={"dtype": dtype, "lora": LORA}) as trainer:
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


def test_a_continued_run_draws_the_same_dropout_on_every_rank(folder, tmp_path):
    how = {"options": {"sharding": "fsdp"}, "model": {"lora": {**LORA, "dropout": 0.3}}, "deterministic": True}
    with running(folder, 2, **how) as trainer:
        step(trainer, 0)
        trainer.save(str(tmp_path / "checkpoint"))
        want = step(trainer, 1), trainer.publish(Version("actor", 0, 2), TRANSPORT, "").fingerprint
    with running(folder, 2, **how) as trainer:
        trainer.load(str(tmp_path / "checkpoint"))
        assert (step(trainer, 1), trainer.publish(Version("actor", 0, 2), TRANSPORT, "").fingerprint) == want
