# SPDX-License-Identifier: Apache-2.0
"""Schedules of faults by seed: a run is begun, faults befall it, it is resumed as often as it must be, and has to get done.

A schedule draws a configuration and its faults from the seed alone. Faults come in the first seconds; after them the run
has to finish all of its steps, and nothing that a witness has seen may be wrong.
"""

from __future__ import annotations

import asyncio
import gc
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from relax_core.api.errors import ConfigError, InfrastructureError
from relax_core.api.run_commands import Stop
from relax_core.api.weights import Version
from relax_core.bus.ledger_file import prepare_ledger
from relax_core.config.compose import parse_config
from relax_core.observe.epoch import RunEpoch
from relax_core.roles.checkpoint import choose, complete, discard_partial
from relax_core.roles.step_trainer import RollbackRequired
from tests.chaos import components
from tests.chaos.simulation import Faults, NetworkFault, SeededLoop, Start, WorkerFault, copied
from tests.chaos.witness import PRESENT, Witness
from tests.unit.roles.simulated_run import SimulatedRun

HORIZON_S = 6.0
"""Faults come within so many virtual seconds: about as long as a schedule takes without any."""
AT_MOST_S = 3e4
"""Virtual seconds in which a schedule must be done."""
MAX_STARTS = 12
NUM_TASKS = 4
AGAIN_S = 0.7
"""From the end of a start that failed to its resume."""
CONSTANTS = {
    "relax_core.runners.context.HEARTBEAT_S": 5.0,
    "relax_core.roles.row_leases.RENEW_S": 5.0,
    "relax_core.engines.slot.START_S": 60.0,
    "relax_core.roles.rank_group.START_S": 60.0,
    "relax_core.roles.rank_group.DEVICE_LEASE_WAIT_S": 240.0,
}
"""Deadlines that are shortened so that a schedule is minutes and not hours of heartbeats."""
LEASE_S = 20.0
BASE: dict[str, Any] = {
    "steps": 2, "engine": {"name": "witnessed-engine", "longest": 3, "token_s": 0.25}, "trainer": "witnessed-trainer",
    "seed": 7, "checkpoint": {"every": 1}, "weights": {"name": "scripted-transport", "timeout_s": 10.0},
}  # fmt: skip
ROLLOUT = {"groups_per_step": 2, "group_size": 2, "max_new_tokens": 12, "step_timeout_s": 30.0}
TWO_ENGINES = {"mode": "hybrid", "rollout": {"engines": 2}}
SLOW = {"name": "witnessed-engine", "longest": 3, "token_s": 0.25, "straggler": 30, "straggles": 1 / 6}
VARIANTS: dict[str, Mapping[str, Any]] = {
    "hybrid": {"placement": TWO_ENGINES, "max_staleness": 1, "steps": 3},
    "on policy": {"placement": TWO_ENGINES, "max_staleness": 0, "steps": 3, "checkpoint": {"every": 2}},
    "stale": {
        "placement": TWO_ENGINES, "max_staleness": 2, "batch": {"stream": False}, "steps": 4, "checkpoint": {"every": 2},
    },
    "colocated": {"placement": "colocate", "max_staleness": 1},
    "draining": {"placement": TWO_ENGINES, "max_staleness": 1, "engine": "witnessed-draining-engine"},
    "reference": {"placement": "async", "max_staleness": 1, "algorithm": {"name": "grpo", "kl_coef": 0.1}},
    "two updates": {
        "placement": "async", "max_staleness": 1, "batch": {"updates_per_step": 2},
        "algorithm": {"name": "grpo", "correction": "truncate"},
    },
    "rolls back": {
        "placement": TWO_ENGINES, "max_staleness": 1, "optimizer": {"lr": 0.1, "not_finite": "roll-back"}, "steps": 3,
    },
    "late wait": {"placement": TWO_ENGINES, "max_staleness": 1, "engine": SLOW, "rollout": {"late": "wait"}},
    "late drop": {"placement": TWO_ENGINES, "max_staleness": 1, "engine": SLOW, "rollout": {"late": "drop"}},
    "late mask": {"placement": TWO_ENGINES, "max_staleness": 1, "engine": SLOW, "rollout": {"late": "mask"}},
    "late again": {"placement": TWO_ENGINES, "max_staleness": 1, "engine": SLOW, "rollout": {"late": "regenerate"}},
    "spares": {"placement": TWO_ENGINES, "max_staleness": 1, "engine": SLOW, "rollout": {"spare_groups": 1}},
    "seldom saved": {"placement": TWO_ENGINES, "max_staleness": 2, "steps": 5, "checkpoint": {"every": 4}},
    "critic": {"placement": "hybrid", "max_staleness": 1, "algorithm": "ppo", "steps": 3},
}  # fmt: skip

