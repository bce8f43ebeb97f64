# SPDX-License-Identifier: Apache-2.0
"""The race with TRL: samples a second and time to a held-out reward, on the same model folder, tasks, batch and machine.

TRL runs in an interpreter of its own (`--trl-python`, with trl, datasets and, for `--lora`, peft) through `trl_peer.py`.
Relax runs the recipe through the CLI, in every combination of runner, staleness and row skipping. Learning rate, schedule,
optimizer, loss and lengths are the recipe's for both. Steps in which an evaluation ran count as their neighbours' median.
`--size 10m` races a larger model that is warmed up on the same tasks, `--size 135m` the recipe `smollm`; `--dtypes bfloat16`
has bf16 products on both sides, and `--lora RANK` trains adapters. Relax's processes have the recipe's numbers of threads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_core.config.run_config import RunConfig
from relax_core.control.prepare import plan_run
from tests.benchmarks import report
from tests.benchmarks.runs import HERE, built, command, records
from tests.benchmarks.usage import Watched

RUN_S = 3600.0
RECIPES = {"200k": "quickstart", "10m": "quickstart", "135m": "smollm"}
SHAPES = {"10m": "384,6,6,3,64,1024"}
REWARDS = {"exact": "exact", "maths": "number"}
"""Reward of a recipe -> the rule in `trl_peer.py` that gives its answers the same rewards."""


@dataclass(slots=True)
class Raced:
    """One run: when each step ended, and the held-out share at some of them."""

    name: str
    ended: dict[int, float]
    evals: list[tuple[int, float]]
    cpu_s: float = 0.0
    """Processor seconds a step, over all of its processes."""
    others: float = 0.0
    """Cores that something else kept busy meanwhile."""
    rewards: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    """Most memory of all its processes together."""
    uncounted: int = 5
    """First steps that count for nothing: caches fill, threads start."""

    def durations(self) -> dict[int, float]:
        """Seconds of each step; one with an evaluation in it takes as long as those around it."""
        steps = sorted(self.ended)
        spent = {b: self.ended[b] - self.ended[a] for a, b in itertools.pairwise(steps)}
        evaluated = {at + after for at, _ in self.evals for after in (0, 1, 2)}
        plain = {step: spent[step] for step in spent if step not in evaluated}
        return {
            step: plain[step]
            if step in plain
            else statistics.median([plain[near] for near in sorted(plain, key=lambda near: abs(near - step))[:10]])
            for step in spent
        }

    @property
    def step_s(self) -> float:
        durations = self.durations()
        return statistics.mean(durations[step] for step in durations if step > self.uncounted)

    def reached(self, share: float) -> int | None:
        """The step at which the held-out share first passes this, between two evaluations by a straight line."""
        for (before, low), (after, high) in itertools.pairwise(sorted(self.evals)):
            if low < share <= high:
                return round(before + (after - before) * (share - low) / (high - low))
        return None

    def seconds_to(self, share: float) -> float | None:
        step, durations = self.reached(share), self.durations()
        if step is None:
            return None
        return self.step_s + sum(seconds for at, seconds in durations.items() if at <= step)


def peer_settings(config: RunConfig, seed: int) -> dict[str, Any]:
    """Return what the recipe says in TRL's words: on-policy, one update per step, no KL, and dapo's mean over tokens."""
    rollout, optimizer = config.rollout, config.optimizer
    return {
        "max_steps": config.steps, "learning_rate": optimizer.lr, "lr_scheduler_type": optimizer.schedule,
        "warmup_steps": optimizer.warmup_steps, "weight_decay": optimizer.weight_decay, "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1], "max_grad_norm": optimizer.grad_clip,
        "per_device_train_batch_size": batch(config), "num_generations": rollout.group_size,
        "max_completion_length": rollout.max_new_tokens, "temperature": 1.0, "beta": 0.0, "epsilon": 0.2,
        "loss_type": "dapo", "scale_rewards": "group", "bf16": config.model.dtype == "bfloat16", "seed": seed,
    }  # fmt: skip


def batch(config: RunConfig) -> int:
    """Return the samples of a step."""
    return config.rollout.groups_per_step * config.rollout.group_size


def trl(folder: Path, options: argparse.Namespace, config: RunConfig, seed: int, threads: int) -> Raced:
    report.say(f"TRL, {threads} threads, {config.model.dtype}, seed {seed}")
    lora = config.model.lora
    adapters = ["--lora", json.dumps({"r": lora.rank, "lora_alpha": lora.alpha})] if lora else []
    words = [
        options.trl_python, "-I", str(HERE / "trl_peer.py"), str(folder), "--threads", str(threads),
        "--settings", json.dumps(peer_settings(config, seed)), "--reward", REWARDS[config.rewards[0].name],
        "--eval-every", str(options.eval_every), *adapters,
    ]  # fmt: skip
    watched = Watched(words, {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}, RUN_S)
    found = json.loads(watched.run().strip().splitlines()[-1])
    steps = {int(step["step"]): step for step in found["steps"]}
    ended = {at: step["elapsed_s"] for at, step in steps.items()}
    first, last = steps[min(options.uncounted, len(steps) - 1)], steps[max(steps)]
    cpu_s = (last["cpu_s"] - first["cpu_s"]) / (last["step"] - first["step"])
    evals = [(int(at), float(share)) for at, share in found["evals"]]
    rewards = [step["reward"] for step in steps.values() if "reward" in step]
    return Raced(
        f"TRL {found['trl']}, {threads} threads", ended, evals, cpu_s, _others(watched), rewards, watched.peak_bytes,
        options.uncounted,
    )  # fmt: skip


def relax(
    folder: Path,
    options: argparse.Namespace,
    common: Sequence[str],
    seed: int,
    runner: str,
    staleness: int,
    skips: bool,
) -> Raced:
    name = f"Relax {runner}, staleness {staleness}{'' if skips else ', every row'}"
    report.say(f"{name}, seed {seed}")
    algorithm = [] if skips else [f'plugins=["{HERE / "every_row.py"}"]', "algorithm.name=every-row"]
    placement = "async" if staleness else options.placement
    settings = [
        *common, f"seed={seed}", f"max_staleness={staleness}", *([f"placement={placement}"] if placement else []),
        f"eval.every={options.eval_every}", f"eval.at_start={'true' if options.eval_every else 'false'}",
        "checkpoint.every=0", *algorithm, *options.set,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as place:
        run = Path(place) / "run"
        watched = Watched(command(folder / "recipe.toml", run, settings, runner), dict(os.environ), RUN_S)
        watched.run()
        lines = records(run)
    steps = {line["step"]: line for line in lines if "time/step_s" in line}
    times = sorted((line["time"] for at, line in steps.items() if at > options.uncounted))
    own, others = watched.between(times[0], times[-1])
    evals = [(line["step"], line[key]) for line in lines for key in ("eval/held-out/mean",) if key in line]
    return Raced(
        name, {at: line["elapsed_s"] for at, line in steps.items()}, evals, own / max(1, len(times) - 1),
        others / max(1e-9, times[-1] - times[0]), [line["reward/mean"] for line in steps.values()], watched.peak_bytes,
        options.uncounted,
    )  # fmt: skip


def _others(watched: Watched) -> float:
    """While the peer ran, its import and evaluations included."""
    start, end = watched.span
    return watched.between(start, end)[1] / max(1e-9, end - start)


@dataclass(frozen=True, slots=True)
class Best:
    """TRL's best over its numbers of threads, means over seeds; NaN where it did not run."""

    step_s: float
    peak_bytes: float
    seconds_to_target: float | None

    @classmethod
    def of(cls, peers: Sequence[Sequence[Raced]], target: float) -> Best:
        nan = float("nan")
        times = [[at for one in peer if (at := one.seconds_to(target)) is not None] for peer in peers]
        return cls(
            min((statistics.mean(one.step_s for one in peer) for peer in peers), default=nan),
            min((statistics.mean(one.peak_bytes for one in peer) for peer in peers), default=nan),
            min(
                (statistics.mean(some) for some, peer in zip(times, peers, strict=True) if len(some) == len(peer)),
                default=None,
            ),
        )


