# SPDX-License-Identifier: Apache-2.0
"""The control API: what may be asked, by whom, once; and what the run's files answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from relax_plugin_control.app import MAX_CALLS, MAX_STREAMS, PATHS, RunApi, make_app
from relax_plugin_control.server import ControlServer, listening

from relax_core.api.errors import ConfigError
from relax_core.api.http_requests import HeadDeadline
from relax_core.api.run_commands import Pause, Profile
from relax_core.observe.run_directory import RunDirectory
from relax_core.views.run import RunView
from tests.control_api import TOKEN, call
from tests.unit.views.test_operations import LIVE


@pytest.fixture
def path(write_run: Callable[..., Path], tmp_path: Path) -> Path:
    return write_run(tmp_path, steps=4)


def test_a_finished_run_is_told_by_every_route_and_changes_nothing(path: Path) -> None:
    assert call(path, "GET", "/status").json()["state"] == "finished"
    assert call(path, "GET", "/why").json()["lines"]
    assert call(path, "GET", "/engines").json()["engines"] == []
    rows = call(path, "GET", "/metrics?after=2").json()
    assert [row["step"] for row in rows["metrics"]] == [3, 4] and not rows["more"]
    stream = call(path, "GET", "/events?after=2").text
    assert stream.startswith("id: 3\n") and stream.rstrip().endswith("event: end\ndata: {}")
    for action in ("pause", "continue", "checkpoint", "evaluate"):
        refused = call(path, "POST", f"/{action}", "key")
        assert refused.status_code == 409 and refused.json()["fix"].startswith("only a ")
    assert call(path, "GET", "/operations").json()["operations"] == []
    stopped = call(path, "POST", "/stop", "key")
    assert (stopped.status_code, stopped.json()["detail"]) == (200, "the run is finished")
    assert RunDirectory.open(path).take_commands() == []


def test_a_request_for_profiles_is_passed_to_the_run_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunApi, "facts", lambda _: LIVE)
    made = [call(path, "POST", "/profile", "one", json={"steps": 3}) for _ in range(2)]
    assert [one.status_code for one in made] == [202, 200] and made[0].json() == made[1].json()
    assert RunDirectory.open(path).take_commands() == [Profile(3)]
    assert call(path, "POST", "/profile", "two", json={"steps": "3"}).json()["field"] == "steps"


def test_a_change_is_asked_once_however_often_it_is_sent(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunApi, "facts", lambda _: LIVE)
    first = call(path, "POST", "/pause", "one")
    assert first.status_code == 202 and RunDirectory.open(path).take_commands() == [Pause()]
    again = call(path, "POST", "/pause", "one")
    assert again.status_code == 200 and again.json() == first.json()
    assert RunDirectory.open(path).take_commands() == []
    assert call(path, "POST", "/stop", "one").status_code == 409
    assert "still requested" in call(path, "POST", "/pause", "two").json()["error"]
    assert call(path, "POST", "/pause").json()["field"] == "Idempotency-Key"
    assert call(path, "GET", "/operations/1").json()["action"] == "pause"
    assert call(path, "GET", "/operations/9").status_code == 404


async def test_limits_count_only_calls_with_the_token_and_streams_apart(path: Path) -> None:
    api = RunApi(RunView(path), TOKEN)
    transport = httpx.ASGITransport(make_app(api))
    async with httpx.AsyncClient(transport=transport, base_url="http://run") as client:
        for calls, streams, statuses in (
            (MAX_CALLS, 0, [503, 503, 503]),
            (0, MAX_STREAMS, [200, 503, 503]),
            (0, 0, [200] * 3),
        ):
            api.calls, api.streams = calls, streams
            for route, status in zip(("/status", "/events", "/logs"), statuses, strict=True):
                assert (await client.get(route)).status_code == 401
                answer = await client.get(route, headers={"authorization": f"Bearer {TOKEN}"})
                assert answer.status_code == status and (status == 200 or answer.json()["field"] == "calls")
            assert (api.calls, api.streams) == (calls, streams)


def test_numbers_that_are_too_long_or_not_finite_are_refused(path: Path) -> None:
    many = "9" * 5000
    for route in (
        f"/metrics?after={many}",
        f"/events?after={many}",
        f"/logs?last={many}",
        "/logs?since=0001-01-01T00:00%2B14:00",
    ):
        assert call(path, "GET", route).status_code == 400
    for body in (many, "9" * 30, "NaN", "-Infinity", "1e999"):
        answer = call(path, "POST", "/engines", "key", content=f'{{"target": {body}}}')
        assert answer.status_code == 400 and "got the number" in answer.json()["error"]
    assert call(path, "POST", "/engines", "key", content="[" * 60_000).status_code == 400


def test_wrong_callers_and_wrong_requests_are_told_what_to_do(path: Path) -> None:
    for route in PATHS:
        answer = call(path, route.method, route.path.format(id=1), "key", token="other")
        assert answer.status_code == 401 and "Bearer TOKEN" in answer.json()["fix"]
    assert call(path, "GET", "/pause", "key").json()["fix"] == "use POST; a GET changes nothing"
    assert call(path, "POST", "/nowhere", "key").status_code == 404
    assert call(path, "GET", "/metrics?after=x").status_code == 400
    assert call(path, "POST", "/pause", "key", content=b"x" * (1 << 17)).status_code == 413
    fields = call(path, "POST", "/checkpoint", "key", json={"step": 5})
    assert (fields.status_code, fields.json()["field"]) == (400, "body") and "step" in fields.json()["got"]
    assert call(path, "POST", "/checkpoint", "key", json={}).status_code == 409  # the run has ended
    described = call(path, "GET", "/openapi.json", token="").json()
    assert set(described["paths"]) == {route.path for route in PATHS}
    assert TOKEN not in call(path, "GET", "/docs", token="").text


def test_a_run_has_one_server_at_an_address_that_exists(path: Path, tmp_path: Path) -> None:
    for wrong in ("8700", "nowhere:x", "127.0.0.1:99999", "192.0.2.1:80", f"unix:{tmp_path}/none/sock"):
        with pytest.raises(ConfigError, match="--listen"):
            listening(wrong, path)
    listener, address = listening("unix", path)
    assert Path(address.removeprefix("unix:")).stat().st_mode & 0o777 == 0o600
    listener.listen()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"control\.sock, on which another process listens; name a new file"):
            listening(address, path)
    listener.close()
    listening("unix", path)[0].close()
    server = ControlServer(RunView(path), "127.0.0.1:0", TOKEN)
    assert server._server.config.http is HeadDeadline
    assert server._server.config.limit_concurrency is None, "uvicorn counts connections without a token"
    assert server.address.startswith("http://127.0.0.1:")
    server.stop()
    server.run()