CALLS = (
    "register", "admit", "put", "put", "claim", "claim", "read", "write", "acknowledge", "trained", "trained", "report_held",
    "version", "checkpoint", "finalize", "rollback", "verify", "release", "announce", "newest", "route", "receipt",
    "needed", "acquire", "done", "poll", "serves", "emit", "heartbeat", "start",
)  # fmt: skip
REPEATABLE = frozenset((
    "put", "read", "acknowledge", "trained", "report_held", "version", "finalize", "verify", "release",
    "announce", "newest", "receipt", "needed", "serves", "register",
))  # fmt: skip
"""Calls whose answer may be lost and that a network may then deliver again."""
WORK = (
    "start", "load", "snapshot", "saved", "publish", "accumulate", "finish_update", "begin_step", "begin_update", "export",
    "update_weights", "update_weights", "health", "abort", "offload", "onload", "forward", "save",
)  # fmt: skip
WITHOUT_S = (0.0, 0.0, 0.5, 3.0, 30.0, 200.0)
"""From the death of a role's process to the start of the next one."""
DAMAGES = (
    "nothing",
    "nothing",
    "the newest checkpoint",
    "the ledger is lost",
    "the ledger is torn",
    "the ledger is older",
)
"""Of the disk, when the machine is lost."""
LIES = (*components.RECEIPTS, *components.GENERATED)


class Violation(AssertionError):
    """Something that must always hold did not."""


@dataclass
class Schedule:
    """What one seed draws; everything that happens is in `trace`."""

    seed: int
    variant: str
    faults: list[tuple[float, str, Any]]
    trace: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    starts: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, {self.variant}, {self.starts} starts, {self.seconds:.1f} virtual seconds"]
        drawn = [f"{at:9.2f}  drawn: {kind} {what}" for at, kind, what in self.faults]
        return "\n  ".join([*lines, *drawn, "---", *self.trace, *(f"WRONG: {wrong}" for wrong in self.problems)])


def drawn(seed: int) -> Schedule:
    """Draw a schedule: mostly two to four faults, sometimes a dozen."""
    random = Random(f"chaos {seed}")
    variant = random.choice(list(VARIANTS))
    count = random.choice((1, 2, 2, 3, 3, 4, 12))
    return Schedule(seed, variant, sorted((_fault(random) for _ in range(count)), key=lambda fault: fault[0]))


def _fault(random: Random) -> tuple[float, str, Any]:
    at = round(random.uniform(0.0, HORIZON_S), 2)
    kind = random.choices(
        (
            "network", "work", "kill", "actor", "hang", "lie", "expire", "role", "driver", "machine", "zombie", "slow disk",
            "full disk", "nan", "stop",
        ),
        (9, 7, 3, 5, 2, 3, 2, 7, 3, 4, 2, 2, 2, 2, 1),
    )[0]  # fmt: skip
    nth, seconds = random.choice((1, 1, 2, 4)), random.choice((0.3, 2.0, 9.0, 30.0))
    if kind == "network":
        method = random.choice(CALLS)
        how = random.choice(("lost request", "lost answer", "lost answer", "late request", "late answer", "twice"))
        if how == "twice" and method not in REPEATABLE:
            how = "lost answer"
        return at, kind, NetworkFault(at, method, how, nth=nth, seconds=seconds)
    if kind == "work":
        how = random.choice(("dies before", "dies after", "hangs", "is slow"))
        return at, kind, WorkerFault(at, random.choice(WORK), how, nth=nth, seconds=seconds)
    more = {
        "machine": random.choice(DAMAGES),
        "lie": random.choice(LIES),
        "slow disk": random.choice((0.2, 3.0)),
        "zombie": random.choice((0.5, 3.0)),
        "role": (random.random(), random.choice(WITHOUT_S)),
    }
    return at, kind, more.get(kind, random.random())


