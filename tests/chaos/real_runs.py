# SPDX-License-Identifier: Apache-2.0
"""Real runs whose processes a seeded schedule kills, stops and denies the disk, at random moments and at those that it waits
for (a checkpoint, a publish, a claim, a recovery), resumed until they are done.

A process may be of any kind: the driver, a rank, an engine, a reward, a role's replica. The disk is full for a process by
its limit on the size of files (RLIMIT_FSIZE), which needs no rights and no second file system. `python -m
tests.chaos.real_runs --runner local --seeds 0:8` runs eight of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import psutil

from relax_core.roles.checkpoint import PARTIAL, complete
from relax_core.views.run import open_run
from tests.graph.conftest import Relax, relax_in, started_runs
from tests.graph.ray_run import Running, Start

SETTINGS = (
    "rollout.groups_per_step=4", "rollout.group_size=4", "eval.every=0", "checkpoint.every=3", "checkpoint.keep=2",
    "max_staleness=1", "placement.mode=hybrid", "rollout.step_timeout_s=60", "weights.timeout_s=30",
)  # fmt: skip
MAX_STARTS = 24
EARLY = 0.15
"""Share of the strikes before a start's first step that befall it: most are to meet a run at work."""
MOMENTS = ("claim", "checkpoint", "recovery", "publish")
"""Where a strike may be aimed: while rows of a step are trained, a checkpoint is written, processes come again, and engines
load weights."""
PATIENCE = 6
"""Steps in which a moment must come, else the strike is one at random."""
BRIEF, AIM_S, LOOK_S = ("checkpoint", "publish"), 0.002, 0.05
"""Moments that pass soon; between two looks at the run while one of them is waited for, and otherwise."""
START_S = 600.0
"""A start that lasts longer than this is stuck."""
ACCEPTED = {0, 4, -signal.SIGKILL}
"""Ends of a driver: done, an infrastructure failure that a resume mends, killed by us."""


