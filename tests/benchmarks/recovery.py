# SPDX-License-Identifier: Apache-2.0
"""Recovery: how long a run is without a process that was killed at a random moment, beside a bare start of the same process.

Runs of the quickstart's model on each runner. Their processes are killed in turns, each after a random pause; the run's own
log tells when the loss was noticed and when the process worked again, the system when the next process was there. Between
the kills the same process is started bare, beside the run and with its load, by nothing but the code that every run starts it
with. The process of a role is started with its worker, since both end together.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import psutil

from relax_core.api.component import Chosen
from relax_core.api.role import WorkerSpec
from relax_core.api.trainer import OptimizerSpec, TrainerSpec
from relax_core.api.weights import Version
from relax_core.config.run_config import RunConfig
from relax_core.control.prepare import plan_run
from relax_core.engines.factories import engine_spec
from relax_core.roles.rank_group import ONE_ARENA
from relax_core.runners.local.workers import LocalWorkers
from tests.benchmarks import report
from tests.benchmarks.runs import built
from tests.graph.ray_run import Running, children, until
from tests.processes import gone

START_S, WAIT_S = 300.0, 180.0
CALM_S = 3.0
"""At most, between a recovery and the next kill."""
SETTINGS = (
    "steps=100000", "eval.every=0", "checkpoint.every=5", "checkpoint.keep=2", "rollout.groups_per_step=8",
    'optimizer.lr=1e-5', "max_staleness=1", "recovery.restarts=1000",
)  # fmt: skip
PLUGINS = "import relax_core.registry.catalogue as c; c.Catalogue.load()"
SHELL = f"import relax_core.runners.ray.shell; {PLUGINS}"
REWARD = f"import relax_core.runners.local.child, relax_core.rewards.host; {PLUGINS}"
BARE = {"advantages shell": SHELL, "rollout shell": SHELL, "actor shell": SHELL, "reward process": REWARD,
        "storage actor": "import relax_core.runners.ray.bus"}  # fmt: skip
"""Processes whose start is an interpreter and its imports."""
BARE_STARTS = 5
"""At most, of one kind: they change little, and cost as much as a recovery."""
MANY_STEPS = 6
"""Until there is a newer checkpoint: what never gets further is not restored for ever."""
ROUNDS = 3
"""Kills of each kind in one run; a shell that dies more often in ten minutes is no longer replaced."""
MAX_MISSED = 3
"""Recoveries that did not come, after which nothing more is measured."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of process: the number of the one that is at work, 0 while none is, and the names that the log has for it.

    Without a name it is replaced without a word, by Ray itself: noticed when the next one is there, ready at the next step.
    """

    find: Callable[[Running], int]
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recovery:
    """One kill, in seconds after it; `bare`: of a bare start beside it, None where none was measured."""

    noticed: float
    started: float
    ready: float
    bare: float | None
    dropped: int
    lost: int


class Log:
    """The run's events, read as they come."""

    def __init__(self, run: Path) -> None:
        self._path, self._read = run / "events.jsonl", 0

    def lines(self) -> list[dict[str, Any]]:
        """Lines since the last call."""
        with self._path.open() as file:
            file.seek(self._read)
            whole = [line for line in file.readlines() if line.endswith("\n")]
        self._read += sum(len(line.encode()) for line in whole)
        return [json.loads(line) for line in whole]

    def recovery(self, names: Sequence[str]) -> tuple[float, float]:
        """Wall-clock times at which the loss of one of these was noticed and at which it worked again, once both are there."""
        found: list[dict[str, Any]] = []

        def look() -> dict[str, Any] | bool:
            found.extend(self.lines())
            return next((one for one in found if _tells(one, "role recovered", names)), False)

        line = until(look, lambda: f"{' or '.join(names)} works again; last said: {found[-3:]}", WAIT_S)
        ready = _time(line)
        lost = (one for one in found if _tells(one, "role failed", names))
        return next(map(_time, lost), ready - line["seconds"]), ready


def _tells(line: Mapping[str, Any], event: str, names: Sequence[str]) -> bool:
    return line["event"] == event and line["role"] in names