@cache
def prepared(variant: str) -> SimulatedRun:
    """Compose and plan a variant, once for all seeds."""
    settings = dict(BASE) | dict(VARIANTS[variant])
    settings["rollout"] = ROLLOUT | settings.get("rollout", {})
    folder = tempfile.TemporaryDirectory(prefix="chaos-tasks-", dir=_memory())
    made = SimulatedRun(Path(folder.name), [str(Path(components.__file__))], **settings)
    tasks = Path(str(made.launch.config["data"]["train"]))
    tasks.write_text("".join(tasks.read_text().splitlines(keepends=True)[:NUM_TASKS]))
    made.folder = folder  # type: ignore[attr-defined] -- removed with it
    made.parsed = parse_config(made.launch.config, made.catalogue)  # type: ignore[attr-defined]
    return made


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def run(seed: int) -> Schedule:
    """Run the schedule of a seed; its `problems` say what was wrong."""
    schedule = drawn(seed)
    base = prepared(schedule.variant)
    gc.collect()
    gc.freeze()
    gc.disable()  # what is collected when is part of what a seed replays
    directory = Path(tempfile.mkdtemp(prefix="chaos-", dir=_memory()))
    with shortened(base), asyncio.Runner(loop_factory=SeededLoop) as runner:
        PRESENT.clear()
        try:
            runner.run(_Performance(schedule, base, directory / "run").perform())
        except Violation as violation:
            schedule.problems.append(str(violation))
        except Exception as error:
            schedule.problems.append(f"{type(error).__name__}: {error}")
        finally:
            schedule.seconds = runner.get_loop().time()
            shutil.rmtree(directory, ignore_errors=True)
    return schedule


@contextmanager
def shortened(base: SimulatedRun) -> Any:
    config = base.parsed  # type: ignore[attr-defined]
    with ExitStack() as stack:
        for name, value in CONSTANTS.items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(mock.patch("relax_core.runners.context.parse_config", lambda *_: config))
        stack.enter_context(mock.patch("relax_core.runners.context.collected_seldom", _collected))
        yield


@contextmanager
def _collected() -> Iterator[None]:
    """Collect what earlier starts left, but never search what `run` has frozen: that took two thirds of a schedule."""
    gc.collect()
    yield


