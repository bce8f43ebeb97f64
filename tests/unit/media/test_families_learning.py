# SPDX-License-Identifier: Apache-2.0
"""The whole way of every family in one process: sampled, trained, published, sampled again; and parts that stay as they are."""

from __future__ import annotations

from fnmatch import fnmatchcase

import numpy as np
import pytest
from relax_plugin_transformers.engine import TransformersEngine

from relax_contrib.recipes import families as tiny
from relax_core.api import Chosen, EngineSpec, Manifest, OptimizerSpec, TrainerSpec, Version
from relax_core.learn.counts import count
from relax_core.testing.trainer import InMemory, forward
from tests.trainers import ALGORITHM, accumulate, make_trainer
from tests.unit.media.test_families import Model, graded, model, rows, sampled  # noqa: F401

TRANSPORT = Chosen("weight-transport", "shared-memory")
"""One that the engine knows by name; both sides build a transport in memory."""


@pytest.mark.parametrize("frozen", [("vision", "audio"), ("language", "projector")])
async def test_sampled_media_rows_train_all_parts_but_frozen_ones_and_the_engine_loads_them(model: Model, frozen):  # noqa: F811
    path, parts = str(model.folder), model.family.parts({"path": str(model.folder)})
    patterns = tuple(pattern for name in frozen for pattern in parts.get(name, ()))
    wire = InMemory()
    trainer, engine = make_trainer(transport=wire), TransformersEngine()
    engine.build = lambda chosen: wire
    table, media = {"path": path, "dtype": "float32", "freeze": patterns}, str(model.folder / "media")
    facts = trainer.start(TrainerSpec(table, ALGORITHM, OptimizerSpec(1e-3), media=media, suppress_tokens=tiny.NEVER))
    started = await engine.start(EngineSpec(table, 512, media=media))
    try:
        assert started["fingerprint"] == facts["fingerprint"]
        asked = model.requests()
        batch = graded(rows(asked, await sampled(engine, asked)))
        trainer.begin_step(Version("actor", 0, 0))
        before = trainer.publish(Version("actor", 0, 0), TRANSPORT, "")
        accumulate(trainer, batch, budget=512)
        assert trainer.finish_update(count(batch)).outcome == "applied"
        trainer.begin_step(Version("actor", 0, 1))
        after = trainer.publish(Version("actor", 0, 1), TRANSPORT, "")
        check_moved(before, after, parts, frozen)
        assert (await engine.update_weights(after, TRANSPORT)).resident == after.fingerprint
        again = await sampled(engine, asked)
        second = rows(asked, again)
        scored = forward(trainer, second, 512).values[second.columns["loss_mask"].values == 1]
        np.testing.assert_allclose(scored, np.concatenate([again[one.id][1] for one in asked]), atol=model.atol)
    finally:
        await engine.stop()
        trainer.stop()


def check_moved(before: Manifest, after: Manifest, parts: dict[str, tuple[str, ...]], frozen: tuple[str, ...]) -> None:
    """Something moved in each part that is trained, nothing in others."""
    was = {info.name: info.fingerprint for info in before.tensors}
    moved = {info.name for info in after.tensors if was[info.name] != info.fingerprint}
    owned = {
        name: {each for each in was if any(fnmatchcase(each, f"*{pattern}*") for pattern in patterns)}
        for name, patterns in parts.items() if name != "language"
    }  # fmt: skip
    owned["language"] = was.keys() - set().union(*owned.values())  # folders have other names for it
    for name, own in owned.items():
        assert own, f"{name} is no part of {sorted(was)}"
        assert bool(own & moved) == (name not in frozen), f"{name}: {sorted(own & moved)}"
