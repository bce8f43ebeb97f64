# SPDX-License-Identifier: Apache-2.0
"""Defaults: what each correction for lag and mismatch is worth, on the quickstart's task with the same number of samples.

Every trained token has exactly the lag of its row (`lockstep.py`), so that a result does not depend on the machine's speed.
A run is a cell; with `--out` each cell is written to `cells.jsonl` as soon as it is measured, and is not measured again. The
seeds come one after another, so a command that is stopped early leaves complete comparisons of fewer seeds.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks import report
from tests.benchmarks.runs import HERE, built, trained

STEPS, GROUPS = 200, 16
SEEDS = (0, 1, 2, 3, 4)
RUN_S = 7200.0
ENDS = 0.1
"""Share of the steps at the end of a run whose mean reward counts."""
GRPO: Mapping[str, Sequence[str]] = {
    "behaviour": (),
    "none": ("correction=none",),
    "truncate": ("correction=truncate",),
    "truncate, sequence": ("correction=truncate", "correction_level=sequence"),
    "mask": ("correction=mask", "correction_floor=0.5", "correction_cap=5"),
    "mask, sequence": ("correction=mask", "correction_level=sequence", "correction_floor=0.5"),
    "reject, geometric": (
        "correction=reject",
        "correction_level=geometric",
        "correction_floor=0.8",
        "correction_cap=1.25",
    ),
    "behaviour, no dual clip": ("dual_clip=0",),
    "truncate, no dual clip": ("correction=truncate", "dual_clip=0"),
}
"""Corrections of tokens' ratios, the default first. `mask` is IcePop, `mask, sequence` is MIS."""
GSPO: Mapping[str, Sequence[str]] = {
    "truncate, geometric": (),
    "behaviour": ("correction=behaviour",),
    "none": ("correction=none",),
}
"""Corrections of sequences' ratios, the default first."""
CORRECTIONS = {"grpo": GRPO, "gspo": GSPO}


@dataclass(frozen=True)
class Setting:
    """The settings of a row of the table."""

    question: str
    algorithm: str
    correction: str
    staleness: int
    updates: int = 1
    engine: str = "float32"

    @property
    def condition(self) -> tuple[str, int, int, str]:
        """In what rows are alike whose corrections are compared."""
        return self.algorithm, self.staleness, self.updates, self.engine

    def words(self, seed: int, steps: int) -> list[str]:
        """Return the settings of a run."""
        lockstep = f'trainer={{name="lockstep", groups_per_step={GROUPS}, steps={steps}, lag={self.staleness}}}'
        of_algorithm = (f"algorithm.{word}" for word in CORRECTIONS[self.algorithm][self.correction])
        return [
            f"algorithm={self.algorithm}", *of_algorithm, f"batch.updates_per_step={self.updates}",
            f"rollout.dtype={self.engine}", "placement=hybrid", f"max_staleness={self.staleness}", "batch.stream=false",
            f"seed={seed}", f"steps={steps}", f"rollout.groups_per_step={GROUPS}", "checkpoint.every=0",
            f"eval.every={steps}", "eval.at_start=false", "eval.samples=2", lockstep, 'filters=["sampled"]',
            f'plugins=["{HERE / "lockstep.py"}"]',
        ]  # fmt: skip

    def key(self, seed: int, steps: int) -> str:
        """Return what a cell is known by: all settings, without the place of this repository."""
        return " ".join(self.words(seed, steps)[:-1])


def design() -> Iterator[Setting]:
    """Yield the rows of each question; a row with the default comes first of its condition."""
    yield Setting("lag", "grpo", "behaviour", 0)
    for staleness in (4, 2, 1):  # the largest differences first
        dual = ("behaviour, no dual clip",)
        for correction in GRPO:
            if "no dual clip" not in correction or (staleness == 4 and correction in dual):
                yield Setting("lag", "grpo", correction, staleness)
    for updates in (2, 4):
        yield Setting("updates", "grpo", "behaviour", 0, updates)
        for correction in ("behaviour", "none", "truncate", "mask", "behaviour, no dual clip"):
            yield Setting("updates", "grpo", correction, 1, updates)
    for correction in ("behaviour", "truncate", "mask", "behaviour, no dual clip", "truncate, no dual clip"):
        yield Setting("updates", "grpo", correction, 4, 4)
    for staleness, engine in ((0, "bfloat16"), (1, "bfloat16")):
        for correction in ("behaviour", "none", "truncate", "mask"):
            yield Setting("engine", "grpo", correction, staleness, engine=engine)
    for staleness, engine in ((0, "float32"), (1, "float32"), (0, "bfloat16"), (1, "bfloat16")):
        for correction in GSPO:
            if (staleness, engine) != (0, "float32") or correction == "truncate, geometric":
                yield Setting("engine", "gspo", correction, staleness, engine=engine)


QUESTIONS = tuple(dict.fromkeys(setting.question for setting in design()))


def measured(recipe: Path, setting: Setting, seed: int, steps: int) -> dict[str, Any]:
    """Run one cell; raise RuntimeError if a step trained another lag than the setting names."""
    records, summary = trained(recipe, setting.words(seed, steps), RUN_S, "inline")
    rows = [record for record in records if "lag/mean" in record]
    for row in rows:
        lag = min(row["step"] - 1, setting.staleness)  # the first steps train what the first weights sampled
        if (row["lag/mean"], row["lag/max"]) != (lag, lag):
            raise RuntimeError(f"step {row['step']}: lag {row['lag/mean']:.3f}, largest {row['lag/max']}; want {lag}")
    if len(rows) != steps or not summary["balanced"]:
        raise RuntimeError(f"{len(rows)} of {steps} steps have a lag; samples balanced: {summary['balanced']}")
    last = rows[-max(1, round(steps * ENDS)) :]
    return {
        "held_out": summary["eval_last"]["mean"],
        "reward": statistics.fmean(row["reward/mean"] for row in last),
        "samples": summary["samples_trained"],
        "clipped": mean(rows, "policy/clip_fraction"),
        "weighed_out": mean(rows, "policy/importance_clipped"),
        "kl": mean(rows, "train/rollout_kl"),
        "grad_norm": max(row["train/grad_norm"] for row in rows),
    }


