# SPDX-License-Identifier: Apache-2.0
"""Runs on Ray keep to themselves: two on one cluster, killed drivers, Ctrl-C; nobody leaves anything behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.graph.conftest import survivors
from tests.graph.ray_run import SHORT, Running, Start, children, kill, until
from tests.graph.terminal import Terminal
from tests.unit.ray.cluster import ForeignCluster

pytestmark = pytest.mark.ray
LOOK = """
import json, logging, ray
ray.init(namespace="relax", log_to_driver=False, logging_level=logging.ERROR)
from ray import serve
from ray.util import list_named_actors
from ray.util.placement_group import placement_group_table
groups = [group["state"] for group in placement_group_table().values()]
actors = [actor["name"] for actor in list_named_actors(all_namespaces=True)]
hubs = {name: ray.get_actor(name) for name in (actor["name"] for actor in list_named_actors(all_namespaces=True))
        if name.endswith("-hub")}
pids = {name: ray.get(hub.__ray_call__.remote(lambda _: __import__("os").getpid())) for name, hub in hubs.items()}
print(json.dumps({"hubs": pids, "apps": sorted(serve.status().applications), "actors": sorted(actors), "groups": groups}))
"""


@pytest.fixture
def cluster() -> Iterator[ForeignCluster]:
    with ForeignCluster() as foreign:
        yield foreign


@pytest.fixture
def detached(tmp_path: Path) -> Iterator[Path]:
    """The directory of a detached run, whose processes end with the test however that ends."""
    path = tmp_path / "a" / "run"
    yield path
    for name in ("supervisor", "status"):
        document = path / f"{name}.json"
        with contextlib.suppress(ProcessLookupError):
            os.kill(json.loads(document.read_text())["pid"] if document.exists() else 1 << 22, signal.SIGKILL)


def test_a_detached_run_outlives_its_controller_on_a_cluster_that_it_shares_and_is_stopped_from_elsewhere(
    cluster: ForeignCluster, start: Start, tiny: Path, tmp_path: Path, detached: Path
) -> None:
    """It is resumed from its newest checkpoint when its controller is killed, and when its hub is."""
    env = cluster.environment()
    detached.parent.mkdir()
    words = ("train", tiny / "recipe.toml", *SHORT, "steps=5000", "checkpoint.every=2", "--run-dir", detached)
    terminal = Terminal(detached.parent, *words, **env)
    terminal.shows("stop:  relax stop")
    terminal.shown = ""  # what comes from here on is shown to who watches
    terminal.shows("reward")
    terminal.types("\x03")
    terminal.shows("[d]etach")
    terminal.types("\n")
    assert terminal.ends() == 130 and "detached; the run continues" in terminal.shown, terminal.shown
    first = watch = start(detached, "attach", detached, **env)
    until(lambda: any((detached / "checkpoints").glob("step-*/state.json")), "a checkpoint")
    second = start.train(tmp_path / "b" / "run", tiny / "recipe.toml", "steps=5000", **env)
    second.until_steps(1)
    found = _found(env)
    assert len(found["apps"]) == 6, "two runs of one name are two runs"
    names = [name.removesuffix("-hub") for name in found["actors"] if name.endswith("-hub")]
    assert len(names) == 2 and any((Path("/dev/shm") / name).exists() for name in names)

    kill(killed := first.status()["pid"])
    second.until_more_steps()
    _until_another_controls(first, killed)
    until(lambda: first.steps()[-1].get("restarts/run") == 1, "a step of the resumed run")
    rows = first.steps()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "none is lost and none trained twice"

    killed = first.status()["pid"]
    (hub,) = (pid for name, pid in _found(env)["hubs"].items() if first.status()["run_id"] in name)
    kill(hub)
    _until_another_controls(first, killed)
    second.until_more_steps()
    second.interrupt()
    assert second.end() == 130 and "stopped with a checkpoint" in second.err, second.err
    for row in second.steps():
        assert row["samples/balanced"] == 1
    assert second.summary()["restarts"] == {}
    stop = start(detached, "stop", detached, **env)
    assert stop.end() == 0 and "stopped with a checkpoint of step" in stop.out, stop.err
    assert watch.end() == 130 and "stopped with a checkpoint of step" in watch.err, watch.err
    summary = first.summary()
    assert summary["restarts"] == {"run": 2} and summary["balanced"]
    assert [row["step"] for row in first.steps()] == list(range(1, summary["steps"] + 1))
    left = until(lambda: (found := _found(env))["apps"] == [] and found, lambda: str(_found(env)), 30)
    assert [name for name in left["actors"] if "relax" in name] == []
    assert set(left["groups"]) <= {"REMOVED"}
    assert cluster.alive
    assert not [name for name in names if (Path("/dev/shm") / name).exists()]


def test_a_detached_run_on_a_cluster_of_its_own_outlives_its_controller_and_then_its_cluster(
    start: Start, tiny: Path, tmp_path: Path, detached: Path
) -> None:
    """The controller dies, and its cluster with it; then the hub."""
    assert start.train(detached, tiny / "recipe.toml", "steps=5000", "checkpoint.every=2", "--detach").end() == 0
    run = start(detached, "attach", detached)
    until(lambda: any((detached / "checkpoints").glob("step-*/state.json")), "a checkpoint")
    supervisor = json.loads((detached / "supervisor.json").read_text())["pid"]
    kill(killed := run.status()["pid"])
    _until_another_controls(run, killed)
    until(lambda: run.steps()[-1].get("restarts/run") == 1, lambda: f"a start on another cluster\n{run.err}")
    children(supervisor, "ray::Hub")[0].kill()
    until(lambda: run.steps()[-1].get("restarts/run") == 2, lambda: f"a start with another hub\n{run.err}")
    stop = start(detached, "stop", detached)
    assert stop.end() == 0 and "stopped with a checkpoint of step" in stop.out, stop.err
    assert run.end() == 130, run.err
    summary = run.summary()
    assert summary["restarts"] == {"run": 2} and summary["balanced"]
    assert [row["step"] for row in run.steps()] == list(range(1, summary["steps"] + 1))
    until(lambda: survivors(tmp_path) == [], lambda: str(survivors(tmp_path)), 30)


def _until_another_controls(run: Running, killed: int) -> None:
    until(lambda: run.status()["pid"] != killed and run.status()["state"] == "running", "a successor")
    reached = len(run.steps())
    until(lambda: len(run.steps()) > reached, "its steps")


def test_a_killed_driver_takes_its_own_cluster_with_it(start: Start, tiny: Path, tmp_path: Path) -> None:
    run = start.train(tmp_path / "run", tiny / "recipe.toml", "steps=2000")
    run.until_steps(1)
    run.kill()
    until(lambda: survivors(tmp_path) == [], lambda: str(survivors(tmp_path)), 15)


def test_ctrl_c_while_ray_starts_ends_the_run(start: Start, tiny: Path, tmp_path: Path) -> None:
    run = start.train(tmp_path / "run", tiny / "recipe.toml", "steps=2000")
    until(lambda: children(run.process.pid, "raylet"), "a raylet")
    run.interrupt()
    assert run.end() == 130, run.err
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
    theirs = [
        line for line in run.err.splitlines() if "(raylet)" in line or "serve" in line.lower() or "Traceback" in line
    ]
    assert theirs == [], "nothing of Ray's own is on the terminal"


def _found(env: dict[str, str]) -> Any:
    """What is on a cluster, seen by a process that leaves at once."""
    from tests.graph.conftest import environment

    done = subprocess.run(
        [sys.executable, "-c", LOOK], env=environment(**env), capture_output=True, text=True, timeout=600, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])
