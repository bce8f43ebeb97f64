# SPDX-License-Identifier: Apache-2.0
"""Deterministic runs whose processes are killed one after another end with the weights of a run that nobody touched.

Seeds choose the order of the victims and the steps; each fault is repaired on its own tier: in place, by a restart of the
whole run, and by `relax resume`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from tests.graph.conftest import relax_in, survivors
from tests.graph.gated import gated, open_gate, shut
from tests.graph.ray_run import Running, Start, children, kill, until

STEPS = 16
EXACT = ("rollout.prompts_per_step=4", "rollout.group_size=4", f"steps={STEPS}", "checkpoint.every=4", "deterministic=true",
         "max_staleness=0", "placement=colocate", "checkpoint.keep=99")  # fmt: skip


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of the run that nobody touched."""
    folder = tmp_path_factory.mktemp("whole")
    with relax_in(folder) as relax:
        ran = relax(
            "train", tiny / "recipe.toml", "run.runner=local", "eval.every=0", *EXACT, *gated(folder / "run"),
            "--run-dir", folder / "run",
        )  # fmt: skip
    assert ran.code == 0, ran.err
    return (folder / "run/export/model.safetensors").read_bytes()


def test_a_local_run_that_is_killed_anywhere_ends_with_the_same_weights(
    start: Start, tiny: Path, tmp_path: Path, whole: bytes
) -> None:
    random, path = Random(0), tmp_path / "run"
    shut(path, 13)  # beyond the last step at which it is struck
    run = start.train(path, tiny / "recipe.toml", *EXACT, *gated(path), "run.runner=local")
    victims: list[Callable[[], int]] = [
        lambda: int(run.fact("rollout", "engines")["engine-0"]["pid"]),
        lambda: int(run.fact("actor", "ranks")["actor-rank-0"]),
        lambda: next(pid for pid in _pids(run, "runners.local.child") if pid not in _known(run)),  # a reward's
    ]
    random.shuffle(victims)
    for victim, step in zip(victims, sorted(random.sample(range(1, 8), len(victims))), strict=True):
        run.until_steps(step)
        kill(victim())

    run.until_steps(random.randrange(8, 10))
    spared = _pids(run) - {*_named(run, "actor-rank-0")}  # the status may lag behind

    def restarted() -> bool:
        """Kill the rank, and each that is started in its place, until the run gives that up."""
        started = _pids(run) - spared
        if run.status().get("restarts", {}).get("run"):  # said before a process of the next start is there
            return True
        for pid in started:
            spared.add(pid)
            with contextlib.suppress(ProcessLookupError):
                kill(pid)
        return False

    until(restarted, lambda: f"the whole run restarts\n{run.err}")
    assert "quickstart restarts after step" in run.err

    run.until_steps(random.randrange(10, 13))
    run.kill()
    until(lambda: survivors(tmp_path) == [], "processes are gone")
    open_gate(path)
    _ends_like(whole, start(path, "resume", path, "--json"))


@pytest.mark.parametrize("every", [2, 0], ids=["from a checkpoint", "from the beginning"])
def test_a_run_that_restarts_as_a_whole_goes_on_with_the_engine_and_the_ranks_that_are_well(
    start: Start, tiny: Path, tmp_path: Path, every: int
) -> None:
    path = tmp_path / "run"
    run = start.train(
        path, tiny / "recipe.toml", "rollout.prompts_per_step=4", "rollout.group_size=4", "steps=400",
        f"checkpoint.every={every}", "run.runner=local", "placement=async", "algorithm.kl_coef=0.01",
    )  # fmt: skip
    run.until_steps(3)
    well = _named(run, "engine-0") + _named(run, "reference-rank-0")
    assert len(well) == 2

    def restarted() -> bool:
        if run.status().get("restarts", {}).get("run"):
            return True
        for pid in _named(run, "actor-rank-0"):
            with contextlib.suppress(ProcessLookupError):
                kill(pid)
        return False

    until(restarted, lambda: f"the whole run restarts\n{run.err}")
    run.until_steps(len(run.steps()) + 4)
    assert _named(run, "engine-0") + _named(run, "reference-rank-0") == well
    run.interrupt()
    assert run.end() == 130, run.err
    summary = run.summary()
    assert (summary["status"], summary["balanced"], summary["restarts"]["run"]) == ("stopped", True, 1)
    assert [row["step"] for row in run.steps()] == list(range(1, summary["steps"] + 1))
    assert survivors(tmp_path) == []


@pytest.mark.ray
def test_a_run_on_ray_that_is_killed_anywhere_ends_with_the_same_weights(
    start: Start, tiny: Path, tmp_path: Path, whole: bytes
) -> None:
    """The hub's death ends a run that may not restart; resumed, it survives that of the owner of its workers."""
    random, path = Random(1), tmp_path / "run"
    shut(path, 12)  # beyond the last step at which it is struck
    run = start.train(path, tiny / "recipe.toml", *EXACT, *gated(path), "recovery.restarts=0")
    victims: list[Callable[[], int]] = [
        lambda: int(run.fact("rollout", "engines")["engine-0"]["pid"]),
        lambda: children(run.pid("rollout"), "runners.local.child")[0].pid,  # a reward's
        lambda: run.pid("advantages"),
        lambda: run.pid("actor"),
    ]
    random.shuffle(victims)
    for victim, step in zip(victims, sorted(random.sample(range(1, 6), len(victims))), strict=True):
        run.until_steps(step)
        kill(victim())
    run.until_steps(6)
    children(run.process.pid, "ray::Hub")[0].kill()
    assert run.end() == 4, run.err
    assert "hub died" in run.err and f"relax resume {path}" in run.err
    restarts = run.summary()["restarts"]
    assert restarts.get("run") is None and restarts["actor"] == 1, restarts

    resumed = start(path, "resume", path, "recovery.restarts=1", "--json")
    until(lambda: resumed.status().get("pid") == resumed.process.pid, "the status is of this start")
    kill(int(resumed.fact("actor", "ranks")["actor-rank-0"]))
    resumed.until_steps(random.randrange(9, 12))
    children(resumed.process.pid, "ray::WorkerOwner")[0].kill()
    open_gate(path)
    summary = _ends_like(whole, resumed)
    assert summary["restarts"]["run"] == 1 and summary["restarts"]["actor"] >= 1


def _pids(run: Running, word: str = "") -> set[int]:
    return {child.pid for child in children(run.process.pid, word)}


def _named(run: Running, name: str) -> list[int]:
    """Worker processes by the beginning of their name, which the system cuts to 15 characters."""
    found = []
    for child in children(run.process.pid, ""):
        with contextlib.suppress(psutil.NoSuchProcess):
            if Path(f"/proc/{child.pid}/comm").read_text().startswith(name[:15]):
                found.append(child.pid)
    return found


def _known(run: Running) -> set[int]:
    return {int(run.fact("rollout", "engines")["engine-0"]["pid"]), int(run.fact("actor", "ranks")["actor-rank-0"])}


def _ends_like(whole: bytes, run: Running) -> dict[str, Any]:
    """Require the weights of the other run, and that each sample counts at most once."""
    assert run.end() == 0, run.err
    summary = run.summary()
    assert summary["steps"] == STEPS and summary["balanced"]
    assert summary["samples_trained"] == STEPS * 16
    assert [row["step"] for row in run.steps()] == list(range(1, STEPS + 1))
    assert (run.path / "export/model.safetensors").read_bytes() == whole
    return summary
