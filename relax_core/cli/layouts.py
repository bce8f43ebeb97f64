# SPDX-License-Identifier: Apache-2.0
"""The output of `relax plan --layouts`: a table of the layouts that fit, and the reasons of those refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from relax_core.cli.terminal import print_json, print_table, say

if TYPE_CHECKING:
    from relax_core.diagnostics.layouts import LayoutComparison

SHOWN_LAYOUTS = 10


def print_layouts(
    sources: Sequence[str], overrides: Sequence[str], gpus: int, gpu_memory: float, gpu_tflops: float, link_gb: float,
    *, as_json: bool, anyway: bool,
) -> None:  # fmt: skip
    """Print the layouts of the trainer that fit, and the reasons of those refused; 0 stands for this machine's value."""
    from relax_core.diagnostics.layouts import Machine, compare_layouts

    machine = Machine.of(gpus, gpu_memory, gpu_tflops, link_gb)
    stages = compare_layouts(sources, overrides, machine)
    if as_json:
        documents = [_layouts_document(one) for one in stages]
        rates = {name: getattr(machine, name) for name in ("flops_per_s", "memory_bytes_per_s", "link_bytes_per_s")}
        print_json({"schema": "relax.layouts/1", "rates": rates, "stages": documents})
    for comparison in () if as_json else stages:
        if comparison.stage:
            say(f"stage {comparison.stage}")
        _print_comparison(comparison)
    if not as_json:
        flops, memory, link = machine.flops_per_s, machine.memory_bytes_per_s, machine.link_bytes_per_s
        at = f"{flops / 1e12:.3g} TFLOP/s, {memory / 1e9:.4g} GB/s of memory and {link / 1e9:.3g} GB/s sent"
        say(f"note: times are for ranks with {at}")
        say("note: they order layouts and are no forecast: nothing overlaps, and every rank sends at the same rate")
    for comparison in () if anyway else stages:
        comparison.check()


def _layouts_document(comparison: LayoutComparison) -> dict[str, Any]:
    return {
        "stage": comparison.stage,
        "ranks": comparison.ranks,
        "notes": comparison.notes,
        "layouts": [
            {
                "settings": one.settings, "data_parallel": one.layout.data_parallel,
                "optimizer_ranks": one.layout.optimizer_ranks, "step_s": one.seconds, "needed": one.needed,
                "available": one.available, "refused": f"{one.field}: {one.reason}" if one.field else "",
            }
            for one in comparison.layouts
        ],
    }  # fmt: skip


def _print_comparison(comparison: LayoutComparison) -> None:
    from relax_core.control.memory_check import gib

    shown, fitting = comparison.best_of_options(), comparison.fitting
    say(f"{len(fitting)} of {len(comparison.layouts)} layouts fit in memory; estimated time of one training step")
    options = dict.fromkeys(name for one in comparison.layouts for name in one.layout.options)
    differing = [name for name in options if len({one.layout.options.get(name) for one in comparison.layouts}) > 1]
    columns = ("step", "memory", "data_parallel", "optimizer_ranks", "tokens_per_micro_batch", *differing)
    rows = [
        (
            f"{one.seconds:.3g} s", gib(one.needed), str(one.layout.data_parallel), str(one.layout.optimizer_ranks),
            str(one.layout.tokens_per_micro_batch), *(str(one.layout.options.get(name, "")) for name in differing),
        )
        for one in shown[:SHOWN_LAYOUTS]
    ]  # fmt: skip
    if rows:
        print_table(columns, rows)
        if len(shown) > len(rows):
            say(f"and {len(shown) - len(rows)} slower ones, which --json lists")
        say(f"\nfirst of them: {_overrides(comparison.changes(shown[0]))}")
    refusals = comparison.refusals()
    say("\nrefused" * bool(refusals))
    for (field, reason), layouts in refusals.items():
        count = f"{len(layouts)} layout{'s' * (len(layouts) > 1)}"
        closest = layouts[0]
        if closest.needed:
            count += f"; at least {gib(closest.needed)}, with {_overrides(comparison.changes(closest))}"
        say(f"{field}: {reason} ({count})")
    for note in comparison.notes:
        say(f"note: {note}")


def _overrides(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={json.dumps(value).strip(chr(34))}" for key, value in settings.items())