def row(raced: Sequence[Raced], config: RunConfig, target: float, best: Best) -> report.Row:
    """A line of the table, means over seeds."""
    step_s = statistics.mean(one.step_s for one in raced)
    reached = [one.seconds_to(target) for one in raced]
    known = [seconds for seconds in reached if seconds is not None]
    to_target = statistics.mean(known) if len(known) == len(reached) and known else None
    peak_bytes = statistics.mean(one.peak_bytes for one in raced)
    return {
        "runner": raced[0].name, "dtype": config.model.dtype, "trained": "adapters" if config.model.lora else "all",
        "step s": step_s, "samples/s": batch(config) / step_s, "x TRL": best.step_s / step_s,
        "cpu s a step": statistics.mean(one.cpu_s for one in raced), "peak GB": peak_bytes / 1e9,
        "of TRL's peak": peak_bytes / best.peak_bytes,
        f"s to {target:.2f}": to_target,
        "x sooner": best.seconds_to_target / to_target if best.seconds_to_target and to_target else None,
        "step of it": " ".join(str(one.reached(target) or "-") for one in raced),
        "held-out at the end": " ".join(f"{one.evals[-1][1]:.3f}" for one in raced if one.evals),
        "reward of last 20": " ".join(f"{statistics.mean(one.rewards[-20:]):.3f}" for one in raced),
        "other cores": max(one.others for one in raced),
    }  # fmt: skip


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--trl-python", help="interpreter with trl and datasets; without it Relax is measured alone")
    parser.add_argument(
        "--recipes", nargs="+", type=Path, help="folders of built quickstarts, one a seed; else they are built"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--eval-every", type=int, default=20, help="0: speed alone")
    parser.add_argument("--target", type=float, default=0.80, help="held-out share that is raced to")
    parser.add_argument("--uncounted", type=int, default=5, help="first steps whose time does not count")
    parser.add_argument("--lr", type=float, help="else the recipe's")
    parser.add_argument(
        "--lora", type=int, metavar="RANK", help="train adapters of this rank, with an alpha of twice as much"
    )
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="of TRL")
    parser.add_argument("--runners", nargs="+", default=["local", "ray"])
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--skipping", nargs="+", choices=("on", "off"), default=["on", "off"])
    parser.add_argument("--placement", help="at staleness 0; else the recipe's")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    parser.add_argument("--size", choices=tuple(RECIPES), default="200k")
    parser.add_argument("--set", nargs="*", default=[], help="further settings of Relax, KEY=VALUE")
    options = parser.parse_args()
    set_up = report.begin(options)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as place:
        folders = options.recipes or [_built(Path(place) / str(s), s, options.size) for s in options.seeds]
        rows = [line for dtype in options.dtypes for line in _race(options, folders, dtype, set_up)]
    report.finish("trl", set_up, rows, options)


