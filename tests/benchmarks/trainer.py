# SPDX-License-Identifier: Apache-2.0
"""The torch trainer: its step beside the arithmetic's floor and a plain loop, its peak memory beside the estimate, and
what a second rank brings.

The floor is the step's floating-point operations at the rate at which this machine multiplies matrices, measured between
the steps. The plain loop is transformers, `cross_entropy` and fused AdamW over the same padded micro-batches, in turns
with ours in one process. Steps are in processor time of one thread; several ranks are compared by the clock on the wall.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from relax_plugin_torch.rank import Rank
from relax_plugin_torch.trainer import TorchTrainer

from relax_core.api import Chosen, Chunk, OptimizerSpec, Ragged, RowBatch, RowId, TrainerSpec, Version, Workload
from relax_core.learn.counts import count
from tests.benchmarks import report
from tests.benchmarks.watched import Watched

ARENA = {"MALLOC_ARENA_MAX": "1"}
"""As workers have it."""
CHILD_S = 1800.0


@dataclass(frozen=True)
class Size:
    """A Qwen3 of this shape with random weights, and what it trains on in a step."""

    hidden: int
    inner: int
    layers: int
    heads: int
    vocab: int
    prompts: int
    group: int
    prompt: int
    new: int
    budget: int = 2048
    dtype: str = "float32"
    kv_heads: int = 0
    """0: as many as heads."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the trainer."""

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def length(self) -> int:
        return self.prompt + self.new


SIZES = {
    "1M": Size(128, 512, 4, 2, 2000, 8, 4, 32, 32),
    "8M": Size(256, 1024, 6, 4, 8000, 4, 4, 128, 128),
    "35M": Size(512, 1536, 8, 8, 16000, 2, 2, 128, 384, 1024),
    "1k": Size(64, 256, 2, 2, 2000, 1, 2, 128, 896, 1024),
    "4k": Size(64, 256, 2, 2, 2000, 1, 2, 512, 3584, 4096),
    "16k": Size(64, 256, 2, 2, 2000, 1, 2, 2048, 14336, 16384),
    "32k": Size(64, 256, 2, 2, 2000, 1, 2, 4096, 28672, 32768),
    "0.5B": Size(1024, 3072, 24, 16, 151936, 16, 8, 256, 768, 16384, "bfloat16"),
    "1.7B": Size(2048, 6144, 28, 16, 151936, 16, 8, 256, 768, 16384, "bfloat16"),
    "4B": Size(2560, 9728, 36, 32, 151936, 16, 8, 256, 768, 8192, "bfloat16"),
}
ON_CPU, ON_GPU = ("1M", "8M", "35M"), ("0.5B", "1.7B", "4B")
LONG = ("1k", "4k", "16k", "32k")
"""Rows of these lengths, one in a micro-batch, through a model of 0.26M parameters."""


def build(size: Size, folder: Path) -> None:
    """A model folder."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=size.inner, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.kv_heads or size.heads, head_dim=size.hidden // size.heads,
        max_position_embeddings=max(4096, size.length), tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def rows_of(size: Size, step: int) -> RowBatch:
    """As long as they may become, of groups that share a prompt."""
    made = np.random.default_rng(step)
    prompts = [made.integers(0, size.vocab, size.prompt) for _ in range(size.prompts)]
    tokens = [np.r_[prompts[i // size.group], made.integers(0, size.vocab, size.new)] for i in range(size.rows)]
    mask = np.r_[np.zeros(size.prompt, np.uint8), np.ones(size.new, np.uint8)]

    def filled(value: float, dtype: type) -> list[np.ndarray]:
        return [np.full(size.length, value, dtype) for _ in tokens]

    ids = tuple(RowId(i // size.group, i % size.group, 0, 0) for i in range(size.rows))
    return RowBatch(ids, {
        "tokens": Ragged.of([row.astype(np.int32) for row in tokens]), "loss_mask": Ragged.of([mask] * size.rows),
        "advantages": Ragged.of([np.full(size.length, made.normal(), np.float32) for _ in tokens]),
        "rollout_log_probs": Ragged.of(filled(-5.0, np.float32)), "weight_versions": Ragged.of(filled(step, np.int32)),
    })  # fmt: skip


def spec_of(size: Size, folder: str) -> TrainerSpec:
    optimizer = OptimizerSpec(1e-4, grad_clip=1.0)
    model = {"path": folder, "dtype": size.dtype}
    return TrainerSpec(model, Chosen("algorithm", "reinforce"), optimizer, tokens_per_micro_batch=size.budget)


def trainer_of(size: Size, ranks: int, share: bool) -> Any:
    from relax_core.testing.trainer_ranks import RankedTrainer

    if ranks > 1:
        return RankedTrainer(TorchTrainer, {"sharding": "none", "share_prefixes": share, **size.options}, ranks)
    trainer = Rank(Rank.options_model()(share_prefixes=share, **size.options))
    trainer.build = built
    return trainer


def built(chosen: Chosen) -> Any:
    from relax_core.testing.trainer import InMemory, Reinforce

    return Reinforce(chosen.options) if chosen.kind == "algorithm" else InMemory()


def clocks() -> np.ndarray:
    """This process's processor time, which other work on the machine does not lengthen; and that on the wall."""
    return np.array([time.process_time(), time.perf_counter()])