class _Performance:
    """The starts of one schedule, one after another, in one virtual time."""

    def __init__(self, schedule: Schedule, base: SimulatedRun, directory: Path) -> None:
        self._schedule, self._base, self._directory = schedule, base, directory
        self._faults, self._left, self._steps = Faults(), list(schedule.faults), int(base.launch.config["steps"])
        self._interrupted: asyncio.Future[str] | None = None
        self._copies = 0

    def note(self, what: str) -> None:
        self._schedule.trace.append(f"{asyncio.get_running_loop().time():9.2f}  {what}")

    async def perform(self) -> None:
        try:
            async with asyncio.timeout(AT_MOST_S):
                await self._perform()
        except TimeoutError:
            raise Violation(f"not done after {AT_MOST_S:.0f} virtual seconds") from None

    async def _perform(self) -> None:
        k, late = self._base.launch.plan.max_staleness, self._base.launch.config["rollout"]["late"]
        witness = Witness(int(k or 0), late == "mask").follow(Version("actor", 0, 0))
        striking = asyncio.create_task(self._strike())
        zombies: list[tuple[Start, asyncio.Task[Any]]] = []
        self._directory.mkdir(parents=True)
        launch = replace(self._base.launch, run_dir=str(self._directory), epoch=RunEpoch.begin(self._directory))
        try:
            while True:
                self._schedule.starts += 1
                if self._schedule.starts > MAX_STARTS:
                    raise Violation(f"not done after {MAX_STARTS} starts")
                calm = striking.done()
                version = Version("actor", launch.incarnation, launch.resume.step if launch.resume else 0)
                settings = replace(self._base.bus_settings, lease_s=LEASE_S)
                start = self._start = Start(
                    self._base.catalogue, launch, settings, version, witness, self._faults, self.note
                )
                how, error = await self._live(start)
                self.note(f"{how}: {error}" if error else how)
                if start.witness.problems:
                    raise Violation("; ".join(start.witness.problems))
                if how == "zombie":
                    zombies.append((start, asyncio.create_task(self._fade(start))))
                else:
                    await start.close()
                if how == "done" and start.bus.queue.version.step >= self._steps:
                    self._check_end(start)
                    return
                if isinstance(error, Exception) and not isinstance(error, InfrastructureError | RollbackRequired):
                    raise Violation(f"a start ended with {type(error).__name__}: {error}")
                if calm and how == "failed" and not zombies:
                    raise Violation(f"a start without faults failed: {error}")
                if how == "failed":
                    await asyncio.sleep(AGAIN_S)
                begun = self._resumed(start, how)
                if begun is None:
                    return
                launch, witness = begun
        finally:
            striking.cancel()
            await asyncio.gather(striking, return_exceptions=True)
            for start, fading in zombies:
                fading.cancel()
                await asyncio.gather(fading, return_exceptions=True)
                await start.close()
            if self._start is not None:
                await self._start.close()

    async def _live(self, start: Start) -> tuple[str, BaseException | None]:
        """Run a start until its roles end, fail, or the machine is lost."""
        self._interrupted = asyncio.get_running_loop().create_future()
        try:
            await start.open()
        except InfrastructureError as error:
            return "failed", error
        going = asyncio.create_task(start.run())
        try:
            await asyncio.wait({going, self._interrupted}, return_when=asyncio.FIRST_COMPLETED)
            if self._interrupted.done():
                return self._interrupted.result(), None
            found = going.result()
            start.check()
            return ("failed", found) if found is not None else ("done", None)
        finally:
            going.cancel()
            await asyncio.gather(going, return_exceptions=True)

    def _resumed(self, start: Start, how: str) -> tuple[Any, Witness] | None:
        """Go on from what the disk holds, as `relax resume` does; a run without a checkpoint begins anew.

        None where the last checkpoint has all steps of the run.
        """
        self._copies += 1
        damaged = False
        if how == "machine":
            self._directory = copied(self._directory, self._copies)
            damaged = self._damage(self._drawn)
        if not complete(self._directory / "checkpoints"):
            self.note("begins anew: there is no checkpoint")
            self._directory = self._directory.with_name(f"run-{self._copies}-anew")
            self._directory.mkdir()
            epoch = RunEpoch.begin(self._directory)
            launch = replace(self._base.launch, run_dir=str(self._directory), epoch=epoch)
            clean = Witness(start.witness.max_staleness, start.witness.masks, full=start.witness.full)
            return launch, clean.follow(Version("actor", 0, 0))
        try:
            point = choose(self._directory)
        except ConfigError as error:
            raise Violation(f"can't be resumed: {error}") from error
        epoch = RunEpoch.begin(self._directory)
        discard_partial(self._directory)
        resume = point.resume
        ledger = prepare_ledger(self._directory, Path(resume.directory), resume.step, int(resume.state["incarnation"]))
        if bool(point.notices or ledger.notice) != damaged:
            raise Violation(f"the disk was {'' if damaged else 'not '}damaged: {point.notices} {ledger.notice}")
        point.set_aside()
        version = Version("actor", ledger.newest_incarnation + 1, resume.step)
        if version.incarnation in start.witness.published:
            raise Violation(f"weights were published under incarnation {version.incarnation} before")
        witness = start.witness.follow(version)
        witness.full = start.witness.full
        self._check_covered(Path(resume.directory), resume.step, witness)
        if resume.step >= self._steps:  # `relax resume` refuses: nothing is left to do
            return None
        self.note(f"resumed at {version}")
        launch = replace(
            self._base.launch, run_dir=str(self._directory), incarnation=version.incarnation, resume=resume, epoch=epoch
        )
        return launch, witness

    def _damage(self, what: str) -> bool:
        """Damage what the lost machine's disk holds, as far as a run is to survive it; tell whether that was done."""
        checkpoints, ledger = complete(self._directory / "checkpoints"), self._directory / "ledger.db"
        if what == "nothing" or not checkpoints or (len(checkpoints) == 1 and what not in DAMAGES[3:5]):
            return False
        self.note(f"damaged: {what}")
        if what == "the newest checkpoint":
            (checkpoints[-1] / "trainer" / "step").write_text("77")
            return True
        for log in ("-wal", "-shm"):  # the log of so young a ledger has every page of it
            ledger.with_name(f"ledger.db{log}").unlink(missing_ok=True)
        if what == "the ledger is torn":
            ledger.write_bytes(ledger.read_bytes()[:5000])
        elif what == "the ledger is older":
            shutil.copy(checkpoints[-2] / "ledger.db", ledger)
        else:
            ledger.unlink()
        return True

    def _check_covered(self, checkpoint: Path, step: int, witness: Witness) -> None:
        """Compare the ids in a checkpoint's ledger with those that were trained."""
        with closing(sqlite3.connect(checkpoint / "ledger.db")) as db:
            rows = db.execute("SELECT step, number, sample, issue FROM ended WHERE reason = '' AND step IS NOT NULL")
            found: dict[int, set[tuple[int, int, int]]] = {}
            for at, *attempt in rows:
                found.setdefault(at, set()).add(tuple(attempt))
        for at, attempts in found.items():
            want = {tuple(one) for one in witness.lineage.get(at, ())}
            if at > step or attempts != want:
                raise Violation(f"{checkpoint.name}: step {at} has {sorted(attempts)}, trained were {sorted(want)}")

    def _check_end(self, start: Start) -> None:
        steps = sorted(start.witness.lineage)
        if steps != list(range(1, self._steps + 1)):
            raise Violation(f"trained steps are {steps}")
        last = complete(self._directory / "checkpoints")[-1]
        self._check_covered(last, self._steps, start.witness)
        if start.witness.problems:
            raise Violation("; ".join(start.witness.problems))

    async def _fade(self, zombie: Start) -> None:
        """Let a start that another has taken the place of live on for a while, cut off from new workers."""
        zombie.cut_off()
        await asyncio.sleep(self._drawn)
        await zombie.close()

    # -- faults -------------------------------------------------------------------------------------------------

    async def _strike(self) -> None:
        for at, kind, what in self._left:
            await asyncio.sleep(max(0.0, at - asyncio.get_running_loop().time()))
            await self._strike_once(kind, what)
        await asyncio.sleep(10.0)
        self._faults.network.clear()  # nothing befalls the run any more
        self._faults.workers.clear()
        self._start.witness.lies.clear()
        self._start.witness.not_finite = 0

    async def _strike_once(self, kind: str, what: Any) -> None:
        start = self._start
        if kind == "network":
            self._faults.network.append(what)
            return
        if kind == "work":
            self._faults.workers.append(what)
            self.note(f"{what.worker or 'any worker'} {what.kind} in call {what.nth} of {what.method}")
            return
        workers = start.living() if kind in ("kill", "actor", "hang") else []
        if kind == "actor":  # where a rollback begins
            workers, what = [found for found in workers if found[1] == "actor"], 0.0
        if workers:
            name, _, worker = workers[int(what * len(workers))]
            self.note(f"{name}: {kind}")
            worker.hang() if kind == "hang" else await worker.kill()
        elif kind == "lie":
            self.note(f"an engine tells {what}")
            start.witness.lies.append(what)
        elif kind == "nan":
            self.note("an update is NaN")
            start.witness.not_finite += 1
        elif kind == "expire" and hasattr(start, "bus"):
            for lease in start.bus.queue.leases.out.values():
                self.note(f"lease {lease.number} of {lease.task} runs out")
                lease.expires = asyncio.get_running_loop().time()
        elif kind == "role" and start.processes:
            which, without_s = what
            name = sorted(start.processes)[int(which * len(start.processes))]
            if await start.lose_role(name, without_s):
                self.note(f"the process of {name} is lost with its workers, for {without_s:g} s")
        elif kind in ("machine", "driver", "zombie", "stop") and self._interrupted is not None and start.tasks:
            if kind == "stop":
                self.note("told to stop")
                for role in start.roles:
                    await start.run_status.command(role, Stop())
            elif not self._interrupted.done():
                self._drawn = what
                self._interrupted.set_result(kind)
        elif kind == "slow disk":
            self.note(f"the disk takes {what} s")
            loop = asyncio.get_running_loop()
            loop.disk_s = what  # type: ignore[attr-defined]
            loop.call_later(3.0, setattr, loop, "disk_s", 0.0)
        elif kind == "full disk":
            self.note("the disk is full")
            start.witness.full = True
            asyncio.get_running_loop().call_later(1.0, self._free)

    def _free(self) -> None:
        self.note("the disk has room")
        for witness in PRESENT:
            witness.full = False
