# SPDX-License-Identifier: Apache-2.0
"""A cluster of a run's own: nobody else reaches it, and it is started once more where Ray's node did not come up in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

STRANGER = """
import sys
from ray._raylet import GcsClient
print(GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=10))
"""
OWN = """
import asyncio, json, os, subprocess, sys
import psutil
from relax_core.runners.ray.cluster import Cluster
import ray

async def main():
    cluster = Cluster()
    await cluster.connect()
    addresses, me = set(), psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            listening = [each for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
        except psutil.Error:
            continue
        addresses |= {f"{process.name()} {each.laddr.ip}" for each in listening}
    at = ray.get_runtime_context().gcs_address
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    known = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.environ["RAY_AUTH_TOKEN"]}
    said = []
    for auth in (known, {"RAY_AUTH_MODE": "disabled"}, known | {"RAY_AUTH_TOKEN": "0" * 64}):
        asked = subprocess.run([sys.executable, "-c", sys.argv[1], at], env=plain | auth, capture_output=True, text=True)
        said.append([asked.returncode, asked.stdout + asked.stderr])
    await cluster.close()
    print(json.dumps({"addresses": sorted(addresses), "said": said}))

asyncio.run(main())
"""


@pytest.mark.faults
@pytest.mark.ray
def test_a_runs_cluster_listens_on_loopback_and_requires_its_token() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", OWN, STRANGER], env=env, capture_output=True, text=True, timeout=500, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["addresses"]
    assert not [one for one in found["addresses"] if not one.endswith(" 127.0.0.1") and not one.endswith(":127.0.0.1")]
    (known, _), *strangers = found["said"]
    assert known == 0, found["said"]
    for code, text in strangers:
        assert code != 0 and "InvalidAuthToken" in text, text


@pytest.mark.parametrize(
    ("errors", "tries"),
    [(["The current node timed out during startup."], 2), (["timed out during startup"] * 2, 2), (["no room"], 1)],
)
def test_a_node_that_does_not_come_up_in_time_is_started_once_more(
    monkeypatch: pytest.MonkeyPatch, errors: list[str], tries: int
) -> None:
    from relax_core.runners.ray.cluster import ray, start_cluster

    tried: list[dict[str, Any]] = []

    def init(**options: Any) -> None:
        tried.append(options)
        if len(tried) <= len(errors):
            raise Exception(errors[len(tried) - 1])

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    if len(errors) == 1 and tries == 2:
        start_cluster()()
    else:
        with pytest.raises(Exception, match=errors[-1]):
            start_cluster()
    assert len(tried) == tries
    assert all(options["address"] == "local" for options in tried)


def test_processes_older_than_ray_do_not_end_with_it() -> None:
    from relax_core.runners.ray.reaper import Reaper

    sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
    before = subprocess.Popen(sleeping)
    reaper = Reaper.start()
    rays = subprocess.Popen(sleeping)
    try:
        reaper.started()  # it looks once more before it hears of the end
        reaper.close()
        assert rays.wait(60) != 0
        assert before.poll() is None
    finally:
        for process in (before, rays):
            process.kill()
            process.wait()
