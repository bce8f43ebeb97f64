# SPDX-License-Identifier: Apache-2.0
"""Overlap: what engines sample while weights are on their way to them, against the same time without a publish.

A short real async run of the quickstart's model, whose engine and trainer write down when they did what (`clocked.py`).
A publish lasts, for an engine, from the trainer's first byte until that engine has the version.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from tests.benchmarks import report
from tests.benchmarks.runs import HERE, built, trained

RUN_S = 300.0
FIRST = 3
"""Publishes that are not counted: memory is made and mapped."""
Span: TypeAlias = tuple[float, float]
Line: TypeAlias = tuple[str, str, float, float, int]


def clocked_run(recipe: Path, transport: str, options: argparse.Namespace) -> list[Line]:
    """What its processes wrote down."""
    report.say(f"{transport}: {options.steps} steps at staleness {options.staleness}, {options.engines} engines")
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as folder:
        clock = Path(folder) / "clock.jsonl"
        settings = [
            f'plugins=["{HERE / "clocked.py"}"]', "engine=clocked-engine", "trainer=clocked-trainer", f"steps={options.steps}",
            f"max_staleness={options.staleness}", "placement.mode=async", f"placement.rollout.engines={options.engines}",
            f"weights={transport}", "eval.every=0", "checkpoint.every=0", f'run.env={{RELAX_CLOCK="{clock}"}}',
        ]  # fmt: skip
        trained(recipe, settings, RUN_S)
        return [tuple(json.loads(line)) for line in clock.read_text().splitlines()]


class Engine:
    """One engine's part of what was written down."""

    def __init__(self, name: str, lines: Sequence[Line]) -> None:
        own = [line for line in lines if line[1] == name]
        begun = {count: begin for what, _, begin, _, count in lines if what == "publish"}
        self.publishes = [(begun[step], end) for what, _, _, end, step in own if what == "load" and step > FIRST]
        self.calls = joined((begin, end) for what, _, begin, end, _ in own if what == "call")
        self._tokens = sorted((at, count) for what, _, at, _, count in own if what == "tokens")
        self._times = [at for at, _ in self._tokens]

    def tokens(self, spans: Iterable[Span]) -> int:
        return sum(
            count
            for begin, end in spans
            for _, count in self._tokens[bisect_left(self._times, begin) : bisect_right(self._times, end)]
        )


def joined(spans: Iterable[Span]) -> list[Span]:
    """Without overlaps, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def common(one: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    """Where both are."""
    shared = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return [(begin, end) for begin, end in shared if begin < end]


def seconds(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def row(transport: str, lines: Sequence[Line]) -> report.Row:
    """Over all engines; the time without a publish is that between the first and the last one."""
    during = apart = publishing = generating = free = 0.0
    lasted: list[float] = []
    for name in sorted({line[1] for line in lines if line[0] == "load"}):
        engine = Engine(name, lines)
        lasted += [end - begin for begin, end in engine.publishes]
        windows = joined(engine.publishes)
        whole = [(windows[0][0], windows[-1][1])]
        during += engine.tokens(windows)
        apart += engine.tokens(whole) - engine.tokens(windows)
        publishing += seconds(windows)
        free += seconds(whole) - seconds(windows)
        generating += seconds(common(windows, engine.calls))
    equal = apart / free * publishing
    return {
        "transport": transport, "publishes": len(lasted), "publish s": sorted(lasted)[len(lasted) // 2],
        "publishing": publishing / (publishing + free), "of it an engine generates": generating / publishing,
        "tokens in publishes": int(during), "tokens in equal time without": int(equal), "ratio": during / equal,
    }  # fmt: skip


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--transports", nargs="+", default=["shared-memory", "collective"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--engines", type=int, default=1)
    options = parser.parse_args()
    set_up = report.begin(options)
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as folder:
        recipe = built(Path(folder) / "recipe", 0)
        rows = [row(name, clocked_run(recipe, name, options)) for name in options.transports]
    report.finish("overlap", set_up, rows, options)