def _race(options: argparse.Namespace, folders: Sequence[Path], dtype: str, set_up: dict[str, Any]) -> list[report.Row]:
    seeds = list(zip(options.seeds, folders, strict=True))
    common = [f"steps={options.steps}", f"model.dtype={dtype}"]
    if options.lr is not None:
        common.append(f"optimizer.lr={options.lr}")
    if options.lora:
        common.append(f"model.lora={{rank={options.lora},alpha={2 * options.lora}.0}}")
    config = plan_run([folders[0] / "recipe.toml"], common).composed.config
    peers = [
        [trl(folder, options, config, seed, threads) for seed, folder in seeds]
        for threads in (options.threads if options.trl_python else ())
    ]
    own = [
        [relax(folder, options, common, seed, runner, staleness, skips == "on") for seed, folder in seeds]
        for runner, staleness, skips in itertools.product(options.runners, options.staleness, options.skipping)
    ]
    best = Best.of(peers, options.target)
    set_up.setdefault("curves", {}).update(
        {
            f"{some[0].name}, {dtype}": [{"held_out": one.evals, "reward": one.rewards} for one in some]
            for some in peers + own
        }
    )
    return [row(some, config, options.target, best) for some in peers + own]


def _built(folder: Path, seed: int, size: str) -> Path:
    """Build a recipe's tasks and model, or a larger one that is warmed up on the same tasks; return the folder."""
    if size not in SHAPES:
        return built(folder, seed, name=RECIPES[size]).parent
    report.say(f"building a model of {size} parameters and its data, seed {seed}")
    folder.mkdir(parents=True)
    shape = ["--seed", str(seed), "--shape", SHAPES[size]]
    subprocess.run([sys.executable, "-m", "tests.benchmarks.larger", str(folder), *shape], check=True, timeout=RUN_S)
    return folder
