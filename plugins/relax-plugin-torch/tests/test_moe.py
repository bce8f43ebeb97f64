# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts in the trainer: one rank or shares, published by the names of their folder, replayed in an update."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from relax_core.api import ConfigError, Ragged, Version
from relax_core.learn.counts import count
from relax_core.testing.engine_fixture import VOCABULARY, tensors_of
from relax_core.testing.moe import EXPERTS, LAYERS, TOP_K, tiny_moe
from relax_core.testing.trainer import InMemory, chunk, make_rows, with_values
from tests.trainers import TRANSPORT, accumulate, train

pytestmark = pytest.mark.one_process("ranks")  # whose fork server loads torch and Megatron once
ROLLOUT = {"routing_replay": "rollout"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    return [tiny_moe(str(folder / str(seed)), seed) for seed in (1, 2)]


def rows_of():
    rows = make_rows(3, version=0)
    tokens = rows.columns["tokens"]
    return with_values(rows, "tokens", tokens.values % VOCABULARY)


def routed(rows, values, valid=None):
    lengths = rows.columns["tokens"].lengths
    known = np.ones(len(values), np.uint8) if valid is None else valid
    return rows.with_columns({"routed_experts": Ragged(values, lengths), "routed_valid": Ragged(known, lengths)})


def test_experts_are_published_by_name_and_taken_over_whole(folders, start):
    held = InMemory()
    first, second = start(folders[0], transport=held), start(folders[1], transport=held, role="actor_fwd")
    manifest = first.publish(Version("actor", 0, 0), TRANSPORT, "here")
    stored = {name: array for name, array, _ in tensors_of(folders[0])}
    assert {info.name for info in manifest.tensors} == stored.keys()
    assert any(".experts.7.down_proj" in name for name in stored)
    rows = rows_of()
    before = second.forward(chunk(second, rows), ("log_probs",)).columns["log_probs"].values
    second.load_published(manifest, TRANSPORT)
    wanted = first.forward(chunk(first, rows), ("log_probs",)).columns["log_probs"].values
    got = second.forward(chunk(second, rows), ("log_probs",)).columns["log_probs"].values
    np.testing.assert_array_equal(got, wanted)
    assert not np.array_equal(before, wanted)


def test_updates_of_a_step_visit_what_its_start_visited(folders, start):
    trainer, rows = start(folders[0], model={"routing_replay": "recompute"}), rows_of()
    trainer.begin_step(Version("actor", 0, 0))
    own = trainer.forward(chunk(trainer, rows), ("log_probs", "routed_experts")).columns
    experts = own["routed_experts"]
    assert experts.values.dtype == np.uint8 and experts.values.shape[1:] == (LAYERS, TOP_K)
    assert int(experts.values.max()) < EXPERTS
    planned = rows.with_columns({"routed_experts": experts, "old_log_probs": own["log_probs"]})
    replays = []
    for _ in range(6):
        accumulate(trainer, planned)
        replays.append(trainer.finish_update(count(planned)).metrics)
    shares = [metrics["routing/replayed"] for metrics in replays]
    assert all(total == fed > 0 for total, fed in shares)
    assert replays[0]["routing/differs"][0] == 0.0
    assert replays[-1]["routing/differs"][0] > 0.0


def test_experts_of_the_rollout_are_replayed_in_the_old_pass_too(folders, start):
    trainer, rows = start(folders[0], model=ROLLOUT), rows_of()
    own = trainer.forward(chunk(trainer, rows), ("log_probs", "routed_experts")).columns
    others = ((own["routed_experts"].values.astype(int) + 1) % EXPERTS).astype(np.uint8)

    def log_probs(values, valid=None):
        filled = trainer.forward(chunk(trainer, routed(rows, values, valid)), ("log_probs",))
        return filled.columns["log_probs"].values

    np.testing.assert_array_equal(log_probs(own["routed_experts"].values), own["log_probs"].values)
    assert np.abs(log_probs(others) - own["log_probs"].values).max() > 1e-2
    nowhere = np.zeros(len(others), np.uint8)
    np.testing.assert_array_equal(log_probs(others, nowhere), own["log_probs"].values)


def test_two_ranks_are_one_trainer_and_replay_alike(folders, start, tmp_path):
    alone, both = start(folders[0], model=ROLLOUT), start(folders[0], 2, model=ROLLOUT, options={"sharding": "fsdp"})
    rows = rows_of()
    own = alone.forward(chunk(alone, rows), ("routed_experts",)).columns["routed_experts"].values
    planned = routed(rows, ((own.astype(int) + 1) % EXPERTS).astype(np.uint8), np.arange(len(own)) % 5 > 0)
    saved = []
    for trainer in (alone, both):
        result = train(trainer, 0, planned)
        trainer.export(str(tmp_path / str(len(saved))))
        saved.append((result, load_file(tmp_path / str(len(saved)) / "model.safetensors")))
    (one, weights), (other, got) = saved
    assert other.metrics["routing/replayed"] == one.metrics["routing/replayed"]
    assert other.metrics["routing/differs"] == one.metrics["routing/differs"]
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    for name, value in weights.items():
        # Adam divides by the gradient's size, so where a gradient is next to nothing its rounding shows: 1 % of an update.
        np.testing.assert_allclose(got[name], value, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("options", "fix"), [({"tensor_parallel": 2}, "tensor_parallel = 1"), ({"compile": True}, "compile")]
)
def test_options_that_conflict_with_routing_replay_are_refused(folders, start, options, fix):
    with pytest.raises(ConfigError, match=fix) as refused:
        start(folders[0], model=ROLLOUT, options=options)
    assert refused.value.field == "model.routing_replay"
