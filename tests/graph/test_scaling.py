# SPDX-License-Identifier: Apache-2.0
"""A live run with real engines grows and shrinks, by its policy and by a person, and accounts for every sample."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from relax_plugin_control.server import ControlServer

from relax_core.rpc.host import free_port
from relax_core.views.run import open_run
from tests.graph.conftest import SMALL, Relax
from tests.graph.ray_run import Start, until

pytestmark = pytest.mark.process
TOKEN = "0123456789abcdef"
PAIR = """
import time

from relax_core.api import Proposal, Reward, ScalingPolicy

class Pair(ScalingPolicy):
    def decide(self, state, signals, now):
        return None, Proposal(2, "one engine is alone") if signals.size == 1 else None

class Slow(Reward):
    def score(self, task, trajectory):
        time.sleep(0.1)  # else the run computes hundreds of steps that no test reads
        return float(len(trajectory.response) % 2)
"""


def test_a_live_run_grows_to_three_engines_drains_one_and_goes_back_to_one(
    start: Start, relax_here: Relax, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy asks for the first change, then a person, an engine from elsewhere, and a client of the control API.

    The teacher's pool grows too.
    """
    monkeypatch.setenv("RELAX_TOKEN", TOKEN)
    run, policy, elsewhere = start.directory / "run", start.directory / "pair.py", f"127.0.0.1:{free_port('127.0.0.1')}"
    policy.write_text(PAIR)
    running = start(
        run, "train", tiny / "recipe.toml", *SMALL, "steps=5000", "run.runner=local", "checkpoint.every=0",
        "placement=hybrid", f"plugins=['{policy}']", 'autoscale={name="pair",out_cooldown_s=0}', "--run-dir", run, "--json",
        f"placement.rollout.external={{addresses=['{elsewhere}'],token='env:RELAX_TOKEN'}}", "weights.proof=behaviour",
        "algorithm=distillation", f"engines=[{{name='taught',path='{tiny / 'model'}'}}]", "teachers=[{engine='taught'}]",
        "rewards=['slow']",
    )  # fmt: skip
    running.until_steps(1)
    assert relax_here("pause", run).code == 0  # the policy's windows last many steps
    until(lambda: [one["state"] for one in operations(relax_here, run)] == ["active"], "the policy's engine has joined")
    (first,) = operations(relax_here, run)
    assert (first["before"], first["target"], first["engines"]) == (1, 2, {"engine-1": "active"})
    proposed = [one for one in open_run(run).events() if one["event"] == "scaling proposed"]
    assert [(one["target"], one["reason"]) for one in proposed] == [(2, "one engine is alone")]
    assert relax_here("continue", run).code == 0
    refused = relax_here("scale", run, "rollout=0")
    assert refused.code == 2 and "target: got 0; the pool rollout keeps its first 1 engines" in refused.err
    planned = relax_here("scale", run, "rollout=3", "--dry-run")
    assert planned.out == "run: engine-2 would join\n"
    grown = relax_here("scale", run, "rollout=3", "--json").json
    assert (grown["state"], grown["detail"]) == ("done", "rollout-2 is active")
    assert operations(relax_here, run)[-1]["engines"] == {"engine-2": "active"}
    until(lambda: {"engine-0", "engine-1", "engine-2"} in proofs(run), "a version that all three have proved")
    assert relax_here("scale", run, "--drain", "engine-1", "--json").json["state"] == "done"
    taught = relax_here("scale", run, "taught=2", "--json").json
    assert (taught["state"], taught["detail"]) == ("done", "taught-1 is active")
    listed = relax_here("engines", run, "--json").json
    assert {one["engine"] for one in listed["engines"]} == {
        "engine-0",
        "engine-2",
        "taught-engine-0",
        "taught-engine-1",
    }
    server = ControlServer(open_run(run), "unix", TOKEN)
    serving = threading.Thread(target=server.run)
    serving.start()
    try:
        at = ("--address", server.address)
        refused = relax_here("scale", "--join", "127.0.0.1:1", *at)
        assert refused.code == 2 and f"address: got 127.0.0.1:1; the run allows {elsewhere}" in refused.err
        joining = start(start.directory / "engine", "engine", "serve", tiny / "recipe.toml", "--listen", elsewhere,
                        "--join", server.address)  # fmt: skip

        def ended() -> bool:
            return joining.process.poll() is not None

        # A joining engine proves versions already, so neither of the two comes first.
        until(lambda: ended() or operations(relax_here, run)[-1]["engines"] == {"engine-3": "active"}, "it has joined")
        until(lambda: ended() or any("engine-3" in proved for proved in proofs(run)), "a version that it has proved")
        assert not ended(), joining.err
        listed = relax_here("engines", *at, "--json").json
        assert [one["engine"] for one in listed["engines"] if one["address"] == elsewhere] == ["engine-3"]
        _scripts_of_another_relax_work(server.address, f"http://{elsewhere}")
        assert joining.end() == 0 and joining.err.endswith("relax: the run needs this engine no more\n"), joining.err
        assert TOKEN not in "".join(path.read_text() for path in (run / "logs").glob("*")) + running.err + joining.err
        assert relax_here("scale", "rollout=1", "--dry-run", *at).out == "run: engine-2 would leave\n"
        assert relax_here("scale", "--drain", "engine-0", *at).code == 2
        assert relax_here("scale", "rollout=1", *at).out.endswith(": scale is done; rollout-6 is completed\n")
    finally:
        server.stop()
        serving.join(30)
    assert relax_here("stop", run).code == 0
    assert running.end() == 130
    summary = open_run(run).summary()
    assert summary["balanced"] is True and summary["samples_trained"] and summary["restarts"] == {}


