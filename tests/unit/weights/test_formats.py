# SPDX-License-Identifier: Apache-2.0
"""The real trainer publishes to the real engine in all nine pairs of number formats: whole, as a delta and as adapters."""

import itertools

import numpy as np
import pytest
import torch
from relax_plugin_torch.rank import Rank
from relax_plugin_transformers.engine import TransformersEngine

from relax_core.api import Chosen, OptimizerSpec, Ragged, RowBatch, RowId, TrainerSpec, Version
from relax_core.api.engine import EngineSpec
from relax_core.learn.counts import count
from relax_core.tensor_files.transport import Disk
from relax_core.testing.engine_fixture import CONTEXT, DISK, EngineFixture, tensors_of, tiny_qwen3
from relax_core.testing.trainer import Reinforce, chunk, forward, make_rows, update

FORMATS = ("float32", "bfloat16", "float16")
APART = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.25}
LORA = {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "down_proj"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_qwen3(str(tmp_path_factory.mktemp("model")), 1)


@pytest.fixture
def pair(folder):
    """A trainer and an engine of one model, in formats of their own."""
    made = []

    def start(own, engines, **model):
        trainer, disk = Rank(), Disk()
        trainer.build = lambda chosen: Reinforce(chosen.options) if chosen.kind == "algorithm" else disk
        table = {"path": folder, "dtype": own, **model}
        trainer.start(
            TrainerSpec(table, Chosen("algorithm", "reinforce"), OptimizerSpec(1e-2), publish_dtype=engines, seed=1)
        )
        engine = TransformersEngine()
        engine.build = lambda chosen: Disk()
        lab = EngineFixture(engine, folder, folder)
        made.extend((trainer, lab))
        spec = EngineSpec({**table, "dtype": engines}, CONTEXT, version=Version("actor", 0, 0))
        lab.facts = dict(lab.run(engine.start(spec)))
        return trainer, lab

    yield start
    for one in made:
        one.stop()


def stepped(trainer, number):
    rows = make_rows(number, version=number)
    trainer.begin_step(Version("actor", 0, number))
    update(trainer, [chunk(trainer, rows)], count(rows), count(rows))


def apart(trainer, lab):
    """The largest difference between what the engine said and what the trainer computes."""
    requests = [lab.request((3, 4, 5, 6 + seed), 12, seed=seed) for seed in range(4)]
    got = lab.generate(*requests)
    tokens = [np.array((*request.tokens, *one.tokens), np.int32) for request, one in zip(requests, got, strict=True)]
    mask = [np.array([0] * 4 + [1] * 12, np.uint8) for _ in tokens]
    rows = RowBatch(
        tuple(RowId(group, 0, 0, 0) for group in range(len(tokens))),
        {"tokens": Ragged.of(tokens), "loss_mask": Ragged.of(mask)},
    )
    own = forward(trainer, rows, 0).values.reshape(len(tokens), -1)[:, 4:]
    return np.abs(own - np.array([one.log_probs for one in got])).max()


@pytest.mark.parametrize(("own", "engines"), itertools.product(FORMATS, FORMATS))
def test_each_pair_agrees_as_far_as_its_formats_allow(pair, own, engines):
    trainer, lab = pair(own, engines)
    allowed = APART[own] + APART[engines]
    assert apart(trainer, lab) < allowed
    previous = ""
    for number, payload in enumerate(("full", "delta")):
        stepped(trainer, number)
        version = Version("actor", 0, number + 1)
        manifest = trainer.publish(version, DISK, lab.location, payload, previous)
        receipt = lab.update(manifest)
        assert (receipt.level, receipt.fingerprint) == ("resident", manifest.wire_fingerprint)
        assert receipt.resident == manifest.fingerprint
        assert apart(trainer, lab) < allowed
        previous = str(version)


@pytest.mark.parametrize(("own", "engines"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")])
def test_adapters_alone_lie_on_the_base_that_each_side_has(pair, own, engines):
    trainer, lab = pair(own, engines, lora=LORA)
    stepped(trainer, 0)
    base = trainer.facts()["base"]
    assert base == lab.facts["fingerprint"]
    manifest = trainer.publish(Version("actor", 0, 1), DISK, lab.location, "lora", base)
    assert lab.update(manifest).fingerprint == manifest.wire_fingerprint
    assert apart(trainer, lab) < APART[own] + APART[engines]


@pytest.mark.parametrize("engines", FORMATS)
def test_frozen_weights_reach_engines_of_another_format_rounded_once(pair, folder, engines):
    trainer, lab = pair("bfloat16", engines, freeze=["mlp"])
    manifest = trainer.publish(Version("actor", 0, 0), DISK, lab.location)
    assert manifest.fingerprint == lab.facts["fingerprint"]
    frozen = [p for name, p in trainer._model.named_parameters() if "mlp" in name]
    assert {p.dtype for p in frozen} == {torch.bfloat16 if engines == "bfloat16" else torch.float32}


def test_the_export_has_the_trainers_format_and_checkpoints_are_exact(pair, tmp_path):
    trainer, _ = pair("float32", "bfloat16")
    stepped(trainer, 0)
    trainer.save(str(tmp_path / "checkpoint"))
    trainer.export(str(tmp_path / "export"))
    other, _ = pair("float32", "float32")
    other.load(str(tmp_path / "checkpoint"))
    own = [{name: p.detach().clone() for name, p in one._model.named_parameters()} for one in (trainer, other)]
    assert all(torch.equal(own[0][name], own[1][name]) for name in own[0])
    assert {dtype for _, _, dtype in tensors_of(str(tmp_path / "export"))} == {"F32"}