def step_of(trainer: Any, size: Size, step: int, ranks: int = 1) -> np.ndarray:
    """Seconds of a whole step by both clocks."""
    rows = rows_of(size, step)
    begun = clocks()
    trainer.begin_step(Version("actor", 0, step))
    trainer.begin_update(count(rows))
    chunk = Chunk(rows, trainer.plan([size.length] * size.rows, ranks, size.budget))
    if ranks > 1:
        trainer._all("accumulate", chunk, True)  # planned for all of them, as a shell does it
    else:
        trainer.accumulate(chunk, True)
    trainer.finish_update(count(rows))
    return clocks() - begun


def plain_step(size: Size, folder: str) -> Callable[[int], np.ndarray]:
    """The loop that a person would write."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    each = max(1, size.budget // size.length)

    def step(number: int) -> np.ndarray:
        rows = rows_of(size, number)
        tokens = np.stack(list(rows.columns["tokens"].rows())).astype(np.int64)
        weights = np.stack(list(rows.columns["advantages"].rows()))[:, size.prompt :]
        begun = clocks()
        for at in range(0, size.rows, each):
            ids = torch.from_numpy(tokens[at : at + each]).to(device)
            credit = torch.from_numpy(weights[at : at + each]).to(device)
            with torch.autocast(device, dtype=torch.bfloat16, enabled=size.dtype == "bfloat16"):
                logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=size.new).logits
            target = ids[:, size.prompt :].reshape(-1)
            loss = torch.nn.functional.cross_entropy(logits.float().reshape(-1, size.vocab), target, reduction="none")
            (loss * credit.reshape(-1)).sum().div(size.rows * size.new).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return clocks() - begun

    return step


# -- children: a process for each measurement ---------------------------------------------------------------------------


def measure_time(size: Size, folder: str, repeats: int, ranks: int) -> dict[str, float]:
    """Medians of steps: ours with and without shared prompts, plain ones, and the rate of matrix products between them."""
    import torch
    from relax_plugin_workbench.estimate import measured_rate

    torch.set_num_threads(1)
    alone, shared, plain = trainer_of(size, 1, False), trainer_of(size, 1, True), plain_step(size, folder)
    both = trainer_of(size, ranks, False)
    for trainer in (alone, shared, both):
        trainer.start(spec_of(size, folder))
    own, wall = (1, 1) if torch.cuda.is_available() else (0, 1)  # a processor only waits for a GPU
    found: dict[str, list[float]] = {name: [] for name in ("rate", "ours", "plain", "shared", "wall", "ranks")}
    for step in range(repeats + 1):
        found["rate"].append(measured_rate(1, lambda: float(clocks()[own]), size.dtype))
        ours = step_of(alone, size, step)
        found["ours"].append(ours[own])
        found["wall"].append(ours[wall])
        found["plain"].append(plain(step)[own])
        found["shared"].append(step_of(shared, size, step)[own])
        found["ranks"].append(step_of(both, size, step, ranks)[wall])
        report.say(f"step {step} of {repeats}: { ({name: round(values[-1], 3) for name, values in found.items()}) }")
    for trainer in (alone, shared, both):
        trainer.stop()
    return {name: float(sorted(values[1:])[len(values[1:]) // 2]) for name, values in found.items()}


def measure_memory(size: Size, folder: str, steps: int) -> dict[str, float]:
    """Bytes at the peak of a step, once the optimizer has its moments: of tensors, and of resident pages beyond those that the
    process had once its libraries were loaded and had multiplied something."""
    import torch
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    torch.set_num_threads(1)
    one = torch.rand(256, 256)
    float((one @ one).sum())
    options = TorchTrainer.options_model()(share_prefixes=False, **size.options)
    trainer, base, peaks = Watched(options), _memory("VmRSS"), []
    trainer.build, trainer.watches = built, False
    trainer.start(spec_of(size, folder))
    on_gpu = torch.cuda.is_available()
    for step in range(steps):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        Path("/proc/self/clear_refs").write_text("5")
        step_of(trainer, size, step)
        peaks.append(torch.cuda.max_memory_allocated() if on_gpu else _memory("VmHWM") - base)
    trainer.watches = True
    step_of(trainer, size, steps)
    tensors = trainer.peak_bytes()
    trainer.stop()
    return {"resident": max(peaks[1:]), "tensors": peaks[-1] if on_gpu else tensors}


def estimate(size: Size, folder: str) -> dict[str, float]:
    work = Workload(size.prompts, size.group, size.prompt, size.new)
    told = trainer_of(size, 1, False).estimate(spec_of(size, folder), work)
    return {
        "resident": sum(told.phases["train"].values()), "tensors": told.tensors("train"), "flops": told.flops["train"],
    }  # fmt: skip


def _memory(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10


CHILDREN: dict[str, Callable[..., dict[str, float]]] = {
    "time": measure_time, "memory": measure_memory, "estimate": estimate,
}  # fmt: skip


def asked(what: str, size: Size, *arguments: Any, env: dict[str, str] | None = None) -> dict[str, float]:
    """One measurement, of a process of its own."""
    given = json.dumps([what, asdict(size), *arguments])
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(env or {})}
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.trainer", given], env=environ, stdout=subprocess.PIPE, text=True,
        timeout=CHILD_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{what} of {size} failed: what it said stands above")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measured(name: str, options: argparse.Namespace) -> report.Row:
    size = replace(SIZES[name], options=dict(map(_option, options.option)))
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as directory:
        folder = f"{directory}/model"
        build(size, Path(folder))
        report.say(f"{name}: estimate and peak")
        told = asked("estimate", size, folder)
        peak = asked("memory", size, folder, 3, env=ARENA)
        row: dict[str, Any] = {"model": name, **size.options, "rows": size.rows, "tokens a row": size.length}
        for kind in ("tensors", "resident"):
            row |= {
                f"{kind}: estimate MiB": told[kind] / 2**20, f"{kind}: peak MiB": peak[kind] / 2**20,
                f"{kind}: peak / estimate": peak[kind] / told[kind],
            }  # fmt: skip
        if options.memory_only:
            return row
        report.say(f"{name}: steps")
        time_of = asked("time", size, folder, options.repeats, options.ranks)
        floor = told["flops"] / time_of["rate"]
        return row | {
            "GFLOP/s": time_of["rate"] / 1e9, "floor s": floor, "step s": time_of["ours"],
            "step / floor": time_of["ours"] / floor,
            "plain loop s": time_of["plain"], "step / plain": time_of["ours"] / time_of["plain"],
            "shared prompts s": time_of["shared"],
            "wall s": time_of["wall"], f"{options.ranks} ranks, wall s": time_of["ranks"],
            "speed-up": time_of["wall"] / time_of["ranks"],
        }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument(
        "--models", nargs="+", choices=tuple(SIZES), default=ON_CPU, help=f"{LONG} are long rows, {ON_GPU} want a GPU"
    )
    parser.add_argument(
        "--option", nargs="*", default=(), metavar="KEY=VALUE", help="options of the trainer, values in JSON"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes of the last measurement")
    parser.add_argument("--memory-only", action="store_true", help="no times: these may be measured on a busy machine")
    parser.set_defaults(repeats=2)
    options = parser.parse_args(arguments)
    set_up = report.begin(options)
    report.finish("trainer", {**set_up, "malloc": ARENA}, [measured(name, options) for name in options.models], options)


def _option(given: str) -> tuple[str, Any]:
    key, _, value = given.partition("=")
    return key, json.loads(value)


def child(given: str) -> None:
    what, size, *arguments = json.loads(given)
    print(json.dumps(CHILDREN[what](Size(**size), *arguments)))


if __name__ == "__main__":
    child(sys.argv[1])
