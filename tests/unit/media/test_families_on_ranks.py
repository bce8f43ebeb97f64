# SPDX-License-Identifier: Apache-2.0
"""Two ranks that share out a model's weights train on media as one does, also where only one of them has any."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from relax_contrib.recipes import families as tiny
from relax_core.api import ConfigError, OptimizerSpec, RowBatch
from relax_core.testing.trainer import forward
from tests.trainers import assert_updated_alike, running, train
from tests.unit.media.test_families import Model, built, graded, rows

pytestmark = pytest.mark.one_process("ranks")  # whose fork server loads torch and Megatron once


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return built("qwen3_omni_moe_thinker", tmp_path_factory.mktemp("ranks") / "model")


def batch(model: Model) -> RowBatch:
    asked = model.requests()
    return graded(rows(asked, {one.id: ([11 + int(one.id[0]), 12, 2], [0.0] * 3) for one in asked}))


def trained(model: Model, ranks: int, out: Path) -> tuple[float, dict[str, np.ndarray], np.ndarray]:
    """(norm of the gradient, weights after one step, log-probs under them): row by row, so that ranks differ in what they
    see."""
    own, media = batch(model), {"media": str(model.folder / "media"), "suppress_tokens": tiny.NEVER}
    options = {"sharding": "fsdp"} if ranks > 1 else {}
    with running(model.folder, ranks, options=options, optimizer=OptimizerSpec(1e-3), **media) as trainer:
        norm = train(trainer, 0, own, budget=40).grad_norm
        trainer.export(str(out))
        return norm, load_file(out / "model.safetensors"), forward(trainer, own, 40).values


def test_two_ranks_that_share_weights_out_train_on_media_as_one_does(model, tmp_path):
    (norm, weights, scores), (other, theirs, again) = (trained(model, n, tmp_path / str(n)) for n in (1, 2))
    assert other == pytest.approx(norm, rel=1e-5)
    assert_updated_alike(theirs, weights)
    np.testing.assert_allclose(again, scores, atol=1e-4)


def test_matrices_in_parts_are_refused_with_media(model):
    how = {"media": str(model.folder / "media"), "world_size": 2, "rendezvous": "127.0.0.1:1"}
    refused = pytest.raises(ConfigError, match=r"trainer\.tensor_parallel: got 2 with media; set it to 1")
    with refused, running(model.folder, options={"tensor_parallel": 2}, **how):
        pass
