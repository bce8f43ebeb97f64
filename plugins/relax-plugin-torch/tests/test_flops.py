# SPDX-License-Identifier: Apache-2.0
"""The counted work of updates and forward passes, against torch's own counter of the operations that run."""

import numpy as np
import pytest
import torch
from relax_plugin_torch.flops import listed_peak
from torch.utils.flop_counter import FlopCounterMode

from relax_core.api import Ragged, RowBatch, RowId, Version
from relax_core.learn.counts import count
from relax_core.testing.moe import tiny_moe
from relax_core.testing.trainer import chunk
from tests.trainers import accumulate

LENGTH, ROWS, PROMPT = 25, 8, 9
PLAIN = {"attention": "eager", "share_prefixes": False}
"""Options under which torch's counter sees all operations: it does not know `sdpa` on a CPU."""


def equal_rows():
    """Two groups of rows of one length; all tokens after the prompt are trained."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 32, (ROWS, LENGTH)).astype(np.int32)
    tokens[:4, :PROMPT], tokens[4:, :PROMPT] = tokens[0, :PROMPT], tokens[4, :PROMPT]
    mask = np.zeros((ROWS, LENGTH), np.uint8)
    mask[:, PROMPT:] = 1
    lengths = np.full(ROWS, LENGTH, np.int64)
    columns = {
        "tokens": tokens, "loss_mask": mask, "advantages": random.normal(size=mask.shape).astype(np.float32),
        "weight_versions": np.where(mask == 1, 0, -1).astype(np.int32),
    }  # fmt: skip
    ids = tuple(RowId(index // 4, index % 4, 0, 0) for index in range(ROWS))
    return RowBatch(ids, {name: Ragged(values.reshape(-1), lengths) for name, values in columns.items()})


def updated(trainer, rows):
    """Train one update; return the work that the trainer counted, and the operations that torch counted."""
    trainer.begin_step(Version("actor", 0, 0))
    experts = {torch.ops.aten._grouped_mm: lambda a, b, *_, **__: 2 * a[0] * a[1] * b[-1]}
    with FlopCounterMode(display=False, custom_mapping=experts) as counter:
        accumulate(trainer, rows)
        trainer.finish_update(count(rows))
    return trainer.work(), counter.get_total_flops()


@pytest.mark.parametrize("model", [
    {}, {"lora": {"rank": 4, "alpha": 8.0}}, {"freeze": ["embed_tokens", "layers.0"]}, {"freeze": ["mlp"]},
], ids=["whole", "lora", "frozen-bottom", "frozen-mlp"])  # fmt: skip
def test_an_update_counts_the_operations_that_run(folder, start, model):
    work, counted = updated(start(folder, options=PLAIN, model=model), equal_rows())
    assert work.flops == pytest.approx(counted, rel=0.03)
    assert (work.forward_flops, work.padding, work.tokens) == (0, 0, ROWS * (LENGTH - 1))


def test_a_token_counts_only_the_experts_that_it_visits(tmp_path, start):
    work, counted = updated(start(tiny_moe(str(tmp_path), 1), options=PLAIN), equal_rows())
    assert work.flops == pytest.approx(counted, rel=0.03)


def test_forward_passes_are_counted_apart_and_only_in_the_step(folder, start):
    trainer, rows = start(folder, options=PLAIN), equal_rows()
    trainer.forward(chunk(trainer, rows), ("log_probs",))  # an evaluation between steps
    trainer.begin_step(Version("actor", 0, 0))
    with FlopCounterMode(display=False) as counter:
        trainer.forward(chunk(trainer, rows), ("log_probs",))
    work = trainer.work()
    assert work.flops == 0 and work.forward_flops == pytest.approx(counter.get_total_flops(), rel=0.03)
    assert trainer.work().forward_flops == 0


def test_the_peak_is_an_option_or_unknown(folder, start):
    assert start(folder, options={"peak_tflops": 2.5}).work().peak_flops_per_s == 2.5e12
    assert start(folder).work().peak_flops_per_s == 0


@pytest.mark.parametrize("name, tflops", [
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA L40S", 362),
    ("NVIDIA GeForce GTX 1080", 0),
])  # fmt: skip
def test_the_peak_of_a_gpu_is_found_by_its_name(name, tflops):
    assert listed_peak(name) == tflops * 1e12
