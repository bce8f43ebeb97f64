# SPDX-License-Identifier: Apache-2.0
"""The whole way of an image in one process: engine, rows, trainer, its weights back in the engine, and the same again."""

from __future__ import annotations

import numpy as np
from relax_plugin_torch.trainer import TorchTrainer
from relax_plugin_transformers.engine import TransformersEngine

from relax_core.api import Chosen, EngineSpec, OptimizerSpec, Ragged, RowBatch, TrainerSpec, Version
from relax_core.testing.trainer import InMemory, Reinforce, chunk, forward
from tests.unit.media.test_seeing_models import NEVER, folder, media, requests, rows, sampled  # noqa: F401

TRANSPORT = Chosen("weight-transport", "shared-memory")


def graded(batch: RowBatch) -> RowBatch:
    """Odd tokens were a good idea."""
    tokens = batch.columns["tokens"]
    values = np.where(tokens.values % 2, 1.0, -1.0).astype(np.float32)
    versions = np.where(batch.columns["loss_mask"].values == 1, 0, -1).astype(np.int32)
    return batch.with_columns(
        {"advantages": Ragged(values, tokens.lengths), "weight_versions": Ragged(versions, tokens.lengths)}
    )


async def test_what_was_sampled_is_trained_and_published_and_sampled_from(folder, media):  # noqa: F811
    model, held = {"path": str(folder), "dtype": "float32"}, InMemory()
    trainer, engine = TorchTrainer(), TransformersEngine()
    trainer.build = lambda chosen: Reinforce() if chosen.kind == "algorithm" else held
    engine.build = lambda chosen: held
    spec = TrainerSpec(
        model, Chosen("algorithm", "mine"), OptimizerSpec(1e-3), media=str(folder / "media"), suppress_tokens=NEVER
    )
    facts = trainer.start(spec)
    started = await engine.start(EngineSpec(model, 512, media=str(folder / "media")))
    try:
        assert started["fingerprint"] == facts["fingerprint"]
        asked = requests(media)
        said = await sampled(engine, asked)
        batch = graded(rows(asked, said))
        trainer.begin_step(Version("actor", 0, 0))
        tokens = {"tokens": float(batch.columns["loss_mask"].values.sum())}
        trainer.begin_update(tokens)
        trainer.accumulate(chunk(trainer, batch, 64), last=True)
        done = trainer.finish_update(tokens)
        assert done.outcome == "applied" and np.isfinite(done.grad_norm) and done.grad_norm > 0
        version = Version("actor", 0, 1)
        trainer.begin_step(version)
        manifest = trainer.publish(version, TRANSPORT, "")
        receipt = await engine.update_weights(manifest, TRANSPORT)
        assert receipt.resident == manifest.fingerprint != facts["fingerprint"]
        again = await sampled(engine, asked)
        second = rows(asked, again)
        scored = forward(trainer, second, 64).values[second.columns["loss_mask"].values == 1]
        np.testing.assert_allclose(scored, np.concatenate([again[one.id][1] for one in asked]), atol=1e-5)
        names = {info.name for info in manifest.tensors}
        assert any("visual" in name for name in names) and any("language_model" in name for name in names)
    finally:
        await engine.stop()
        trainer.stop()
