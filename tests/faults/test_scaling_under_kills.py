# SPDX-License-Identifier: Apache-2.0
"""A real run grows and shrinks under load while its engines are killed and lie about their weights: nothing is lost.

A seed chooses the operations, the moments and the victims. Engines write down what they proved and served.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from relax_core.api.run_commands import ScaleRequest, Stop
from relax_core.control_api.operations import Refused
from relax_core.control_api.run_control import RunControl
from relax_core.engines.scaling import PoolScaling
from relax_core.views.run import open_run
from tests.faults import diary_engine
from tests.graph.conftest import SMALL
from tests.graph.ray_run import Running, Start, kill, until

OPERATIONS, MOST = 50, 4
"""Operations that move engines, and the most engines of a target."""
SETTINGS = (
    *SMALL, "steps=1000000", "run.runner=local", "checkpoint.every=0", "placement=hybrid", "max_staleness=1",
    "optimizer.lr=1e-5", "recovery.restarts=1000", f'plugins=["{diary_engine.__file__}"]', "engine=diary-engine",
)  # fmt: skip


@pytest.mark.timeout(3000)
def test_fifty_operations_among_kills_lose_nothing_and_no_unproved_engine_serves(
    start: Start, tiny: Path, tmp_path: Path
) -> None:
    random, path, diary = Random(0), tmp_path / "run", tmp_path / "diary"
    diary.mkdir()
    run = start(path, "train", tiny / "recipe.toml", *SETTINGS, "--run-dir", path, DIARY=str(diary))
    run.until_steps(2)
    control, ends = RunControl(open_run(path)), Counter[str]()
    while ends.total() < OPERATIONS:
        if random.random() < 0.3:
            (diary / diary_engine.LIE).touch()
        ended = operate(run, control, random)
        ends.update([ended] if ended else [])
        run.until_more_steps(1)
    (diary / diary_engine.LIE).unlink(missing_ok=True)

    def alone() -> bool:
        with contextlib.suppress(Refused):
            control.ask(ScaleRequest(key := uuid.uuid4().hex, target=1), key)
        time.sleep(1.0)
        pool = pool_of(control)
        return pool.engines == ["engine-0"] and pool.open is None

    until(alone, "one engine is left")
    run.until_more_steps(2)
    assert control.change(Stop(), 120.0)["state"] == "done"
    assert run.end() == 130, run.err
    summary = open_run(path).summary()
    assert summary["balanced"] is True and summary["samples_trained"] and summary["max_lag"] <= 1
    for record in run.steps():
        issued, *parts = (record[f"samples/{name}"] for name in ("issued", "trained", "dropped", "in_flight"))
        assert issued == sum(parts), record["step"]
    assert {"active", "completed", "failed"} <= set(ends), ends
    check_diaries(diary)


def operate(run: Running, control: RunControl, random: Random) -> str:
    """Ask for one change, kill engines meanwhile, and wait; return the end of its operation, or nothing if none moved."""
    try:
        change = request(pool_of(control), random)
        asked, _ = control.ask(change, change.key)
    except Refused:
        return ""  # the status lags behind the pool
    for _ in range(random.randint(0, 2)):
        time.sleep(random.random())
        engines = [int(one["pid"]) for one in run.role("rollout")["facts"]["engines"].values() if one["pid"]]
        if engines:
            with contextlib.suppress(ProcessLookupError):
                kill(random.choice(engines))

    def ended() -> bool:
        control.settle()
        return control.book.operations[asked.id].state != "requested"

    until(ended, lambda: f"{asked} ends: {pool_of(control).plain()}\n{run.err}")
    found = pool_of(control).find(change.key)
    return str(found.state) if found is not None and found.engines else ""


def request(pool: PoolScaling, random: Random) -> ScaleRequest:
    """Choose a change: an engine or the node leaves, or the pool gets a number of engines."""
    free, chance, key = [name for name in pool.engines if name not in pool.protected], random.random(), uuid.uuid4().hex
    if free and chance < 0.3:
        return ScaleRequest(key, engine=random.choice(free))
    if free and chance < 0.4:
        return ScaleRequest(key, "", node=pool.nodes.get(free[0], ""))
    return ScaleRequest(key, target=random.randint(1, MOST), keep_partial=random.random() < 0.5)


def pool_of(control: RunControl) -> PoolScaling:
    """Return the pool's state machine, which the status lacks while the rollout starts."""
    return until(lambda: control.facts().pools.get("rollout"), "the rollout shows its pool")


def check_diaries(folder: Path) -> None:
    """Check that each process served only versions that it proved, and nothing after a lie.

    The first tokens of a version may precede its proof, which comes before any other load; the router holds them until
    then. A process that was killed meanwhile has no proof, and its router drops them.
    """
    diaries, lied = list(folder.iterdir()), 0
    for diary in diaries:
        proved, early, lies = {0}, set[int](), False  # each engine starts with the model's folder, which is version 0
        for line in diary.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                continue  # the process was killed as it wrote
            what, step = json.loads(line)
            if what == "proved":
                proved.add(step)
                assert early <= proved, f"{diary.name} served versions {early - proved}, which it has not proved"
            assert not (lies and what in ("call", "tokens")), f"{diary.name} serves after its lie"
            early |= {step} if what == "tokens" else set()
            lies |= what == "lied"
            assert len(early - proved) <= 1, f"{diary.name} serves versions {early - proved}, which it has not proved"
        lied += lies
    assert len(diaries) > MOST and lied, "engines joined, and one of them lied"
