# SPDX-License-Identifier: Apache-2.0
"""What `relax plan` foretells of a configuration: bytes of each process and memory, and the least time of a step.

Nothing of the run is started. A recipe's files are built in a folder of their own, and the machine is asked how fast
it multiplies matrices, for a moment.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from relax_core.api.plan import Plan
from relax_core.config.compose import parse_config
from relax_core.control.machine import device_memory, free_memory
from relax_core.control.memory_check import MemoryBudget, ProcessNeed, longest_prompt, needs, rooms
from relax_core.control.prepare import Source, launch_of, plans_of

SIDE, RATE_S = 1024, 0.3
"""Of the matrices that the rate is measured with, and for how long."""


@dataclass(frozen=True, slots=True)
class Duration:
    """Of one phase of one worker group in a step."""

    group: str
    phase: str
    flops: float
    """Of its busiest process."""
    least_s: float
    """At the measured rate of large matrix products, with nothing else to do: a floor, and no forecast."""


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """Everything that is foretold."""

    plan: Plan
    prompt_tokens: int
    needs: tuple[ProcessNeed, ...]
    rooms: tuple[MemoryBudget, ...]
    flops_per_s: float
    """Of float32, of one process; 0: not measured."""
    durations: tuple[Duration, ...]
    refuses: bool = True
    """Whether a run would; `placement.check_memory`."""

    def check(self) -> None:
        """Raise ConfigError for what can't fit."""
        for room in self.rooms if self.refuses else ():
            room.check()


def forecasts(sources: Sequence[Source], overrides: Sequence[str]) -> list[tuple[str, RunEstimate]]:
    """Of each stage by its name; of a run without stages, one without a name."""
    names = [name for name, _ in plans_of(sources, overrides)]
    return [(name, forecast(sources, overrides, at)) for at, name in enumerate(names)]


def forecast(sources: Sequence[Source], overrides: Sequence[str], stage: int = 0) -> RunEstimate:
    """Raises ConfigError for a configuration that can't run; one that can't fit is foretold as such."""
    with tempfile.TemporaryDirectory(prefix="relax-plan-") as directory:
        launch, catalogue = launch_of(sources, overrides, directory, stage)
        config = parse_config(launch.config, catalogue)
        longest = longest_prompt(config, catalogue, launch.plan)
        known = needs(config, catalogue, launch.plan, longest)
    rate = measured_rate(max((need.group.threads for need in known), default=1))
    found = rooms(known, free_memory(), device_memory())
    return RunEstimate(launch.plan, longest, known, found, rate, _durations(known, rate), config.placement.check_memory)


def _durations(known: Sequence[ProcessNeed], rate: float) -> tuple[Duration, ...]:
    found = []
    for need in known:
        busiest: Mapping[str, float] = max(
            (one.flops for one in need.processes), key=lambda f: sum(f.values()), default={}
        )
        found += [
            Duration(need.group.name, phase, flops, flops / rate if rate else 0.0) for phase, flops in busiest.items()
        ]
    return tuple(found)


def measured_rate(threads: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Floating-point operations of matrix products in float32 a second by the clock; 0 where torch is not installed."""
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