def _time(line: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(line["time"]).timestamp()


def _child(run: Running, word: str, parent: str = "") -> int:
    """The newest process with a word in its name or command line, below the process of a role, or of the run."""
    above = run.pid(parent) if parent else run.process.pid
    with contextlib.suppress(psutil.NoSuchProcess):
        found = [*children(above, word), *(one for one in psutil.Process(above).children(True) if word in one.name())]
        return max(found, key=lambda one: one.create_time()).pid if found else 0
    return 0


def _serving_engine(run: Running) -> int:
    engines = run.role("rollout").get("facts", {}).get("engines", {})
    return int(next((engine["pid"] for engine in engines.values() if engine["serving"]), 0))


def _rank(run: Running) -> int:
    return int(run.role("actor").get("facts", {}).get("ranks", {}).get("actor-rank-0", 0))


def victims(runner: str) -> dict[str, Kind]:
    """The kinds of processes of a runner."""
    found = {
        "engine": Kind(_serving_engine, ("engine",)),
        "actor rank": Kind(_rank, ("actor",)),
        "reward process": Kind(lambda run: _child(run, "reward-exact-0", "rollout"), ("reward-exact-0",)),
    }
    if runner == "ray":
        for role in ("advantages", "rollout", "actor"):
            found[f"{role} shell"] = Kind(lambda run, role=role: int(run.role(role).get("pid", 0)), (role,))  # type: ignore[misc]
        found["storage actor"] = Kind(lambda run: _child(run, "ray::StorageActor"))
    return found


def bare_start(kind: str, config: RunConfig) -> float:
    """Start such a process with nothing around it; seconds until it could work."""
    began = time.monotonic()
    if kind in BARE:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-c", BARE[kind]], check=True, timeout=START_S, env=environment)
    if kind not in BARE or kind in ("actor shell", "rollout shell"):  # whose workers end with it
        asyncio.run(_start_worker(kind, config))
    return time.monotonic() - began


async def _start_worker(kind: str, config: RunConfig) -> None:
    own: Any
    if kind in ("engine", "rollout shell"):
        chosen, own = config.engine.chosen, engine_spec(config, Version("actor", 0, 0))
    else:
        chosen, model = config.trainer.chosen, config.model.model_dump(mode="json")
        own = TrainerSpec(model, config.learner, OptimizerSpec(1e-5), role="actor", seed=config.seed)
    workers = LocalWorkers()
    try:
        (worker,) = await workers.start(
            [WorkerSpec("bare", Chosen(chosen.kind, chosen.name, chosen.options), env=ONE_ARENA)]
        )
        await worker.call("start", own, timeout_s=START_S)
    finally:
        await workers.close()


class Measured:
    """Runs of one runner whose processes are killed, and what was seen; a run that does not recover is ended for the next."""

    def __init__(self, runner: str, recipe: Path, folder: Path, seed: int) -> None:
        self._runner, self._recipe, self._folder, self._random = runner, recipe, folder, Random(seed)
        self._config = plan_run([recipe], [*SETTINGS, f"run.runner={runner}"]).composed.config
        self._runs = 0
        self.taken: defaultdict[str, list[Recovery]] = defaultdict(list)
        self.missed: Counter[str] = Counter()

    def kill_each(self, kinds: Mapping[str, Kind], rounds: int) -> None:
        """Kill one of each kind so often, in any order, in one run; begin another where the run does not recover."""
        left = [name for _ in range(rounds) for name in self._random.sample(list(kinds), len(kinds))]
        while left and sum(self.missed.values()) < MAX_MISSED:
            run = self._start()
            try:
                log = Log(run.path)
                while left:
                    name = left.pop(0)
                    self._kill(run, log, name, kinds[name])
                run.interrupt()
                run.end(WAIT_S)
            except (AssertionError, psutil.Error, OSError, subprocess.TimeoutExpired) as error:
                self.missed[name] += 1
                report.say(f"{self._runner} {name}: no recovery: {error}")
            finally:
                run.kill()

    def _start(self) -> Running:
        self._runs += 1
        path = self._folder / f"{self._runner}-{self._runs}"
        run = Running(path, "train", self._recipe, *SETTINGS, "--runner", self._runner, "--run-dir", path)
        try:
            until(lambda: run.status().get("state") == "running", lambda: f"a run starts\n{run.err}", START_S)
            run.until_steps(MANY_STEPS)
        except BaseException:
            run.kill()
            raise
        return run

    def _kill(self, run: Running, log: Log, name: str, kind: Kind) -> None:
        """Kill one; note when that was noticed, when the next process was there, and when it worked again."""
        taken = self.taken[name]
        bare = bare_start(name, self._config) if len(taken) < BARE_STARTS else None
        time.sleep(self._random.uniform(0, CALM_S))
        pid = until(lambda: _alive(kind.find(run)), f"{name} is there", WAIT_S)
        before = _ledger(run)
        log.lines()
        killed = time.time()
        os.kill(pid, signal.SIGKILL)
        if kind.names:
            noticed, ready = log.recovery(kind.names)
            follower = until(lambda: _alive(kind.find(run), pid), f"another {name} is there", WAIT_S)
            started = min(max(_started_at(follower), noticed), ready)
        else:
            until(lambda: _alive(kind.find(run), pid), f"another {name} is there", WAIT_S)
            noticed = started = time.time()
            run.until_more_steps(1)
            ready = time.time()
        run.until_more_steps(MANY_STEPS if "actor" in kind.names else 1)
        dropped, lost = _ledger(run)
        one = Recovery(noticed - killed, started - killed, ready - killed, bare, max(0, dropped - before[0]), lost)
        taken.append(one)
        shown = "" if bare is None else f", bare {bare:.2f} s"
        report.say(
            f"{self._runner} {name} {len(taken)}: noticed {one.noticed:.2f} s, started {one.started:.2f} s, "
            f"ready {one.ready:.2f} s{shown}"
        )

    def rows(self, kinds: Mapping[str, Kind]) -> list[report.Row]:
        found = []
        for name, kind in kinds.items():
            taken, row = self.taken[name], {"runner": self._runner, "killed": name}
            bare = [one.bare for one in taken if one.bare is not None]
            times = {
                "noticed": [one.noticed for one in taken], "started": [one.started for one in taken],
                "ready": [one.ready for one in taken], "bare start": bare,
            }  # fmt: skip
            row |= {"kills": len(taken), "not ready": self.missed[name]}
            for what, values in times.items():
                row |= {f"{what} p50 s": _at(values, 0.5), f"{what} p95 s": _at(values, 0.95)}
            beyond = _at(times["ready"], 0.5), _at(times["bare start"], 0.5)
            row["beyond a bare start p50 s"] = None if None in beyond else beyond[0] - beyond[1]  # type: ignore[operator]
            row |= {"samples dropped": sum(one.dropped for one in taken)}
            row |= {"samples lost": max((one.lost for one in taken), default=0)}
            found.append(row)
        return found


def _at(values: Sequence[float], share: float) -> float | None:
    if not values:
        return None
    return statistics.median(values) if share == 0.5 else sorted(values)[round(share * (len(values) - 1))]


def _alive(pid: int, besides: int = 0) -> int:
    """The process number where such a process lives, else 0."""
    return pid if pid and pid != besides and not gone(pid) else 0


def _started_at(pid: int) -> float:
    """Wall-clock time of a process's start; 0 where it has ended."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19])
    except OSError:
        return 0.0
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def _ledger(run: Running) -> tuple[int, int]:
    """Samples that were dropped so far, and those that no account has, as of the last step."""
    last = run.steps()[-1]
    issued, trained, dropped, held = (
        int(last[f"samples/{name}"]) for name in ("issued", "trained", "dropped", "in_flight")
    )
    return dropped, abs(issued - trained - dropped - held)


def measure(
    runner: str, recipe: Path, folder: Path, kills: int, seed: int, only: Sequence[str] = ()
) -> list[report.Row]:
    """Kill every kind so often, or `only` these; a row for each."""
    measured = Measured(runner, recipe, folder, seed)
    known = victims(runner)
    if unknown := sorted(set(only) - known.keys()):
        raise SystemExit(f"--kinds: {', '.join(unknown)}: the runner {runner} has {', '.join(known)}")
    kinds = {name: kind for name, kind in known.items() if not only or name in only}
    for first in range(0, kills, ROUNDS):
        measured.kill_each(kinds, min(ROUNDS, kills - first))
    return measured.rows(kinds)


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--runners", nargs="+", default=["local", "ray"])
    parser.add_argument("--kills", type=int, default=20, help="of each kind of process")
    parser.add_argument("--kinds", nargs="+", default=[], help="only these, named as in the table")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    set_up = report.begin(options)
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as folder:
        recipe = built(Path(folder) / "recipe", 0)
        rows = [
            row
            for runner in options.runners
            for row in measure(runner, recipe, Path(folder), options.kills, options.seed, options.kinds)
        ]
    report.finish("recovery", set_up, rows, options)