class Strikes:
    """What happens to a run's processes, drawn from a seed; each is written to `trace` with its time."""

    def __init__(
        self, seed: int, count: int, every: int, spared: Sequence[str] = (), moments: Sequence[str] = ()
    ) -> None:
        """`count`: strikes in all; `every`: steps between two of them at most; `spared`: kinds that nothing happens to;
        `moments`: where the first strikes are aimed, in this order; the others come at random."""
        self.name = f"{os.getpid()}-{seed}"
        self.left = count
        self.trace: list[str] = []
        self._random, self._spared, self._every = random.Random(f"real {seed}"), spared, every
        self._begun = time.monotonic()
        self._undo: list[tuple[float, psutil.Process, str]] = []
        self._next = self._begun + self._random.uniform(2.0, 6.0)
        self._next_step = 1
        self._moments = list(moments)
        self._aims_until: int | None = None
        """Step up to which the next moment is waited for; None while none is."""
        self._published: set[str] | None = None
        """Versions in memory when a publish was first waited for."""
        self._lost: tuple[str, set[int]] | None = None
        """Kind of the process whose successor is waited for, and the pids of that kind before."""

    @property
    def look_s(self) -> float:
        """Seconds until the next look at the run."""
        return AIM_S if self._aims_until is not None and self._moments[0] in BRIEF else LOOK_S

    def note(self, what: str) -> None:
        self.trace.append(f"{time.monotonic() - self._begun:8.1f} s: {what}")

    def act(self, run: Running) -> None:
        """Strike when it is time, or earlier where the run is fast; let go of what was held for long enough."""
        now = time.monotonic()
        for due in [due for due in self._undo if due[0] <= now]:
            self._undo.remove(due)
            self._let_go(due[1], due[2])
        at = ""
        if self._aims_until is not None:
            at = f", at a {self._moments[0]}"
            if not self._has_come(self._moments[0], run):
                if len(run.steps()) < self._aims_until:
                    return
                at = f", no {self._moments[0]} came"
        steps = len(run.steps())
        if self.left <= 0 or (now < self._next and steps < self._next_step) or not (found := self._processes(run)):
            return
        if self._moments and not at:
            if steps:
                self._aims_until = steps + PATIENCE
            return
        self._next = now + self._random.uniform(1.0, 5.0)
        early = self._random.random() < EARLY
        if not steps and not early and not at:
            return
        if at:
            del self._moments[0]
            self._aims_until = self._published = self._lost = None
        self._next_step = steps + self._every
        self.left -= 1
        kind = self._random.choice(sorted(found))
        process = self._random.choice(found[kind])
        how = self._random.choice(("kill", "kill", "stop", "stop and kill", "full disk"))
        held_s = self._random.uniform(0.5, 4.0)
        self.note(f"{how} {kind} (pid {process.pid}), step {steps}{at}")
        with contextlib.suppress(psutil.NoSuchProcess):
            if how == "kill":
                process.kill()
            elif how == "full disk":
                _, most = process.rlimit(resource.RLIMIT_FSIZE)
                process.rlimit(resource.RLIMIT_FSIZE, (4096, most))
                self._undo.append((now + held_s, process, how))
            else:
                process.suspend()
                self._undo.append((now + held_s, process, how))

    def _has_come(self, moment: str, run: Running) -> bool:
        """Look at what the run shows of itself; to see a recovery, kill a rank or an engine first."""
        if moment == "claim":
            actor = run.role("actor")
            return actor.get("state") == "busy" and str(actor.get("doing", "")).startswith("training")
        if moment == "checkpoint":
            return any((run.path / "checkpoints").glob(f"{PARTIAL}*"))
        if moment == "publish":
            there = {str(path) for path in Path("/dev/shm").glob(f"relax-{run.path.name}*/*@*")}
            self._published = there if self._published is None else self._published
            return bool(there - self._published)
        found = self._processes(run)
        if self._lost is None:
            kinds = [kind for kind in sorted(found) if any(part in kind for part in ("actor", "engine", "Worker"))]
            if kinds:
                kind = self._random.choice(kinds)
                self._lost = kind, {one.pid for one in found[kind]}
                victim = self._random.choice(found[kind])
                self.note(f"kill {kind} (pid {victim.pid}), to see its recovery")
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.kill()
            return False
        kind, before = self._lost
        return any(one.pid not in before for one in found.get(kind, ()))

    def _let_go(self, process: psutil.Process, how: str) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            if how == "full disk":
                _, most = process.rlimit(resource.RLIMIT_FSIZE)
                process.rlimit(resource.RLIMIT_FSIZE, (most, most))
            elif how == "stop and kill":
                process.kill()
            else:
                process.resume()

    def end(self) -> None:
        for _, process, how in self._undo:
            self._let_go(process, how)
        self._undo.clear()

    def _processes(self, run: Running) -> dict[str, list[psutil.Process]]:
        """Find the processes that are the run's own by their kind; a cluster's other processes are left alone."""
        found: dict[str, list[psutil.Process]] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            driver = psutil.Process(run.process.pid)
            found["driver"] = [driver]
            for child in driver.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    name, words = child.name(), " ".join(child.cmdline())
                    if name.startswith(("engine-", "actor-", "reference-", "reward-")):
                        found.setdefault(name.partition("-")[0], []).append(child)
                    elif words.startswith("ray::"):
                        kind = words.removeprefix("ray::").partition(" ")[0].partition(":")[0].partition(".")[0]
                        if any(part in kind for part in ("ServeReplica", "Hub", "Storage", "Worker")):
                            found.setdefault(kind, []).append(child)
        return {kind: processes for kind, processes in found.items() if kind not in self._spared}


