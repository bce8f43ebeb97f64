# SPDX-License-Identifier: Apache-2.0
"""Requests to scale a run: what the control API and the command line refuse at once, and what they pass to the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from relax_plugin_control.app import RunApi
from relax_plugin_control.scale import _request

from relax_core.api.errors import ConfigError
from relax_core.api.run_commands import ScaleRequest
from relax_core.engines.scaling import LEAVING, PoolScaling
from relax_core.observe.run_directory import RunDirectory
from tests.control_api import call
from tests.unit.views.test_operations import LIVE, pools


@pytest.fixture
def live(write_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a run with two pools."""
    monkeypatch.setattr(RunApi, "facts", lambda _: replace(LIVE, pools=pools()))
    return write_run(tmp_path, steps=4)


def test_a_request_is_passed_to_the_run_once(live: Path) -> None:
    first = call(live, "POST", "/engines", "one", json={"target": 3, "keep_partial": True})
    again = call(live, "POST", "/engines", "one", json={"target": 3, "keep_partial": True})
    assert (first.status_code, again.status_code) == (202, 200) and first.json() == again.json()
    other = call(live, "POST", "/engines", "one", json={"target": 4})
    assert (other.status_code, other.json()["field"]) == (409, "Idempotency-Key")
    drained = call(live, "POST", "/engines/engine-1/drain", "two")
    joined = call(live, "POST", "/engines/join", "three", json={"address": "127.0.0.1:8701"})
    assert drained.status_code == joined.status_code == 202
    assert RunDirectory.open(live).take_commands() == [
        ScaleRequest("one", "rollout", 3, keep_partial=True),
        ScaleRequest("two", "rollout", engine="engine-1"),
        ScaleRequest("three", "rollout", address="127.0.0.1:8701"),
    ]
    assert RunDirectory.open(live).take_commands() == []


@pytest.mark.parametrize(
    ("route", "body", "status", "field"),
    [
        ("/engines", {"target": 0}, 409, "target"),
        ("/engines", {}, 400, "target"),
        ("/engines", {"target": "3"}, 400, "target"),
        ("/engines", {"target": True}, 400, "target"),
        ("/engines", {"target": 3, "size": 4}, 400, "size"),
        ("/engines", [3], 400, "body"),
        ("/engines", {"target": 3, "pool": "teacher"}, 404, "pool"),
        ("/engines", {"target": 3, "pool": "judge"}, 409, "placement"),
        ("/engines/join", {}, 400, "address"),
        ("/engines/join", {"address": 8701}, 400, "address"),
        ("/engines/join", {"address": "10.0.0.1:8701"}, 409, "address"),
        ("/engines/join", {"address": "127.0.0.1:8701", "pool": "judge"}, 400, "pool"),
        ("/engines/engine-0/drain", {}, 409, "engine"),
        ("/engines/engine-7/drain", {}, 404, "engine"),
        ("/engines/engine-1/drain", {"now": True}, 400, "now"),
        ("/engines/drain", {}, 400, "node"),
        ("/engines/drain", {"node": 7}, 400, "node"),
        ("/engines/drain", {"node": "10.0.0.9"}, 409, "node"),
        ("/engines/drain", {"node": "10.0.0.1"}, 409, "node"),
        ("/engines/drain", {"node": "10.0.0.3"}, 409, "node"),
        ("/operations/rollout-1/cancel", {}, 404, "operation"),
    ],
)
def test_what_the_run_would_refuse_is_refused_at_once(
    live: Path, route: str, body: Any, status: int, field: str
) -> None:
    answer = call(live, "POST", route, "key", json=body)
    assert (answer.status_code, answer.json()["field"]) == (status, field) and answer.json()["fix"]
    assert RunDirectory.open(live).take_commands() == []
    assert call(live, "GET", "/operations").json()["operations"] == []


