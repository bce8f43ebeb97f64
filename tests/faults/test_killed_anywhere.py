# SPDX-License-Identifier: Apache-2.0
"""Deterministic runs whose processes are killed one after another end with the weights of a run that nobody touched.

Seeds choose the order of the victims and the steps; each fault is repaired on its own tier: in place, or by `relax resume`.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from relax_core.views.run import health, open_run
from tests.faults.conftest import LONG
from tests.graph.conftest import survivors
from tests.graph.exact import EXACT, assert_ends_like
from tests.graph.gated import gated, open_gate, shut
from tests.graph.ray_run import Running, Start, children, kill, named, until


def test_a_local_run_that_is_killed_anywhere_ends_with_the_same_weights(
    start: Start, tiny: Path, tmp_path: Path, whole: Path
) -> None:
    random, path = Random(0), tmp_path / "run"
    shut(path, 13)  # beyond the last step at which it is struck
    run = start.train(path, tiny / "recipe.toml", *EXACT, *LONG, *gated(path), "run.runner=local")
    victims: list[Callable[[], int]] = [
        lambda: int(run.fact("rollout", "engines")["engine-0"]["pid"]),
        lambda: int(run.fact("actor", "ranks")["actor-rank-0"]),
        lambda: named(run.process.pid, "reward-exact-0")[-1],
    ]
    random.shuffle(victims)
    for victim, step in zip(victims, sorted(random.sample(range(1, 8), len(victims))), strict=True):
        run.until_steps(step)
        kill(victim())

    run.until_steps(random.randrange(8, 10))
    spared = _pids(run) - {*named(run.process.pid, "actor-rank-0")}  # the status may lag behind

    def ended() -> bool:
        """Kill the rank, and each that is started in its place, until the run gives that up."""
        for pid in _pids(run) - spared:
            spared.add(pid)
            with contextlib.suppress(ProcessLookupError):
                kill(pid)
        return run.process.poll() is not None

    until(ended, lambda: f"the run ends\n{run.err}")
    assert run.end() == 4 and f"relax resume {path}" in run.err, run.err

    run = start(path, "resume", path)
    run.until_steps(random.randrange(10, 13))
    _until_a_checkpoint(path)
    run.kill()
    until(lambda: survivors(tmp_path) == [], "processes are gone")
    assert health(open_run(path), time.time()).state == "lost"
    left = list(Path("/dev/shm").glob(f"relax-{run.status()['run_id']}*"))
    (path / "ledger.db").write_bytes(b"what a failing disk made of it" * 1000)
    (path / "ledger.db-wal").unlink()  # else sqlite finds every page of so young a ledger there
    open_gate(path)
    resumed = start(path, "resume", path, "--json")
    assert resumed.end() == 0, resumed.err
    fault = re.escape(f"{path}/ledger.db is corrupted (file is not a database)")
    assert re.search(rf"{fault}: .* the copy in .*/checkpoints/step-0000\d\d\n", resumed.err)
    assert_ends_like(whole, path, resumed.summary())
    # Any run that starts sweeps what dead ones left: maybe this one, maybe a neighbour before it was looked at.
    assert not [folder for folder in left if folder.exists()]


@pytest.mark.ray
def test_a_run_on_ray_that_is_killed_anywhere_ends_with_the_same_weights(
    start: Start, tiny: Path, tmp_path: Path, whole: Path
) -> None:
    """What dies in place is replaced; the hub's death ends the run, which is resumed."""
    random, path = Random(1), tmp_path / "run"
    shut(path, 11)  # beyond the last step at which it is struck
    run = start.train(path, tiny / "recipe.toml", *EXACT, *LONG, *gated(path))
    victims: list[Callable[[], int]] = [
        lambda: int(run.fact("rollout", "engines")["engine-0"]["pid"]),
        lambda: named(run.pid("rollout"), "reward-exact-0")[-1],
        lambda: run.pid("advantages"),
        lambda: run.pid("actor"),
    ]
    random.shuffle(victims)
    for victim, step in zip(victims, sorted(random.sample(range(1, 6), len(victims))), strict=True):
        run.until_steps(step)
        kill(victim())
    run.until_steps(6)
    until(
        lambda: '"event":"role recovered","role":"actor"' in (path / "events.jsonl").read_text(), "the actor goes back"
    )
    _until_a_checkpoint(path)
    children(run.process.pid, "ray::Hub")[0].kill()
    assert run.end() == 4, run.err
    assert "hub died" in run.err and f"relax resume {path}" in run.err
    restarts = run.summary()["restarts"]
    assert restarts.get("run") is None and restarts["actor"] == 1, restarts

    resumed = start(path, "resume", path)
    until(lambda: resumed.status().get("pid") == resumed.process.pid, "the status is of this start")
    kill(int(resumed.fact("actor", "ranks")["actor-rank-0"]))
    resumed.until_steps(11)
    children(resumed.process.pid, "ray::Hub")[0].kill()
    assert resumed.end() == 4, resumed.err
    open_gate(path)
    again = start(path, "resume", path, "--json")
    assert again.end() == 0, again.err
    assert_ends_like(whole, path, again.summary())
    assert again.summary()["restarts"]["actor"] >= 1


def _until_a_checkpoint(run: Path) -> None:
    """Steps may be faster than the disk."""
    until(lambda: any((run / "checkpoints").glob("step-*/state.json")), "a checkpoint")


def _pids(run: Running) -> set[int]:
    return {child.pid for child in children(run.process.pid, "")}