def _scripts_of_another_relax_work(address: str, url: str) -> None:
    """Metrics, evaluation and scaling by the routes of rednote's Relax; the engine at `url` leaves."""
    transport = httpx.HTTPTransport(uds=address.removeprefix("unix:"))
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url="http://run", transport=transport, headers=headers) as client:
        step = client.get("/status").json()["step"]
        batch = {"step": step, "metrics": {"reward/mean": 9.0, "author/late": 1}, "tags": None}
        assert client.post("/metrics/log_metrics_batch", json=batch).json()["status"] == "success"
        ahead = {"metric_name": "author/next", "metric_value": 2.0}
        assert client.post("/metrics/log_metric", json=ahead).json()["status"] == "success"
        wrong = client.post("/metrics/log_metric", content=b'{"step": 1, "metric_name": "a", "metric_value": NaN}')
        assert wrong.status_code == 400
        assert client.post("/metrics/log_error", json={"error_message": f"{TOKEN} is full"}).status_code == 200
        late = until(
            lambda: row if "user/author/late" in (row := _recorded(client, step)) else None,
            "the late value is recorded",
        )
        assert (late["user/author/late"], late["user/reward/mean"]) == (1, 9) and late["reward/mean"] != 9
        later = f"/metrics?after={step}"
        until(lambda: "user/author/next" in client.get(later).text, "a value without a step is recorded")
        assert client.post("/rollout/evaluate?train_step=1").json()["field"] == "eval.every"
        assert client.get("/rollout/is_eval_done").json() == {"done": True}
        engines = client.get("/rollout/engines").json()["models"]["rollout"]["engines"]
        assert [one["engine_id"] for one in engines if one["url"]] == ["engine-3"]
        again = client.post("/rollout/scale_out", json={"engine_urls": [url], "timeout_secs": 600}).json()
        assert again["status"] == "NOOP"
        other = client.post("/rollout/scale_out", json={"engine_urls": ["http://127.0.0.1:1"]})
        assert (other.status_code, other.json()["field"]) == (409, "address")
        asked = client.post("/rollout/scale_in", json={"engine_urls": [url], "force": True}).json()["request_id"]
        until(lambda: client.get(f"/rollout/scale_in/{asked}").json()["status"] == "COMPLETED", "the engine has left")


def _recorded(client: httpx.Client, step: int) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"/metrics/query_metrics?step={step}").json()["metrics"]
    return found


def operations(relax_here: Relax, run: Path) -> list[dict[str, Any]]:
    """Return what `relax engines` says about changes of the policy's pool."""
    return [one for one in relax_here("engines", run, "--json").json["operations"] if one["pool"] == "rollout"]


def proofs(run: Path) -> list[set[str]]:
    """Return the engines that proved each published version."""
    return [set(one["receivers"]) for one in open_run(run).events() if one["event"] == "weights published"]
