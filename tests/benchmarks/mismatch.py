# SPDX-License-Identifier: Apache-2.0
"""Mismatch of engine and trainer: what float16 gains on bfloat16, and what replaying the engine's experts gains.

Models are fixed in `mismatch_models`; all of them, all seeds and every pair of formats are reported. The measuring is that
of `relax bench mismatch`, with engine and trainer in this process. With `--out`, what is there already stays, so that one
that was broken off goes on.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from tests.benchmarks import report
from tests.benchmarks.mismatch_models import SHAPES, Shape, build

SAMPLES = 64
CLAIMS = {
    "configuration": "claimed of Qwen3-30B-A3B (replay) and Qwen3-4B (fp16)",
    "cut of the mean": "38 %", "bf16 / fp16, both": "7.7",
}  # fmt: skip
Cell = Mapping[str, Any]


def measured(name: str, shape: Shape, seed: int) -> list[Cell]:
    """Every pair of formats of one model."""
    from relax_plugin_workbench.bench import mismatch_document
    from relax_plugin_workbench.mismatch import FORMATS, mismatch

    report.say(f"{name}, seed {seed}")
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as folder:
        source = build(Path(folder), shape, seed)
        found = asyncio.run(mismatch([source], ["run.runner=inline"], SAMPLES, FORMATS))
    cells = [{"configuration": name, "seed": seed, **mismatch_document(one)} for one in found]
    return [{key: value for key, value in cell.items() if key != "positions"} for cell in cells]


def row(name: str, cells: Sequence[Cell]) -> report.Row:
    """What the seeds of one configuration say, each by itself, in the order of seeds."""
    return {
        "configuration": name,
        "seeds": " ".join(str(seed) for seed in sorted({cell["seed"] for cell in cells})),
        "rerouted, bf16": _each(cells, lambda of: of("float32", "bfloat16").get("rerouted"), "{:.1%}"),
        "mean, bf16": _each(cells, lambda of: of("float32", "bfloat16")["mean"], "{:.2e}"),
        "with replay": _each(cells, lambda of: of("float32", "bfloat16", True).get("mean"), "{:.2e}"),
        **{
            f"cut of the {label}": _each(cells, lambda of, key=key: _cut(of, key), "{:.0%}", average=True)
            for key, label in (("mean", "mean"), ("p99", "p99"), ("max", "max"), ("k3_kl", "KL"))
        },
        "bf16 / fp16": _each(cells, lambda of: _ratio(of, "float32", "float32"), "{:.1f}", average=True),
        "bf16 / fp16, both": _each(cells, lambda of: _ratio(of, "bfloat16", "float16"), "{:.1f}", average=True),
        "fp32": _each(cells, lambda of: of("float32", "float32")["mean"], "{:.0e}"),
    }


def _cut(of: Any, key: str) -> float | None:
    """Of a bf16 engine under a float32 trainer."""
    replayed = of("float32", "bfloat16", True).get(key)
    return None if replayed is None else 1 - replayed / of("float32", "bfloat16")[key]


def _ratio(of: Any, trainer_bf16: str, trainer_fp16: str) -> float:
    return float(of(trainer_bf16, "bfloat16")["mean"] / of(trainer_fp16, "float16")["mean"])


def _each(cells: Sequence[Cell], tell: Any, form: str, average: bool = False) -> str:
    """Of each seed, and their mean in front where it means something."""
    told = [
        value for seed in sorted({cell["seed"] for cell in cells}) if (value := tell(_finder(cells, seed))) is not None
    ]
    if not told:
        return ""
    each = " ".join(form.format(value) for value in told)
    return f"{form.format(mean(told))} ({each})" if average else each


def _finder(cells: Sequence[Cell], seed: int) -> Any:
    def of(trainer: str, engine: str, replay: bool = False) -> Cell:
        key = (seed, trainer, engine, replay)
        found = (cell for cell in cells if (cell["seed"], cell["trainer"], cell["engine"], cell["replay"]) == key)
        return next(found, {})

    return of


def rows(cells: Sequence[Cell]) -> Iterator[report.Row]:
    for name in SHAPES:
        own = [cell for cell in cells if cell["configuration"] == name]
        if own:
            yield row(name, own)
    yield CLAIMS


def main() -> None:
    arguments = report.parser(__doc__ or "")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = arguments.parse_args()
    set_up = report.begin(options)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cells = report.recorded("mismatch", options, "measured")
    known = {(cell["configuration"], cell["seed"]) for cell in cells}
    for seed in options.seeds:
        for name, shape in sorted(SHAPES.items(), key=lambda each: each[1].cost):
            cells += [] if (name, seed) in known else measured(name, shape, seed)
            if options.out is not None:  # what takes minutes is not lost with what comes after it
                report.finish("mismatch", {**set_up, "measured": cells}, list(rows(cells)), options)
    if options.out is None:
        report.finish("mismatch", {**set_up, "measured": cells}, list(rows(cells)), options)
