# SPDX-License-Identifier: Apache-2.0
"""Estimates of `relax plan`: the bytes of each process and each memory, and a lower bound of a step's time.

No process of the run is started. A recipe's files are built in a temporary folder with an untrained model, and products
of matrices measure the machine's speed for a moment.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_core.api.plan import Plan
from relax_core.config.layers import Source
from relax_core.launch import free_memory, plan_run, preflight
from relax_plugin_workbench.memory import (
    MEDIA_NOTE,
    MemoryBudget,
    ProcessNeed,
    device_memory,
    longest_prompt,
    memory_budgets,
    process_needs,
)

SIDE, RATE_S = 1024, 0.3
"""Number of rows, and of columns, of the multiplied matrices; seconds that the measurement takes."""


@dataclass(frozen=True, slots=True)
class Duration:
    """A lower bound of the time of one phase of one worker group in a step."""

    group: str
    phase: str
    flops: float
    """Floating-point operations of the group's busiest process."""
    least_s: float
    """Seconds at the measured rate of large matrix products: a lower bound, not a forecast."""


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """The estimates of one stage of a run."""

    stage: str
    """Name of the stage; empty in a run without stages."""
    plan: Plan
    prompt_tokens: int
    needs: tuple[ProcessNeed, ...]
    budgets: tuple[MemoryBudget, ...]
    flops_per_s: float
    """Measured float32 operations per second of one process; 0: not measured."""
    durations: tuple[Duration, ...]
    refuses: bool = True
    """`placement.check_memory`: True if the run refuses to start when a budget does not fit."""
    notices: tuple[str, ...] = ()
    """Notices of overrides that chose another component, and so dropped the options of the former component."""

    def check(self) -> None:
        """Raise ConfigError if a budget does not fit and the run would refuse to start."""
        for budget in self.budgets if self.refuses else ():
            if not budget.fits:
                raise budget.refusal


def estimate_run(sources: Sequence[Source], overrides: Sequence[str]) -> list[RunEstimate]:
    """Estimate each stage. Raises ConfigError if the configuration can't run, but not if a budget does not fit."""
    estimates = []
    with tempfile.TemporaryDirectory(prefix="relax-plan-") as directory:
        folder = Path(directory) / "recipe"
        planned = plan_run(sources, overrides).build_recipe(folder, sources, overrides, untrained=True)
        for stage in planned.stages:
            longest = longest_prompt(stage.config, planned.catalogue, stage.plan)
            needs = process_needs(stage.config, planned.catalogue, stage.plan, longest)
            rate = measured_rate(max((need.group.threads for need in needs), default=1), dtype=stage.config.model.dtype)
            budgets = memory_budgets(needs, free_memory(), device_memory())
            durations = []
            for need in needs:
                passes = {"train": stage.config.batch.passes}
                work = [
                    {phase: flops * passes.get(phase, 1) for phase, flops in process.flops.items()}
                    for process in need.processes
                ]
                busiest: Mapping[str, float] = max(work, key=lambda flops: sum(flops.values()), default={})
                durations += [
                    Duration(need.group.name, phase, flops, flops / rate if rate else 0.0)
                    for phase, flops in busiest.items()
                ]
            placement = stage.config.placement
            notices = (*planned.composed.notices, *((MEDIA_NOTE,) if stage.config.media else ()))
            # The budgets show whether the run fits, so the check of memory is left out.
            unchecked = stage.config.model_copy(
                update={"placement": placement.model_copy(update={"check_memory": False})}
            )
            notices += preflight(unchecked, planned.catalogue, stage.plan)
            estimates.append(
                RunEstimate(
                    stage.name,
                    stage.plan,
                    longest,
                    needs,
                    budgets,
                    rate,
                    tuple(durations),
                    placement.check_memory,
                    notices,
                )
            )
    return estimates


def measured_rate(threads: int, clock: Callable[[], float] = time.perf_counter, dtype: str = "float32") -> float:
    """Measure the floating-point operations per second of matrix products; 0 if torch is not installed.

    A GPU multiplies in `dtype`, a CPU in float32.
    """
    try:
        import torch
    except ImportError:
        return 0.0
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    side, kind = SIDE, torch.float32
    if on_gpu := torch.cuda.is_available():  # a GPU needs large products to be busy
        side, kind = 8 * SIDE, getattr(torch, dtype)
    matrix = torch.rand(side, side, device="cuda" if on_gpu else "cpu", dtype=kind)
    try:
        float((matrix @ matrix).sum())
        count, began = 0, clock()
        while clock() - began < RATE_S:
            float((matrix @ matrix)[0, 0])
            count += 1
        return 2.0 * side**3 * count / (clock() - began)
    finally:
        torch.set_num_threads(before)
