# SPDX-License-Identifier: Apache-2.0
"""Agents: how busy engines are while samples wait for tools whose times have a heavy tail, beside a plain loop.

The plain loop has as many sessions as engines have places, and each takes turn after turn. Relax plays the same samples through
its roles, staleness gate, router and environments; engines, trainer and tools take virtual time, so that the figures do not
depend on the machine. What the scheduling itself costs in seconds of a processor is therefore not in them.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any

from relax_core.api.events import RolloutMeasured
from tests.benchmarks import report
from tests.unit.roles.simulated_run import SimulatedRun
from tests.unit.roles.virtual_time import run_virtual

TOKEN_S, LONGEST = 0.4, 16
"""A turn has 1 to `LONGEST` tokens, as its seed says."""
TOOLS = """
import asyncio
from relax_core.api import Environment, Observation, Options, Step
from tests.benchmarks.agents import turn_tokens, waits
from tests.unit.roles.scripted_components import ScriptedEngine

class PlacesEngine(ScriptedEngine):
    def _length(self, request):
        return turn_tokens(request.seed)

class ToolsOptions(Options):
    turns: int
    start_s: float
    tail: str

class Tools(Environment[ToolsOptions]):
    in_process = True
    gives_reward = True
    async def reset(self, task, seed):
        start_s, self.waits = waits(seed, self.options.turns, self.options.start_s, self.options.tail)
        await asyncio.sleep(start_s)
        return Observation("begin")
    async def step(self, action):
        await asyncio.sleep(self.waits.pop())
        return Step(Observation("on"), not self.waits, 1.0)
"""


def turn_tokens(seed: int) -> int:
    return random.Random(seed).randint(1, LONGEST)


def waits(seed: int, turns: int, start_s: float, tail: str) -> tuple[float, list[float]]:
    """Seconds that the environment of a sample takes to start, and its tool after each turn."""
    draw = random.Random(f"tools {seed}")
    start = start_s * draw.uniform(0.5, 1.5)
    if tail == "pareto":  # mean 6 s, and no variance
        return start, [2.0 * draw.paretovariate(1.5) for _ in range(turns)]
    return start, [draw.lognormvariate(0.7, 1.5) for _ in range(turns)]  # median 2 s, mean 6 s


async def plain_loop(samples: int, places: int, turns: int, start_s: float, tail: str) -> tuple[float, float]:
    """Play samples in as many sessions as there are places; return seconds, and those in which a place was busy."""
    left, busy_s = iter(range(samples)), 0.0

    async def session() -> None:
        nonlocal busy_s
        for seed in left:
            start, tools = waits(seed, turns, start_s, tail)
            await asyncio.sleep(start)
            for number, tool_s in enumerate(tools):
                turn_s = turn_tokens(turns * seed + number) * TOKEN_S
                busy_s += turn_s
                await asyncio.sleep(turn_s)
                await asyncio.sleep(tool_s)

    await asyncio.gather(*(session() for _ in range(places)))
    return asyncio.get_running_loop().time(), busy_s


def relax_run(folder: Path, options: Any, tail: str, rollout: dict[str, Any]) -> tuple[float, float, float]:
    """Seconds, place-seconds that were busy, and mean seconds that a sample's turns waited for a place."""
    folder.mkdir()
    plugin = folder / "tools.py"
    plugin.write_text(TOOLS)
    run = SimulatedRun(
        folder / "run", [str(plugin)], steps=options.steps, max_staleness=options.staleness,
        environment={"name": "tools", "turns": options.turns, "start_s": options.start_s, "tail": tail, "timeout_s": 1e6},
        engine={"name": "places-engine", "token_s": TOKEN_S},
        trainer={"name": "scripted-trainer", "train_s": 0.01, "publish_s": 0.01},
        placement={"mode": "hybrid", "rollout": {"engines": options.engines, "requests_per_engine": options.places, **rollout}},
        rollout={"groups_per_step": options.groups, "group_size": options.size, "max_new_tokens": LONGEST},
    )  # fmt: skip
    outcome = run.run(at_most_s=1e7)
    measured = [event.metrics for event in outcome.events if isinstance(event, RolloutMeasured)]
    count = sum(one["samples/scored"] for one in measured)
    busy = sum(one["time/sample/generate_s"] * one["samples/scored"] for one in measured)
    queued = sum(one["time/sample/queue_s"] * one["samples/scored"] for one in measured)
    return outcome.seconds, busy, queued / count


def measure(options: Any) -> list[report.Row]:
    rows: list[report.Row] = []
    samples, places = options.steps * options.groups * options.size, options.engines * options.places
    for tail in ("lognormal", "pareto"):
        seconds, busy = run_virtual(plain_loop(samples, places, options.turns, options.start_s, tail), 1e7)
        found = [("plain loop", seconds, busy, 0.0)]
        settings = {
            "as many sessions as places": {"sessions": places},
            "scheduled": {},
            "scheduled, prelaunch": {"prelaunch": options.prelaunch},
        }
        with tempfile.TemporaryDirectory() as base:
            for number, (what, rollout) in enumerate(settings.items()):
                found.append((what, *relax_run(Path(base, str(number)), options, tail, rollout)))
        rows += [
            {"tools": tail, "what": what, "busy share": busy / (places * seconds), "samples/s": samples / seconds,
             "queue s": queued}
            for what, seconds, busy, queued in found
        ]  # fmt: skip
    return rows


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--places", type=int, default=8, help="of each engine")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--groups", type=int, default=32, help="of a step")
    parser.add_argument("--size", type=int, default=4, help="samples of a group")
    parser.add_argument("--turns", type=int, default=4, help="of each sample")
    parser.add_argument("--start-s", type=float, default=10.0, help="mean seconds until an environment has started")
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--prelaunch", type=int, default=128)
    options = parser.parse_args()
    set_up = report.begin(options)
    rows = measure(options)
    report.finish("agents", set_up, rows, options)