def test_a_repeated_drain_gets_its_operation_when_the_engine_has_left(
    live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = call(live, "POST", "/engines/engine-1/drain", "one").json()
    left = pools() | {"rollout": PoolScaling("rollout", ["engine-0"], 1)}
    monkeypatch.setattr(RunApi, "facts", lambda _: replace(LIVE, pools=left))
    again = call(live, "POST", "/engines/engine-1/drain", "one")
    assert again.status_code == 200 and again.json()["id"] == first["id"]
    assert call(live, "POST", "/engines/engine-1/drain", "two").status_code == 404
    other = call(live, "POST", "/engines/engine-2/drain", "one")
    assert (other.status_code, other.json()["field"]) == (409, "Idempotency-Key")


def test_a_dry_run_names_the_engines_and_asks_nothing(live: Path) -> None:
    answer = call(live, "POST", "/engines", json={"target": 3, "dry_run": True}).json()
    assert answer["actions"] == [{"action": "join", "engine": "engine-2"}]
    answer = call(live, "POST", "/engines/join", json={"address": "127.0.0.1:8701", "dry_run": True}).json()
    assert answer["actions"] == [{"action": "join", "engine": "engine-2"}]
    answer = call(live, "POST", "/engines/engine-1/drain", json={"dry_run": True}).json()
    assert answer["actions"] == [{"action": "leave", "engine": "engine-1"}]
    answer = call(live, "POST", "/engines/drain", json={"node": "10.0.0.2", "dry_run": True}).json()
    assert answer["actions"] == [{"action": "leave", "engine": "engine-1"}] and len(answer["operations"]) == 1
    assert RunDirectory.open(live).take_commands() == []


def test_a_node_is_drained_in_every_pool_with_engines_that_can_leave(
    live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {
        name: PoolScaling(name, [f"{name}-0", f"{name}-1"], least)
        for name, least in (("rollout", 1), ("judge", 1), ("teacher", 2))
    }
    for one in found.values():
        one.nodes = {name: f"10.0.0.{name[-1]}" for name in one.engines}
    monkeypatch.setattr(RunApi, "facts", lambda _: replace(LIVE, pools=found))
    asked = [call(live, "POST", "/engines/drain", "key", json={"node": "10.0.0.1"}) for _ in range(2)]
    assert [one.status_code for one in asked] == [202, 200] and asked[0].json()["pools"] == ["rollout", "judge"]
    first, second = RunDirectory.open(live).take_commands()
    assert first == ScaleRequest("key", "rollout", node="10.0.0.1") and second == replace(first, pool="judge")
    found["rollout"].ask(first, 2.0)
    for step in LEAVING:
        found["rollout"].on_step("rollout-1", step, 3.0)
    (operation,) = call(live, "GET", "/operations").json()["operations"]
    assert (operation["state"], operation["detail"]) == ("requested", "rollout-1 is completed"), (
        "the judges have not begun"
    )
    found["judge"].ask(second, 4.0)
    call(live, "POST", "/engines/drain", "key", json={"node": "10.0.0.1"})
    for step in LEAVING:
        found["judge"].on_step("judge-1", step, 5.0)
    (operation,) = call(live, "GET", "/operations").json()["operations"]
    assert (operation["state"], operation["detail"]) == ("done", "rollout-1 is completed; judge-1 is completed")


def test_a_cancelled_operation_is_done_when_its_engines_are_gone(live: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = pools()
    monkeypatch.setattr(RunApi, "facts", lambda _: replace(LIVE, pools=found))
    call(live, "POST", "/engines", "one", json={"target": 3})
    found["rollout"].ask(ScaleRequest("one", target=3), 1.0)
    cancelled = call(live, "POST", "/operations/1/cancel", "two")  # by the number that the API gave it
    assert cancelled.status_code == 202
    *_, request = RunDirectory.open(live).take_commands()
    assert request == ScaleRequest("two", "rollout", cancel="rollout-1")
    found["rollout"].ask(request, 2.0)
    found["rollout"].on_step("engine-2", "completed", 3.0)
    states = {one["id"]: one["state"] for one in call(live, "GET", "/operations").json()["operations"]}
    assert states == {"1": "failed", "2": "done"}


def test_the_command_line_takes_one_run_and_one_change() -> None:
    run, request = _request(["my-run", "judge=3"], "", "", True)
    assert (run, request.pool, request.target, request.keep_partial) == ("my-run", "judge", 3, True)
    run, request = _request([], "engine-2", "", False)
    assert (run, request.engine, request.target) == (None, "engine-2", None)
    run, request = _request(["my-run"], "", "", False, node="10.0.0.2")
    assert (run, request.node, request.pool, request.engine) == ("my-run", "10.0.0.2", "", "")
    for words, drain, wrong in (
        (["a", "b", "rollout=2"], "", "arguments: got a b rollout=2; give one run"),
        (["a"], "", "arguments: got a; give one run, and one of POOL=N"),
        (["rollout=2"], "engine-1", "arguments: got rollout=2"),
        (["rollout=two"], "", "rollout: got two; give the number of engines"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            _request(words, drain, "", False)
