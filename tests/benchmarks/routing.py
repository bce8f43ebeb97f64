# SPDX-License-Identifier: Apache-2.0
"""Routing replay: processor time that replay adds to a training step, and the bytes that routed experts add to a sample.

Two trainers of the same weights train the same rows in turns, one with routed experts and one without, in pairs whose order
is drawn; what is reported is the mean of the pairs' ratios with its 95 % interval. One thread, processor time.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from relax_plugin_torch.rank import Rank

from relax_core.api import Chosen, Chunk, OptimizerSpec, Ragged, RowBatch, TrainerSpec, Version
from relax_core.learn.counts import count
from tests.benchmarks import report, trainer
from tests.benchmarks.trainer import built, clocks

WARM = 3
"""Steps of each before the first pair."""
ENOUGH = 1.96


@dataclass(frozen=True)
class Mixture:
    """A Qwen3-MoE with random weights, and rows as `trainer.Size` has them."""

    layers: int
    experts: int
    top_k: int
    size: trainer.Size


MIXTURES = {
    "16 experts, 2 a token, 4 layers": Mixture(4, 16, 2, trainer.Size(128, 256, 4, 4, 2000, 8, 4, 32, 32)),
    "64 experts, 8 a token, 6 layers": Mixture(6, 64, 8, trainer.Size(128, 256, 6, 4, 2000, 8, 4, 32, 32)),
    "16 experts, 2 a token, rows of 512": Mixture(4, 16, 2, trainer.Size(256, 512, 4, 4, 4000, 2, 4, 128, 384)),
}


def build(mixture: Mixture, folder: Path) -> None:
    """A model folder."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    size = mixture.size
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=size.vocab, hidden_size=size.hidden, num_hidden_layers=mixture.layers, num_attention_heads=size.heads,
        num_key_value_heads=size.heads, head_dim=size.hidden // size.heads, num_experts=mixture.experts,
        num_experts_per_tok=mixture.top_k, moe_intermediate_size=size.inner, norm_topk_prob=True,
        max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def started(folder: str, replay: str, size: trainer.Size) -> Rank:
    made = Rank(Rank.options_model()())
    made.build = built
    model = {"path": folder, "dtype": size.dtype, "routing_replay": replay}
    made.start(
        TrainerSpec(model, Chosen("algorithm", "reinforce"), OptimizerSpec(1e-5), tokens_per_micro_batch=size.budget)
    )
    return made


def step(of: Rank, rows: RowBatch, size: trainer.Size, number: int) -> float:
    """Processor seconds."""
    begun = clocks()
    of.begin_step(Version("actor", 0, number))
    of.begin_update(count(rows))
    of.accumulate(Chunk(rows, of.plan([size.length] * size.rows, 1, size.budget)), True)
    of.finish_update(count(rows))
    return float((clocks() - begun)[0])


def with_experts(of: Rank, rows: RowBatch, size: trainer.Size) -> RowBatch:
    """As a rollout of the same weights gives them: all but a row's last token."""
    chunk = Chunk(rows, of.plan([size.length] * size.rows, 1, size.budget))
    experts = of.forward(chunk, ("routed_experts",)).columns["routed_experts"]
    valid = np.ones((size.rows, size.length), np.uint8)
    valid[:, -1] = 0
    return rows.with_columns({"routed_experts": experts, "routed_valid": Ragged(valid.reshape(-1), experts.lengths)})


def pairs(mixture: Mixture, folder: str, repeats: int) -> Iterator[tuple[float, float]]:
    """(with, without) of each pair, after some steps of both."""
    size, order = mixture.size, random.Random(0)
    trainers = {replay: started(folder, replay, size) for replay in ("rollout", "off")}
    try:
        plain = [trainer.rows_of(size, number) for number in range(WARM + repeats)]
        rows = {"off": plain, "rollout": [with_experts(trainers["rollout"], one, size) for one in plain]}
        for number in range(WARM + repeats):
            turns = order.sample(sorted(trainers), 2)
            took = {replay: step(trainers[replay], rows[replay][number], size, number) for replay in turns}
            if number >= WARM:
                yield took["rollout"], took["off"]
    finally:
        for one in trainers.values():
            one.stop()


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Mean with the ends of its 95 % interval."""
    mean = statistics.mean(ratios)
    half = ENOUGH * statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
    return mean, mean - half, mean + half


def measure(name: str, mixture: Mixture, repeats: int) -> report.Row:
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as folder:
        build(mixture, Path(folder))
        taken = list(pairs(mixture, folder, repeats))
    low = {"mean": 0.0, "from": 0.0, "to": 0.0}
    low.update(zip(low, interval([100 * (own / without - 1) for own, without in taken]), strict=True))
    size = mixture.size
    own = size.length * (mixture.layers * mixture.top_k + 1)
    return {
        "model": name,
        "step without, CPU s": statistics.median(without for _, without in taken),
        "step with, CPU s": statistics.median(own for own, _ in taken),
        "added %": low["mean"],
        "95 % from": low["from"],
        "to": low["to"],
        "pairs": len(taken),
        "tokens a sample": size.length,
        "bytes a sample, routed experts": own,
        "bytes a sample, else": size.length * (4 + 1 + 4 + 4 + 4),
    }


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.set_defaults(repeats=40)
    parser.add_argument("--only", choices=sorted(MIXTURES), action="append")
    options: argparse.Namespace = parser.parse_args()
    set_up: dict[str, Any] = report.begin(options)
    rows = [measure(name, MIXTURES[name], options.repeats) for name in options.only or MIXTURES]
    report.finish("routing", set_up, rows, options)
