# SPDX-License-Identifier: Apache-2.0
"""On a GPU the trainer computes what a CPU computes, publishes the bytes in its memory, and frees that memory when offloaded.

`test_conformance.py` runs on a GPU too where torch sees one; these tests compare the GPU with a CPU.
"""

import numpy as np
import pytest
import torch

from relax_core.api import OptimizerSpec, Version
from relax_core.testing.trainer import InMemory, forward, make_rows
from tests.trainers import TRANSPORT, train, weights

pytestmark = pytest.mark.gpu
GPU, CPU = {"device": "cuda"}, {"device": "cpu"}
STEPS = 5
OPTIMIZER = OptimizerSpec(1e-3)
PARTS = ("weights", "optimizer", "gradients")


def curve(trainer, first=0, steps=STEPS):
    """Train steps; return [steps, 2]: loss and gradient norm of each."""
    results = [train(trainer, step) for step in range(first, first + steps)]
    return np.array([(result.metrics["train/loss"][0], result.grad_norm) for result in results])


def fingerprint(trainer, step):
    return trainer.publish(Version("actor", 0, step), TRANSPORT, "").fingerprint


def log_probs(trainer):
    return forward(trainer, make_rows(99), 0).values


@pytest.fixture(scope="module")
def on_cpu(folder):
    """The curve of a CPU, and the log-probs before the first step."""
    from tests.trainers import running

    with running(folder, options=CPU, optimizer=OPTIMIZER) as trainer:
        return log_probs(trainer), curve(trainer)


@pytest.mark.parametrize("options", [
    {}, {"offload_optimizer": True}, {"activation_checkpointing": True}, {"share_prefixes": False}, {"attention": "eager"},
    {"compile": True},
], ids=lambda options: next(iter(options), "plain"))  # fmt: skip
def test_a_gpu_scores_and_learns_as_a_cpu(folder, start, on_cpu, options):
    trainer = start(folder, options={**GPU, **options}, optimizer=OPTIMIZER)
    assert trainer.facts["device"].startswith(GPU["device"])
    assert np.allclose(log_probs(trainer), on_cpu[0], rtol=0, atol=1e-4)
    assert np.allclose(curve(trainer), on_cpu[1], rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_products_on_a_gpu_stay_near_float32_on_a_cpu(folder, start, on_cpu, dtype):
    trainer = start(folder, options=GPU, optimizer=OPTIMIZER, model={"dtype": dtype})
    assert np.allclose(log_probs(trainer), on_cpu[0], rtol=0, atol=0.15)
    assert np.isfinite(curve(trainer)).all()


def test_the_published_bytes_are_those_in_the_memory_of_the_gpu(folder, start):
    transport = InMemory()
    trainer = start(folder, options=GPU, transport=transport)
    curve(trainer)
    version = Version("actor", 0, STEPS)
    trainer.publish(version, TRANSPORT, "")
    held = weights(trainer)
    sent = {info.name: array for info, array in transport.sent[version]}
    assert sent and all(np.array_equal(array, held[name].numpy()) for name, array in sent.items())


def test_a_checkpoint_of_a_gpu_continues_on_a_cpu_and_the_reverse(folder, start, on_cpu, tmp_path):
    for saves, loads in ((GPU, CPU), (CPU, GPU)):
        path = str(tmp_path / saves["device"])
        first = start(folder, options=saves, optimizer=OPTIMIZER)
        early = curve(first, 0, 2)
        first.save(path)
        then = start(folder, options=loads, optimizer=OPTIMIZER)
        then.load(path)
        assert fingerprint(then, 2) == fingerprint(first, 2)
        late = curve(then, 2, STEPS - 2)
        assert np.allclose(np.concatenate([early, late]), on_cpu[1], rtol=2e-4, atol=1e-6)


def test_an_offloaded_trainer_frees_its_memory_and_continues_with_the_same_bytes(folder, start, on_cpu):
    trainer = start(folder, options=GPU, optimizer=OPTIMIZER)
    early, before = curve(trainer, 0, 2), fingerprint(trainer, 2)
    held = torch.cuda.memory_allocated()
    trainer.offload(PARTS)
    assert held - torch.cuda.memory_allocated() >= 3 * trainer.facts["parameters"] * 4  # weights and two moments
    trainer.onload(PARTS)
    assert fingerprint(trainer, 2) == before
    assert np.allclose(np.concatenate([early, curve(trainer, 2, STEPS - 2)]), on_cpu[1], rtol=2e-4, atol=1e-6)


def test_flash_attention_scores_as_the_attention_of_torch(folder, start):
    pytest.importorskip("flash_attn")
    found = []
    for attention in ("flash_attention_2", "sdpa"):
        trainer = start(folder, options={**GPU, "attention": attention}, model={"dtype": "bfloat16"})
        found.append(log_probs(trainer))
    assert np.allclose(*found, rtol=0, atol=0.15)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("options", [
    {"sharding": "none"}, {"sharding": "fsdp"}, {"tensor_parallel": 2},
], ids=["copies", "fsdp", "tensor parallel"])  # fmt: skip
def test_two_gpus_learn_as_one_cpu(divisible, start, options):
    one = curve(start(divisible, options=CPU, optimizer=OPTIMIZER))
    both = start(divisible, 2, options={**GPU, **options}, optimizer=OPTIMIZER)
    assert both.facts["device"].startswith(GPU["device"])
    assert np.allclose(curve(both), one, rtol=2e-4, atol=1e-6)
