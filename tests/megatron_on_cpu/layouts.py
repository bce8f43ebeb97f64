# SPDX-License-Identifier: Apache-2.0
"""Layouts of the Megatron trainer's ranks on a CPU, and learning curves that tests compare with the torch trainer's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from relax_core.api import OptimizerSpec, TrainerSpec
from relax_core.testing.trainer import forward, make_rows
from relax_core.testing.trainer_fixture import VOCAB
from tests.megatron_on_cpu.trainer import MegatronOnCpu, PatchedRanks
from tests.trainers import ALGORITHM, train

STEPS, SAVED = 10, 5
OPTIMIZER = OptimizerSpec(1e-3, warmup_steps=3, betas=(0.8, 0.98), weight_decay=0.1)
COLUMNS = ("log_probs", "entropy")


@dataclass(frozen=True)
class Layout:
    """The ranks of a trainer and how they share the model."""

    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1


ONE = Layout()
SELECTIVE = Layout({"recompute": "selective"})
DP2 = Layout({}, 2)
TP2 = Layout({"tensor_parallel": 2}, 2)
TP2_SP = Layout({"tensor_parallel": 2, "sequence_parallel": True}, 2)
PP2 = Layout({"pipeline_parallel": 2}, 2)
PP2_VP2 = Layout({"pipeline_parallel": 2, "virtual_pipeline": 2}, 2)
"""Interleaved chunks of layers; the model needs four layers."""
OFFLOADED = Layout({"offload_optimizer": True}, 2)
CP2 = Layout({"context_parallel": 2}, 2)
EP2 = Layout({"expert_parallel": 2}, 2)


@contextmanager
def megatron(
    path: str | Path, layout: Layout, model: Any = None, optimizer: OptimizerSpec = OPTIMIZER, **spec: Any
) -> Iterator[Any]:
    """Start a Megatron trainer in a layout; `model`: further keys of the model table."""
    trainer: Any = PatchedRanks(MegatronOnCpu, layout.options, layout.ranks)
    trainer.facts = trainer.start(TrainerSpec({"path": str(path), **(model or {})}, ALGORITHM, optimizer, **spec))
    try:
        yield trainer
    finally:
        trainer.stop()


def steps(trainer: Any, start: int, stop: int, budget: int = 0) -> list[tuple[float, float]]:
    """Train steps; return (loss, gradient norm) of each. `budget`: tokens of a micro-batch."""
    results = [train(trainer, step, budget=budget) for step in range(start, stop)]
    return [(result.metrics["train/loss"][0], result.grad_norm) for result in results]


@dataclass(frozen=True)
class Curve:
    scores: dict[str, np.ndarray]
    early: list[tuple[float, float]]
    late: list[tuple[float, float]]
    checkpoint: str


def curve(trainer: Any, path: Path, budget: int = 0) -> Curve:
    """Score rows, train in micro-batches of at most `budget` tokens, save on the way."""
    scores = {name: forward(trainer, make_rows(99), 0, (name,)).values for name in COLUMNS}
    early = steps(trainer, 0, SAVED, budget)
    trainer.save(str(path / "checkpoint"))
    return Curve(scores, early, steps(trainer, SAVED, STEPS, budget), str(path / "checkpoint"))


def assert_near(found: Curve, expected: Curve) -> None:
    for name in COLUMNS:
        assert np.allclose(found.scores[name], expected.scores[name], rtol=0, atol=5e-5), name
    assert np.allclose(found.early + found.late, expected.early + expected.late, rtol=2e-4, atol=1e-6)


def of_family(family: str, path: Path, key_value_heads: int = 1) -> str:
    """Save a small model of a dense family, with a head of its own."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family, vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=key_value_heads,
        intermediate_size=32, max_position_embeddings=128, initializer_range=0.3, tie_word_embeddings=False,
        pad_token_id=None, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return str(path)