def mean(rows: Sequence[Mapping[str, float]], key: str) -> float | None:
    """Return the mean over the steps that have the metric; None without one."""
    values = [row[key] for row in rows if key in row]
    return statistics.fmean(values) if values else None


def table(cells: Mapping[str, Mapping[str, Any]], settings: Sequence[Setting], steps: int) -> list[report.Row]:
    """Return the rows that have cells; differences are to the default of the same condition, seed by seed."""
    defaults: dict[tuple[str, int, int, str], Setting] = {}
    rows: list[report.Row] = []
    for setting in settings:
        default = defaults.setdefault(setting.condition, setting)
        runs = {seed: cell for seed in SEEDS if (cell := cells.get(setting.key(seed, steps)))}
        if not runs:
            continue
        pairs = [
            (cell["held_out"], cells[default.key(seed, steps)]["held_out"])
            for seed, cell in runs.items()
            if setting != default and default.key(seed, steps) in cells
        ]
        rows.append(
            {
                "question": setting.question, "algorithm": setting.algorithm, "correction": setting.correction,
                "staleness": setting.staleness, "updates": setting.updates, "engine": setting.engine,
                "held-out": " ".join(f"{cell['held_out']:.3f}" for cell in runs.values()),
                "mean": statistics.fmean(cell["held_out"] for cell in runs.values()),
                **compared(pairs),
                "reward": statistics.fmean(cell["reward"] for cell in runs.values()),
                "clipped": mean(list(runs.values()), "clipped"),
                "weighed out": mean([cell for cell in runs.values() if cell["weighed_out"] is not None], "weighed_out"),
                "kl": mean(list(runs.values()), "kl"),
            }
        )  # fmt: skip
    return rows


def compared(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the mean difference to the default, its standard error over seeds, and how many seeds are ahead."""
    gains = [own - default for own, default in pairs]
    error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else None
    return {
        "to default": statistics.fmean(gains) if gains else None,
        "error": error,
        "ahead": f"{sum(gain > 0 for gain in gains)} of {len(gains)}" if gains else "",
    }


class Cells:
    """The measured cells by their settings, in a file of lines if a folder is given. Safe from any thread."""

    def __init__(self, folder: Path | None) -> None:
        self._file = folder / "cells.jsonl" if folder else None
        self._lock = threading.Lock()
        self.values: dict[str, Mapping[str, Any]] = {}
        if self._file and self._file.is_file():
            lines = self._file.read_text(encoding="utf-8").splitlines(keepends=True)
            for line in lines:
                if line.endswith("\n"):  # a line without its end was being written as the command was stopped
                    cell = json.loads(line)
                    self.values[cell["key"]] = cell
            if lines and not lines[-1].endswith("\n"):
                self._file.write_text("".join(lines[:-1]), encoding="utf-8")

    def add(self, key: str, cell: Mapping[str, Any]) -> None:
        """Keep a cell."""
        with self._lock:
            self.values[key] = cell
            if self._file:
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, **cell}) + "\n")


def recipe(folder: Path, seed: int) -> Path:
    """Return the recipe of a seed, which is built unless an earlier command has built it."""
    place = folder / f"seed-{seed}"
    if not place.is_dir():
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            built(Path(unfinished) / "built", seed)
            (Path(unfinished) / "built").rename(place)
    return place / "recipe.toml"


def main() -> None:
    arguments = report.parser(__doc__ or "")
    arguments.set_defaults(anyway=True)  # no figure here depends on the machine's speed
    arguments.add_argument("--questions", nargs="+", choices=QUESTIONS, default=QUESTIONS)
    arguments.add_argument("--steps", type=int, default=STEPS)
    arguments.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), choices=SEEDS)
    arguments.add_argument("--jobs", type=int, default=1, help="runs at a time; each takes one processor")
    arguments.add_argument("--cells", type=int, help="most cells to measure now; 0: only write the table")
    options = arguments.parse_args()
    set_up = report.begin(options)
    os.environ["OMP_NUM_THREADS"] = "1"
    settings = list(design())
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as temporary:
        folder = options.out or Path(temporary)
        (folder / "recipes").mkdir(parents=True, exist_ok=True)
        cells = Cells(options.out)
        wanted = [
            (seed, setting) for seed in options.seeds for setting in settings if setting.question in options.questions
        ]
        missing = [(seed, setting) for seed, setting in wanted if setting.key(seed, options.steps) not in cells.values]
        failed: list[str] = []
        building = threading.Lock()

        def measure(seed: int, setting: Setting) -> None:
            with building:
                made = recipe(folder / "recipes", seed)
            report.say(f"{len(cells.values)} cells; {setting}, seed {seed}")
            try:
                found = measured(made, setting, seed, options.steps)
            except RuntimeError as error:
                failed.append(f"{setting}, seed {seed}: {error}")
            else:
                cells.add(setting.key(seed, options.steps), found)

        with ThreadPoolExecutor(options.jobs) as pool:
            started = [pool.submit(measure, seed, setting) for seed, setting in missing[: options.cells]]
            for future in started:
                future.result()
    report.finish("defaults", set_up, table(cells.values, settings, options.steps), options)
    for line in failed:
        report.say(line)
    sys.exit(1 if failed else 0)
