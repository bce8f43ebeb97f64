# SPDX-License-Identifier: Apache-2.0
"""The control API: what may be asked, by whom, once; and what the run's files answer."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, strategies as st

from relax_core.api.errors import ConfigError
from relax_core.api.http_requests import HeadDeadline
from relax_core.api.trainer import Trainer
from relax_core.control_api.app import MAX_CALLS, MAX_STREAMS, PATHS, RunApi, make_app
from relax_core.control_api.client import read_token
from relax_core.control_api.operations import ACTIONS, KEPT, Book, Facts, Refused
from relax_core.control_api.run_control import RunControl, check_profiles
from relax_core.control_api.server import ControlServer, listening
from relax_core.observe.run_directory import RunDirectory
from relax_core.registry.catalogue import Catalogue
from relax_core.views.follower import EvaluationCount, ProfileCount
from relax_core.views.run import RunView

TOKEN = "0123456789abcdef"
LIVE = Facts("running", ended=False, step=3, checkpoint=2, pid=7, sets=2, evaluations=5)
FACTS = st.builds(
    Facts, st.just("running"), st.booleans(), st.integers(0, 5), st.integers(0, 5), st.sampled_from(["", "a user"]),
    st.integers(1, 2), st.integers(0, 2), st.integers(0, 4),
)  # fmt: skip


@given(st.lists(st.tuples(FACTS, st.none() | st.tuples(st.sampled_from(ACTIONS), st.sampled_from("abc"))), max_size=30))
def test_whatever_comes_operations_keep_their_rules(events: list[tuple[Facts, Any]]) -> None:
    book, requests = Book(), 0
    for now, (facts, asked) in enumerate(events):
        before = dict(book.operations)
        if asked is None:
            again = book.settle(facts, now)
            assert all(before[one.id].pid != facts.pid == one.pid for one in again)
        else:
            try:
                operation, asks = book.ask(asked[0], asked[1], facts, now)
            except Refused:
                assert set(book.operations) == set(before)
            else:
                new = operation.id not in before
                requests += new
                assert (operation.action, operation.key) == asked
                assert asks == (new and operation.state == "requested")
        found = book.operations.values()
        assert len({one.key for one in found}) == len(found) == requests == book.number
        waiting = [one.action for one in found if one.state == "requested"]
        assert len(waiting) == len(set(waiting))
        assert all(book.operations[one.id] == one for one in before.values() if one.state != "requested")
        assert Book.of(json.loads(json.dumps(book.plain()))).operations == book.operations


def test_each_change_is_done_by_what_the_run_then_says() -> None:
    ends = {
        "pause": replace(LIVE, state="paused", pause="a user"), "checkpoint": replace(LIVE, step=4, checkpoint=3),
        "stop": replace(LIVE, state="stopped", ended=True), "continue": LIVE, "evaluate": replace(LIVE, evaluations=7),
    }  # fmt: skip
    for action, then in ends.items():
        book, first = Book(), replace(LIVE, pause="a user") if action == "continue" else LIVE
        made, _ = book.ask(action, "key", first, 1.0)  # type: ignore[arg-type]
        assert book.settle(replace(first, pid=8), 2.0) == [replace(made, pid=8, detail=book.operations["1"].detail)]
        book.settle(replace(then, pid=8), 3.0)
        assert (book.operations["1"].state, book.operations["1"].changed_at) == ("done", 3.0)
    for action, ended in (("pause", "failed"), ("stop", "lost")):
        book = Book()
        book.ask(action, "key", LIVE, 1.0)  # type: ignore[arg-type]
        book.settle(replace(LIVE, state=ended, ended=True), 2.0)
        assert (book.operations["1"].state, book.operations["1"].detail) == ("failed", f"the run is {ended}")


def test_a_change_that_needs_nothing_of_the_run_is_done_at_once() -> None:
    ended = replace(LIVE, state="stopped", ended=True, checkpoint=3)
    for action, facts in (
        ("pause", replace(LIVE, pause="a user")), ("checkpoint", replace(LIVE, checkpoint=3)), ("checkpoint", ended),
        ("stop", ended),
    ):  # fmt: skip
        made, asks = Book().ask(action, "key", facts, 1.0)  # type: ignore[arg-type]
        assert (made.state, asks) == ("done", False)
    lost = replace(LIVE, state="lost", ended=True, checkpoint=2)
    for action, facts in (("pause", replace(ended, pause="a user")), ("stop", lost), ("checkpoint", lost)):
        with pytest.raises(Refused, match="only a live run can be changed"):
            Book().ask(action, "key", facts, 1.0)  # type: ignore[arg-type]


def test_a_run_that_is_paused_again_after_a_step_has_continued() -> None:
    book, paused = Book(), replace(LIVE, pause="a guard")
    book.ask("continue", "key", paused, 1.0)
    book.settle(paused, 2.0)
    assert book.operations["1"].state == "requested"
    book.settle(replace(paused, step=4), 3.0)
    assert book.operations["1"].state == "done"


@given(st.integers(0, 9), st.integers(1, 3), st.lists(st.integers(0, 2), max_size=8))
def test_an_evaluation_is_done_once_every_set_has_a_new_one(before: int, sets: int, more: list[int]) -> None:
    book, facts = Book(), replace(LIVE, sets=sets, evaluations=before)
    asked, new = book.ask("evaluate", "key", facts, 0.0)
    assert new and asked.evaluations == before
    for now, added in enumerate(more, 1):
        facts = replace(facts, evaluations=facts.evaluations + added)
        assert book.settle(facts, now) == []
        done = facts.evaluations - before >= sets
        assert book.operations["1"].state == ("done" if done else "requested")
        assert book.ask("evaluate", "key", facts, now) == (book.operations["1"], False)
    was = book.operations["1"].state
    book.settle(replace(facts, state="stopped", ended=True), 99.0)
    assert book.operations["1"].state == ("failed" if was == "requested" else "done")


def test_a_run_without_evaluation_sets_is_not_asked_to_evaluate() -> None:
    with pytest.raises(Refused) as refused:
        Book().ask("evaluate", "key", replace(LIVE, sets=0), 0.0)
    assert (refused.value.status, refused.value.field) == (409, "eval.every")


def test_evaluations_are_counted_from_the_run_s_events(write_run: Callable[..., Path], tmp_path: Path) -> None:
    count = EvaluationCount(RunView(write_run(tmp_path, steps=30)))
    assert (count.sets, count.now(), count.now()) == (1, 1, 1)
    none = write_run(tmp_path, steps=1, name="none")
    (none / "config.toml").write_text("[eval]\nevery = 0\n")
    assert EvaluationCount(RunView(none)).sets == 0
    (none / "config.toml").write_text(
        '[eval]\nevery = 5\nsets = [{name = "a", path = "a"}, {name = "b", path = "b"}]\n'
    )
    assert EvaluationCount(RunView(none)).sets == 2


def test_profiles_are_done_once_all_their_steps_are_recorded() -> None:
    book, facts = Book(), replace(LIVE, profiles=4)
    asked, new = book.ask("profile", "key", facts, 0.0, {"steps": 2})
    assert new and (asked.state, asked.profiles) == ("requested", 4)
    with pytest.raises(Refused, match="which is still requested"):
        book.ask("profile", "other", facts, 1.0, {"steps": 1})
    for profiles, state in ((5, "requested"), (6, "done")):
        book.settle(replace(facts, profiles=profiles), 2.0)
        assert book.operations["1"].state == state
    again, _ = book.ask("profile", "third", replace(facts, profiles=6), 3.0, {"steps": 2})
    book.settle(replace(facts, profiles=7, state="stopped", ended=True), 4.0)
    assert book.operations[again.id].state == "failed"
    for steps in (0, 101, -1):
        with pytest.raises(Refused) as refused:
            book.ask("profile", "wrong", facts, 5.0, {"steps": steps})
        assert (refused.value.status, refused.value.field) == (400, "steps")


def test_a_request_for_profiles_is_passed_to_the_run_once(
    write_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunApi, "facts", lambda _: LIVE)
    run = write_run(tmp_path, steps=4)
    made = [call(run, "POST", "/profile", "one", json={"steps": 3}) for _ in range(2)]
    assert [one.status_code for one in made] == [202, 200] and made[0].json() == made[1].json()
    assert (RunDirectory.open(run).take_profile_request(), RunDirectory.open(run).take_profile_request()) == (3, 0)
    assert call(run, "POST", "/profile", "two", json={"steps": "3"}).json()["field"] == "steps"
    control = RunControl(RunView(run))
    monkeypatch.setattr(RunControl, "facts", lambda _: replace(LIVE, profiles=4))
    control.ask("profile", "three", {"steps": 3})
    monkeypatch.setattr(RunControl, "facts", lambda _: replace(LIVE, profiles=6, pid=8))
    monkeypatch.setattr(ProfileCount, "now", lambda _: 6)
    control.settle()
    assert RunDirectory.open(run).take_profile_request() == 1, "a new process profiles only the steps that are missing"
    (run / "config.toml").write_text('plugins = []\ntrainer = "none-such"\n')
    check_profiles(RunView(run))
    monkeypatch.setattr(Catalogue, "target", lambda *_: Trainer)
    with pytest.raises(Refused, match=r"trainer\.name: got none-such; this trainer can't record profiles"):
        check_profiles(RunView(run))


def test_old_operations_are_forgotten_but_never_open_ones() -> None:
    book = Book()
    book.ask("stop", "first", LIVE, 0.0)
    for number in range(KEPT + 5):
        book.ask("checkpoint", f"{number}", LIVE, 1.0)
        book.settle(replace(LIVE, checkpoint=3), 1.0)
    assert len(book.operations) == KEPT and "1" in book.operations and "2" not in book.operations


def call(path: Path, method: str, route: str, key: str = "", token: str = TOKEN, **how: Any) -> httpx.Response:
    """Send one request to the application of a run."""
    headers = {"authorization": f"Bearer {token}"} | ({"idempotency-key": key} if key else {})

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(RunApi(RunView(path), TOKEN)))
        async with httpx.AsyncClient(transport=transport, base_url="http://run") as client:
            return await client.request(method, route, headers=headers, **how)

    return asyncio.run(send())


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
    assert not list(path.glob(".*-request"))


def test_a_change_is_asked_once_however_often_it_is_sent(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunApi, "facts", lambda _: LIVE)
    first = call(path, "POST", "/pause", "one")
    assert first.status_code == 202 and RunDirectory.open(path).take_request("pause")
    again = call(path, "POST", "/pause", "one")
    assert again.status_code == 200 and again.json() == first.json()
    assert not RunDirectory.open(path).take_request("pause")
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


def test_a_token_is_long_and_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_token(file)
    file.chmod(0o600)
    assert read_token(file) == TOKEN
    os.mkfifo(tmp_path / "pipe", 0o600)  # no process writes to it, so an ordinary reader would wait for ever
    no_file = "not a regular file"
    for odd, said in ((tmp_path / "pipe", no_file), (Path("/dev/zero"), no_file), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=f"--token-file: got {odd} .*{said}"):
            read_token(odd)
    for value, said in (("", "got nothing"), ("short", "of 5 characters")):
        monkeypatch.setenv("RELAX_TOKEN", value)
        with pytest.raises(ConfigError, match=said):
            read_token(None)


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
