# SPDX-License-Identifier: Apache-2.0
"""Runs on Ray keep to themselves: two on one cluster, killed drivers, Ctrl-C; nobody leaves anything behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.graph.conftest import survivors
from tests.graph.ray_run import Start, children, until
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
print(json.dumps({"apps": sorted(serve.status().applications), "actors": sorted(actors), "groups": groups}))
"""


@pytest.fixture
def cluster() -> Iterator[ForeignCluster]:
    with ForeignCluster() as foreign:
        yield foreign


def test_a_killed_run_leaves_the_cluster_and_its_neighbour_unhurt(
    cluster: ForeignCluster, start: Start, tiny: Path, tmp_path: Path
) -> None:
    env = cluster.environment()
    first = start.train(tmp_path / "a" / "run", tiny / "recipe.toml", "steps=2000", **env)
    second = start.train(tmp_path / "b" / "run", tiny / "recipe.toml", "steps=80", **env)
    first.until_steps(1)
    second.until_steps(1)
    found = _found(env)
    assert len(found["apps"]) == 6, "two runs of one name are two runs"
    names = [name.removesuffix("-hub") for name in found["actors"] if name.endswith("-hub")]
    assert len(names) == 2 and any((Path("/dev/shm") / name).exists() for name in names)
    first.kill()
    assert len(second.steps()) < 80, "it goes on without its neighbour"
    assert second.end() == 0, second.err
    for row in second.steps():
        assert row["samples/balanced"] == 1
    assert second.summary()["restarts"] == {}
    left = until(lambda: (found := _found(env))["apps"] == [] and found, lambda: str(_found(env)), 30)
    assert [name for name in left["actors"] if "relax" in name] == []
    assert set(left["groups"]) <= {"REMOVED"}
    assert cluster.alive
    assert not [name for name in names if (Path("/dev/shm") / name).exists()]


def test_a_killed_driver_takes_its_own_cluster_with_it(start: Start, tiny: Path, tmp_path: Path) -> None:
    run = start.train(tmp_path / "run", tiny / "recipe.toml", "steps=2000")
    run.until_steps(1)
    run.kill()
    until(lambda: survivors(tmp_path) == [], lambda: str(survivors(tmp_path)), 15)


def test_ctrl_c_while_ray_starts_ends_the_run(start: Start, tiny: Path, tmp_path: Path) -> None:
    run = start.train(tmp_path / "run", tiny / "recipe.toml", "steps=2000")
    until(lambda: children(run.process.pid, "raylet"), "a raylet")
    run.interrupt()
    assert run.end(60) == 130, run.err
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
    theirs = [
        line for line in run.err.splitlines() if "(raylet)" in line or "serve" in line.lower() or "Traceback" in line
    ]
    assert theirs == [], "nothing of Ray's own is on the terminal"


def _found(env: dict[str, str]) -> Any:
    """What is on a cluster, seen by a process that leaves at once."""
    from tests.graph.conftest import environment

    done = subprocess.run(
        [sys.executable, "-c", LOOK], env=environment(**env), capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])
