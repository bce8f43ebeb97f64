# SPDX-License-Identifier: Apache-2.0
"""Megatron: held-out shares of recipes that train with megatron-core, beside the torch trainer, over three seeds.

Each seed's model and data are built once, and every layout trains from this folder. A difference is judged by its standard
error over the seeds. With `--out`, a finished run is written at once and not repeated, so the command may be stopped.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks import report
from tests.benchmarks.recipes import STANDARD
from tests.benchmarks.runs import built, trained

RUN_S = 3600.0
TORCH = "torch"
TWO = ("placement.actor.ranks=2",)
SPLIT = (*TWO, "trainer.tensor_parallel=2", "trainer.sequence_parallel=true")
SPREAD = (*TWO, "trainer.expert_parallel=2")
LAYOUTS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "quickstart": {TORCH: (), "one rank": (), "tensor and sequence parallel": SPLIT},
    "experts": {TORCH: (), "expert parallel": SPREAD},
    "colours": {TORCH: (), "tensor and sequence parallel": SPLIT},
    "tones": {TORCH: (), "expert parallel": SPREAD},
}
"""Settings of each layout by recipe; all but `torch` train with Megatron."""
Cell = Mapping[str, Any]


def measured(recipe: str, layout: str, seed: int, folder: Path, options: argparse.Namespace) -> Cell:
    """Train one layout; return its held-out shares before and after, and its seconds."""
    report.say(f"{recipe}, {layout}, seed {seed}")
    trainer = () if layout == TORCH else ("trainer=megatron", f"trainer.python={options.megatron_python.absolute()}")
    began = time.monotonic()
    records, summary = trained(
        folder, [f"seed={seed}", *trainer, *LAYOUTS[recipe][layout], *options.set], RUN_S, options.runner
    )
    seconds = time.monotonic() - began
    shares = [value for record in records for key, value in record.items() if STANDARD.fullmatch(key)]
    found = {"before": shares[0], "after": shares[-1], "s": seconds, "balanced": summary["balanced"]}
    return {"recipe": recipe, "layout": layout, "seed": seed, **found}


def rows(cells: Sequence[Cell]) -> Iterator[report.Row]:
    for recipe, layouts in LAYOUTS.items():
        torch = {cell["seed"]: cell["after"] for cell in cells if (cell["recipe"], cell["layout"]) == (recipe, TORCH)}
        for layout in layouts:
            own = sorted((c for c in cells if (c["recipe"], c["layout"]) == (recipe, layout)), key=lambda c: c["seed"])
            if own:
                yield row(recipe, layout, own, torch)


def row(recipe: str, layout: str, own: Sequence[Cell], torch: Mapping[int, float]) -> report.Row:
    """Return what the seeds of one layout say together; `torch`: the torch trainer's share after training, by seed."""
    apart = [cell["after"] - torch[cell["seed"]] for cell in own if cell["seed"] in torch] if layout != TORCH else []
    return {
        "recipe": recipe,
        "trainer": layout if layout == TORCH else f"megatron, {layout}",
        "seeds": " ".join(str(cell["seed"]) for cell in own),
        "before": " ".join(f"{cell['before']:.3f}" for cell in own),
        "after": " ".join(f"{cell['after']:.3f}" for cell in own),
        "after, less torch": statistics.mean(apart) if apart else None,
        "standard error": statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else None,
        "seconds": " ".join(f"{cell['s']:.0f}" for cell in own),
        "balanced": all(cell["balanced"] for cell in own),
    }


def main() -> None:
    arguments = report.parser(__doc__ or "")
    arguments.add_argument("--megatron-python", type=Path, required=True, help="what `scripts/engine megatron` makes")
    arguments.add_argument("--recipes", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--runner", choices=["local", "ray"], default="local")
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of all runs")
    options = arguments.parse_args()
    set_up = report.begin(options)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cells = report.recorded("megatron", options, "measured")
    known = {(cell["recipe"], cell["layout"], cell["seed"]) for cell in cells}
    for seed in options.seeds:
        for recipe in options.recipes:
            missing = [layout for layout in LAYOUTS[recipe] if (recipe, layout, seed) not in known]
            if not missing:
                continue
            with tempfile.TemporaryDirectory(prefix="relax-bench-") as folder:
                path = built(Path(folder) / recipe, seed, name=recipe)
                for layout in missing:
                    cells.append(measured(recipe, layout, seed, path, options))
                    if options.out is not None:
                        report.finish("megatron", {**set_up, "measured": cells}, list(rows(cells)), options)
    if options.out is None:
        report.finish("megatron", {**set_up, "measured": cells}, list(rows(cells)), options)
