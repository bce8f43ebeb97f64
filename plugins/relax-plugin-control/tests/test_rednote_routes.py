# SPDX-License-Identifier: Apache-2.0
"""Scripts that scale the rollout of rednote's Relax: the same routes and fields, with a token and without unsafe ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from relax_plugin_control.app import RunApi
from relax_plugin_control.rednote import INSTEAD, engines

from relax_core.api.run_commands import Evaluate, ScaleRequest
from relax_core.engines.scaling import JOINING, PoolScaling
from relax_core.observe.run_directory import RunDirectory
from tests.control_api import call
from tests.unit.views.test_operations import LIVE, pools


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, PoolScaling]:
    """The pools of a run, whose machines the tests move."""
    made = pools()
    monkeypatch.setattr(RunApi, "facts", lambda _: replace(LIVE, pools=made))
    return made


@pytest.fixture
def run(found: dict[str, PoolScaling], write_run: Callable[..., Path], tmp_path: Path) -> Path:
    return write_run(tmp_path, steps=4)


def test_a_script_scales_out_polls_and_finds_its_engine(run: Path, found: dict[str, PoolScaling]) -> None:
    body = {"model_name": "default", "num_replicas": 3, "engine_urls": [], "timeout_secs": 1800}
    asked = call(run, "POST", "/rollout/scale_out", json=body).json()
    assert asked == {"request_id": "1", "status": "PENDING", "message": ""}
    (request,) = RunDirectory.open(run).take_commands()
    assert (request.pool, request.target) == ("rollout", 3)
    found["rollout"].ask(request, 2.0)
    states = []
    for step in JOINING[1:]:
        found["rollout"].on_step("engine-2", step, 3.0)
        states.append(call(run, "GET", "/rollout/scale_out/1").json()["status"])
    assert states == ["CREATING", "HEALTH_CHECKING", "WEIGHT_SYNCING", "ACTIVE"]
    listed = call(run, "GET", "/rollout/scale_out?model_name=default&status=active").json()
    assert listed["total_count"] == 1 and listed["requests"][0]["engine_ids"] == ["engine-2"]
    assert call(run, "GET", "/rollout/scale_out?status=FAILED").json()["requests"] == []
    assert call(run, "GET", "/rollout/scale_in").json()["requests"] == []


def test_a_repeated_request_changes_nothing(run: Path, found: dict[str, PoolScaling]) -> None:
    for way, number in (("scale_out", 1), ("scale_out", 2), ("scale_in", 2), ("scale_in", 5)):
        answer = call(run, "POST", f"/rollout/{way}", json={"num_replicas": number}).json()
        assert (answer["status"], answer["message"]) == ("NOOP", "the pool rollout has 2 engines")
    found["rollout"].ask(ScaleRequest("other", target=4), 1.0)
    answer = call(run, "POST", "/rollout/scale_out", json={"num_replicas": 3}).json()
    assert (answer["status"], answer["message"]) == ("NOOP", "the pool rollout has 4 engines")
    assert RunDirectory.open(run).take_commands() == []


def test_a_script_scales_in_and_sees_which_engines_left(run: Path, found: dict[str, PoolScaling]) -> None:
    planned = call(run, "POST", "/rollout/scale_in", json={"num_replicas": 1, "dry_run": True}).json()
    assert planned["selected_engines"] == ["engine-1"] and RunDirectory.open(run).take_commands() == []
    asked = call(run, "POST", "/rollout/scale_in", json={"num_replicas": 1}).json()
    (request,) = RunDirectory.open(run).take_commands()
    found["rollout"].ask(request, 2.0)
    seen = call(run, "GET", f"/rollout/scale_in/{asked['request_id']}").json()
    assert (seen["status"], seen["selected_engines"], seen["removed_engines"]) == ("DRAINING", ["engine-1"], [])
    for step in ("removing", "completed"):
        found["rollout"].on_step("engine-1", step, 3.0)
    seen = call(run, "GET", f"/rollout/scale_in/{asked['request_id']}").json()
    assert (seen["status"], seen["removed_engines"]) == ("COMPLETED", ["engine-1"])


def test_engines_from_elsewhere_join_and_leave_by_their_addresses(run: Path, found: dict[str, PoolScaling]) -> None:
    pool, urls = found["rollout"], ["http://127.0.0.1:8701", "127.0.0.1:8702/"]
    pool.addresses = ("127.0.0.1:8701", "127.0.0.1:8702")
    body = {"model_name": "default", "num_replicas": 0, "engine_urls": urls, "timeout_secs": 60}
    planned = call(run, "POST", "/rollout/scale_in", json={"engine_urls": urls}).json()
    assert (planned["status"], planned["message"][-27:]) == ("NOOP", "are not in the pool rollout")
    asked = call(run, "POST", "/rollout/scale_out", json=body).json()
    (request,) = RunDirectory.open(run).take_commands()
    assert request == ScaleRequest(request.key, address="127.0.0.1:8701,127.0.0.1:8702", timeout_s=60.0)
    pool.ask(request, 2.0)
    assert call(run, "POST", "/rollout/scale_out", json=body).json()["status"] == "NOOP", "they join already"
    for step in JOINING[1:]:
        pool.on_step("engine-2", step, 3.0)
    pool.expire(63.0)
    seen = call(run, "GET", f"/rollout/scale_out/{asked['request_id']}").json()
    assert (seen["status"], seen["engine_urls"]) == ("DRAINING", ["127.0.0.1:8701", "127.0.0.1:8702"])
    for engine in ("engine-2", "engine-3"):
        pool.on_step(engine, "completed", 64.0)
    seen = call(run, "GET", f"/rollout/scale_out/{asked['request_id']}").json()
    assert (seen["status"], seen["error_message"][-20:]) == ("FAILED", "not done within 60 s")
    pool.ask(ScaleRequest("joined", address="127.0.0.1:8701"), 65.0)
    for step in JOINING[1:]:
        pool.on_step("engine-4", step, 66.0)
    again = call(run, "POST", "/rollout/scale_out", json={**body, "dry_run": True}).json()
    assert again["selected_engines"] == ["engine-5"], "the other one serves"
    left = call(
        run, "POST", "/rollout/scale_in", json={"engine_urls": urls, "force": True, "timeout_secs": None}
    ).json()
    (request,) = RunDirectory.open(run).take_commands()
    assert request == ScaleRequest(request.key, engine="engine-4")
    assert [one["request_id"] for one in call(run, "GET", "/rollout/scale_in").json()["requests"]] == [
        left["request_id"]
    ]


def test_a_script_asks_for_an_evaluation_and_for_its_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [call(run, "POST", "/rollout/evaluate?train_step=7").json() for _ in range(2)]
    assert answers == [{"status": "ok", "rollout_id": 7, "request_id": "1"}] * 2
    assert RunDirectory.open(run).take_commands() == [Evaluate()]
    assert call(run, "GET", "/rollout/is_eval_done").json() == {"done": False}
    monkeypatch.setattr(RunApi, "facts", lambda _: replace(LIVE, evaluations=LIVE.evaluations + LIVE.sets))
    assert call(run, "GET", "/rollout/is_eval_done").json() == {"done": True}
    assert (
        call(run, "GET", "/rollout/evaluate?train_step=7").json()["fix"]
        == "use POST /rollout/evaluate; a GET changes nothing"
    )


def test_a_request_that_is_cancelled_takes_its_engines_back(run: Path, found: dict[str, PoolScaling]) -> None:
    call(run, "POST", "/rollout/scale_out", json={"num_replicas": 3})
    early = call(run, "POST", "/rollout/scale_out/1/cancel")
    assert (early.status_code, early.json()["fix"]) == (409, "ask again in a second")
    (request,) = RunDirectory.open(run).take_commands()
    found["rollout"].ask(request, 2.0)
    assert call(run, "POST", "/rollout/scale_out/1/cancel").json()["status"] == "CANCELLED"
    (cancel,) = RunDirectory.open(run).take_commands()
    assert cancel.cancel == "rollout-1"
    assert call(run, "POST", "/rollout/scale_out/7/cancel").status_code == 404


def test_all_open_requests_are_cancelled_at_once(run: Path, found: dict[str, PoolScaling]) -> None:
    def cancelled(**body: Any) -> tuple[list[str], list[dict[str, str]], int]:
        answer = call(run, "POST", "/rollout/scale_out_cancel", json=body).json()
        wanted = {name: body.get(name) for name in ("model_name", "status_filter")}
        assert (answer["dry_run"], answer["filters"]) == (body.get("dry_run", False), wanted)
        return answer["succeeded"], answer["skipped"], answer["total_count"]

    assert cancelled() == ([], [], 0)
    found["judge"] = PoolScaling("judge", ["judge-engine-0"], 1, "judge-engine")
    for pool in ("default", "judge"):
        call(run, "POST", "/rollout/scale_out", json={"num_replicas": 3, "model_name": pool})
    rollout, judge = RunDirectory.open(run).take_commands()
    found["rollout"].ask(rollout, 2.0)
    done, skipped, count = cancelled(dry_run=True)
    assert (done, count, [one["id"] for one in skipped]) == (["1"], 2, ["2"])
    assert "'2', which the run has not begun; ask again" in skipped[0]["reason"]
    found["judge"].ask(judge, 2.0)
    assert cancelled(model_name="judge", status_filter="creating") == cancelled(model_name="teacher") == ([], [], 0)
    assert RunDirectory.open(run).take_commands() == []
    assert cancelled(model_name="judge") == (["2"], [], 1)
    (request,) = RunDirectory.open(run).take_commands()
    assert (request.pool, request.cancel) == ("judge", "judge-1")
    for step in JOINING[1:]:
        found["rollout"].on_step("engine-2", step, 3.0)
    done, skipped, count = cancelled(status_filter="ACTIVE")
    assert (done, count) == ([], 1) and "rollout-1, which is active; only an open" in skipped[0]["reason"]
    assert cancelled(status_filter="PENDING") == (["2"], [], 1), "cancelled again before the run has answered"


@pytest.mark.parametrize(
    ("way", "body", "status", "field"),
    [
        ("scale_out", {}, 400, "num_replicas"),
        ("scale_out", {"engine_urls": ["http://10.0.0.1:1"]}, 409, "address"),
        ("scale_out", {"engine_urls": ["https://127.0.0.1:8701"]}, 400, "engine_urls"),
        ("scale_out", {"engine_urls": ["http://127.0.0.1:8701/v1"]}, 400, "engine_urls"),
        ("scale_out", {"engine_urls": [8701]}, 400, "engine_urls"),
        ("scale_out", {"engine_urls": ["127.0.0.1:8701"], "model_name": "teacher"}, 404, "pool"),
        ("scale_out", {"num_replicas": 3, "timeout_secs": 0}, 400, "timeout_secs"),
        ("scale_in", {"num_replicas": 0}, 409, "target"),
        ("scale_out", {"num_replicas": 3, "model_name": "teacher"}, 404, "pool"),
        ("scale_out", {"num_replicas": 3, "model_name": "judge"}, 409, "placement"),
    ],
)
@pytest.mark.usefixtures("found")
def test_what_cannot_be_done_is_refused_with_what_to_do(
    run: Path, way: str, body: Any, status: int, field: str
) -> None:
    answer = call(run, "POST", f"/rollout/{way}", json=body)
    assert (answer.status_code, answer.json()["field"]) == (status, field) and answer.json()["fix"]
    assert RunDirectory.open(run).take_commands() == []


def test_routes_that_were_unsafe_or_are_not_needed_say_what_to_use(run: Path) -> None:
    for route, instead in INSTEAD.items():
        assert call(run, "GET", route).json()["fix"] == instead
    assert call(run, "GET", "/rollout/engines", token="other").status_code == 401
    assert call(run, "GET", "/rollout/engines").json() == {"models": {}, "total_engines": 0}
    shown = engines(
        [{"pool": "judge", "engine": "judge-engine-0", "state": "starting", "serving": False, "address": "h:1"}]
    )
    one = {"engine_id": "judge-engine-0", "url": "h:1", "status": "STARTING", "is_healthy": False}
    assert shown == {"models": {"judge": {"engines": [one]}}, "total_engines": 1}