def survive(
    directory: Path, recipe: Path, runner: str, seed: int, count: int, steps: int, spared: Sequence[str] = (),
    moments: Sequence[str] = (),
) -> list[str]:  # fmt: skip
    """Run until all steps are done through `count` strikes; return the trace. AssertionError where something is wrong."""
    strikes = Strikes(seed, count, steps // (count + 1), spared, moments)
    words = ("train", recipe, *SETTINGS, f"steps={steps}", f"run.runner={runner}")
    try:
        with relax_in(directory) as relax, started_runs(directory) as start:
            _survive(directory, words, strikes, relax, start, steps)
    except BaseException as error:
        strikes.end()
        error.add_note("\n".join([f"{runner}, seed {seed}", *strikes.trace]))
        raise
    return strikes.trace


def _survive(
    directory: Path, words: tuple[str | Path, ...], strikes: Strikes, relax: Relax, start: Start, steps: int
) -> None:
    path = directory / f"chaos-{strikes.name}-0"
    for number in range(MAX_STARTS):
        if complete(path / "checkpoints"):
            run = start(path, "resume", path, "--json")
        else:
            path = directory / f"chaos-{strikes.name}-{number}"
            run = start(path, *words, "--json", "--run-dir", path)
        code = _ended(run, strikes)
        strikes.note(f"start {number} ended with {code} at step {len(run.steps())}")
        assert code in ACCEPTED, f"a start ended with {code}\n{run.err[-3000:]}"
        if code == 0:
            break
        if code == 4:
            assert "relax resume" in run.err or not complete(path / "checkpoints"), run.err[-3000:]
        if (path / "config.toml").exists():
            why = relax("why", path)
            assert why.code == 0 and why.out.strip(), why.err
        done = [found for found in complete(path / "checkpoints") if found.name == f"step-{steps:06d}"]
        if done:  # killed after its last checkpoint: nothing is left to resume
            break
    else:
        raise AssertionError(f"not done after {MAX_STARTS} starts")
    check_account(path, steps, code == 0)
    strikes.end()
    if code == 0:
        left = sorted(found.name for found in Path("/dev/shm").glob(f"relax-{path.name}-*"))
        summary = json.loads((path / "summary.json").read_text())
        assert summary["status"] == "finished" and summary["balanced"] and summary["steps"] == steps
        assert (path / "export/config.json").is_file() and (path / "report.html").is_file()
        assert not left, f"left in memory: {left}"


def _ended(run: Running, strikes: Strikes) -> int:
    """Strike until the driver ends, then let it finish; return its exit code."""
    deadline = time.monotonic() + START_S
    while (code := run.process.poll()) is None:
        strikes.act(run)
        if time.monotonic() > deadline:
            raise AssertionError(f"stuck: a start is not done after {START_S:.0f} s\n{run.err[-3000:]}")
        time.sleep(strikes.look_s)
    return code


def check_account(path: Path, steps: int, finished: bool) -> None:
    """Compare ledger, metrics and transcripts by ids: every step trained its samples, and no sample was trained twice."""
    ledger = path / "ledger.db"
    if not finished:  # the driver was killed after the last checkpoint, whose copy nobody writes any more
        ledger = path / f"checkpoints/step-{steps:06d}/ledger.db"
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as db:
        ended = db.execute("SELECT number, sample, issue, reason, step FROM ended").fetchall()
        folded = dict(db.execute("SELECT reason, sum(attempts) FROM folded GROUP BY reason").fetchall())
        ranges = db.execute("SELECT first, last FROM folded_groups").fetchall()
    trained = [(number, sample, issue) for number, sample, issue, reason, _ in ended if not reason]
    twice = [one for one, count in Counter(one[:2] for one in trained).items() if count > 1]
    assert not twice, f"trained twice: {twice}"
    again = [number for number, _, _ in trained for first, last in ranges if first <= number <= last]
    assert not again, f"trained and folded: {again}"
    assert len(trained) + folded.get("", 0) <= steps * 16
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rows = [line for line in lines if "reward/mean" in line]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "a step is missing or there twice"
    for row in rows:
        assert row["samples/balanced"] == 1 and 0 <= row["lag/max"] <= 1
        assert row["samples/issued"] == row["samples/trained"] + row["samples/dropped"] + row["samples/in_flight"]
    if finished:
        assert len(rows) == steps and rows[-1]["samples/trained"] == len(trained) + folded.get("", 0)
    view = open_run(path)
    told = [
        (sample["group_id"], sample["sample_index"], sample["attempt"])
        for step in range(1, steps + 1)
        for sample in view.samples(step)
    ]
    twice = [one for one, count in Counter(told).items() if count > 1]
    assert not twice, f"told twice: {twice}"


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.chaos.real_runs", description=__doc__)
    parser.add_argument("--runner", choices=("local", "ray"), action="append")
    parser.add_argument("--seeds", default="0:8", help="first:last")
    parser.add_argument("--strikes", type=int, default=20, help="a run; almost half of them aimed")
    parser.add_argument("--steps", type=int, default=60)
    words = parser.parse_args()
    first, last = map(int, words.seeds.split(":"))
    from relax_core.control.prepare import find_recipe

    failed = 0
    with tempfile.TemporaryDirectory(prefix="chaos-runs-") as name:
        find_recipe("quickstart").build(Path(name) / "quickstart", 0)
        for runner in words.runner or ("local", "ray"):
            for seed in range(first, last):
                directory = Path(name) / f"{runner}-{seed}"
                directory.mkdir()
                try:
                    trace = survive(
                        directory, Path(name) / "quickstart/recipe.toml", runner, seed, words.strikes, words.steps,
                        moments=MOMENTS * (words.strikes // (2 * len(MOMENTS))),
                    )  # fmt: skip
                    print(f"{runner}, seed {seed}: done through {len(trace)} happenings", *trace, sep="\n", flush=True)
                except Exception as error:
                    failed += 1
                    print(f"{error}\n" + "\n".join(getattr(error, "__notes__", ())), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
