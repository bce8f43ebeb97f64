# SPDX-License-Identifier: Apache-2.0
"""The torch trainer on one rank or several, as tests start it, and its steps on the trainer suite's random rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from relax_plugin_torch.rank import Rank
from relax_plugin_torch.trainer import TorchTrainer
from torch import Tensor

from relax_core.api import Chosen, OptimizerSpec, RowBatch, TrainerSpec, UpdateResult, Version
from relax_core.learn.counts import count
from relax_core.testing.trainer import InMemory, Reinforce, chunk, make_rows
from relax_core.testing.trainer_ranks import RankedTrainer

ALGORITHM, TRANSPORT = Chosen("algorithm", "reinforce"), Chosen("weight-transport", "in-memory")


def make_trainer(algorithm: Any = Reinforce, transport: Any = None, **options: Any) -> Rank:
    """Make a trainer of one rank that builds this algorithm and this transport."""
    trainer, held = Rank(Rank.options_model()(**options)), transport or InMemory()
    trainer.build = lambda chosen: algorithm() if chosen.kind == "algorithm" else held
    return trainer


@contextmanager
def running(
    path: str | Path, ranks: int = 1, *, algorithm: Any = Reinforce, transport: Any = None, options: Any = None,
    model: Any = None, optimizer: OptimizerSpec = OptimizerSpec(1e-2), **spec: Any,
) -> Iterator[Any]:  # fmt: skip
    """Start a trainer over a model folder; stop it at the end. `facts` of the trainer are what its start returned.

    `options` are the trainer's, `model` further keys of the model table, `spec` further fields of the TrainerSpec.
    """
    options = dict(options or {})
    trainer: Any = make_trainer(algorithm, transport, **options)
    if ranks > 1:
        trainer = RankedTrainer(TorchTrainer, options, ranks)
    trainer.facts = trainer.start(TrainerSpec({"path": str(path), **(model or {})}, ALGORITHM, optimizer, **spec))
    try:
        yield trainer
    finally:
        trainer.stop()


def accumulate(
    trainer: Any, rows: RowBatch, *, cuts: Sequence[int] = (), budget: int = 0, nominal: Mapping[str, float] | None = None
) -> None:  # fmt: skip
    """Compute the gradient of rows in chunks that are cut at these places. `nominal`: counts that divide the loss at first."""
    trainer.begin_update(nominal or count(rows))
    for start, stop in pairwise([0, *cuts, len(rows)]):
        trainer.accumulate(chunk(trainer, rows.take(list(range(start, stop))), budget), stop == len(rows))


def train(trainer: Any, number: int = 0, rows: RowBatch | None = None, **how: Any) -> UpdateResult:
    """Train one update of step `number`, on random rows of that seed and version unless rows are given."""
    rows = make_rows(number, version=number) if rows is None else rows
    trainer.begin_step(Version("actor", 0, number))
    accumulate(trainer, rows, **how)
    return trainer.finish_update(count(rows))


def weights(trainer: Any) -> dict[str, Tensor]:
    """Copy a trainer's weights to the CPU, buffers and tied ones included."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in trainer._model.state_dict().items()}


def gradients(trainer: Any) -> dict[str, Tensor]:
    """Copy the gradients that a trainer holds to the CPU."""
    own = trainer._model.named_parameters()
    return {name: parameter.grad.to("cpu", copy=True) for name, parameter in own if parameter.grad is not None}


def assert_updated_alike(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    """Require the same weights after updates that sum in another order.

    Adam divides each element by the size of its own gradient; where that is nearly zero, rounding decides the sign. So
    of 1,000 elements of a tensor, one may differ.
    """
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        differ = np.abs(found[name] - value) > 2e-5
        assert differ.sum() <= 1 + value.size // 1000, f"{name}: {differ.sum()} of {value.size} elements differ"
