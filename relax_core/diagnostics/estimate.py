# SPDX-License-Identifier: Apache-2.0
"""Estimates of `relax plan`: bytes of each process and each memory, and the least time of a step.

Nothing of the run is started. A recipe's files are built in a temporary folder, and the machine multiplies matrices for a
moment to show how fast it is.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_core.api.plan import Plan
from relax_core.config.layers import Source
from relax_core.control.memory_check import (
    MemoryBudget,
    ProcessNeed,
    device_memory,
    free_memory,
    longest_prompt,
    memory_budgets,
    process_needs,
)
from relax_core.control.prepare import plan_run

SIDE, RATE_S = 1024, 0.3
"""Side of the matrices that the rate is measured with, and seconds that it takes."""


@dataclass(frozen=True, slots=True)
class Duration:
    """Least time of one phase of one worker group in a step."""

    group: str
    phase: str
    flops: float
    """Work of its busiest process."""
    least_s: float
    """At the measured rate of large matrix products, with nothing else to do: a floor, and no forecast."""


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """Estimates of one stage of a run."""

    stage: str
    """Its name; empty in a run without stages."""
    plan: Plan
    prompt_tokens: int
    needs: tuple[ProcessNeed, ...]
    budgets: tuple[MemoryBudget, ...]
    flops_per_s: float
    """Rate of float32 of one process; 0: not measured."""
    durations: tuple[Duration, ...]
    refuses: bool = True
    """Whether a run would refuse what can't fit; `placement.check_memory`."""

    def check(self) -> None:
        """Raise ConfigError for what can't fit."""
        for budget in self.budgets if self.refuses else ():
            budget.check()


def estimate_run(sources: Sequence[Source], overrides: Sequence[str]) -> list[RunEstimate]:
    """Estimate each stage. Raises ConfigError for a configuration that can't run, but not for one that can't fit."""
    estimates = []
    with tempfile.TemporaryDirectory(prefix="relax-plan-") as directory:
        planned = plan_run(sources, overrides).build_recipe(Path(directory) / "recipe", sources, overrides)
        for stage in planned.stages:
            longest = longest_prompt(stage.config, planned.catalogue, stage.plan)
            needs = process_needs(stage.config, planned.catalogue, stage.plan, longest)
            rate = measured_rate(max((need.group.threads for need in needs), default=1))
            budgets = memory_budgets(needs, free_memory(), device_memory())
            durations = _durations(needs, rate)
            check = stage.config.placement.check_memory
            estimates.append(RunEstimate(stage.name, stage.plan, longest, needs, budgets, rate, durations, check))
    return estimates


def _durations(needs: Sequence[ProcessNeed], rate: float) -> tuple[Duration, ...]:
    found = []
    for need in needs:
        work = [one.flops for one in need.processes]
        busiest: Mapping[str, float] = max(work, key=lambda flops: sum(flops.values()), default={})
        found += [Duration(need.group.name, phase, of, of / rate if rate else 0.0) for phase, of in busiest.items()]
    return tuple(found)


def measured_rate(threads: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Measure how many operations of float32 matrix products a second takes; 0 where torch is not installed."""
    try:
        import torch
    except ImportError:
        return 0.0
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    one = torch.rand(SIDE, SIDE, device=device)
    try:
        float((one @ one).sum())
        count, begun = 0, clock()
        while clock() - begun < RATE_S:
            float((one @ one)[0, 0])
            count += 1
        return 2.0 * SIDE**3 * count / (clock() - begun)
    finally:
        torch.set_num_threads(before)
