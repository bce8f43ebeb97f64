# SPDX-License-Identifier: Apache-2.0
"""`relax logs --address`: the log of a run elsewhere, through its control API, as the run's own files would show it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from relax_plugin_control import log_stream
from relax_plugin_control.log_stream import log_lines, newest
from relax_plugin_control.server import ControlServer

from relax_core.api.errors import ConfigError, InfrastructureError
from relax_core.observe.process_log import ProcessLog
from relax_core.observe.redaction import Redactor
from relax_core.views.logs import LOOK_S, REMARKS, LogFilter
from relax_core.views.run import RunView
from tests.control_api import TOKEN, call
from tests.unit.views.test_logs import Run, relax, run  # noqa: F401 fixtures

Relax = Callable[..., Any]


@pytest.fixture
def address(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:  # noqa: F811
    monkeypatch.setenv("RELAX_TOKEN", TOKEN)
    server = ControlServer(RunView(run.path), "127.0.0.1:0", TOKEN)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server.address
    server.stop()
    thread.join()


def test_a_log_through_the_control_api_is_that_of_the_run_s_files(run: Run, relax: Relax, address: str) -> None:  # noqa: F811
    log = ProcessLog(
        run.path / "logs" / "engine-0.jsonl", Redactor(("hf_secret",)), {"role": "rollout", "process": "engine-0"}
    )
    log.append({"level": "info", "message": "with hf_secret, \ud800 and \u2028"})
    log.close()
    run.end()
    for arguments in (
        ("--json", "--follow"), ("--role", "engine-0", "--level", "warning", "--last", "2"),
        ("--role", "actor", "--role", "controller", "--since", "2025-11-27T10:40:01", "--step", "1"), ("--role", "critic"),
    ):  # fmt: skip
        here, there = relax("r", *arguments), relax("--address", address, *arguments)
        assert (there.stdout, there.stderr) == (here.stdout, here.stderr)
    shown = relax("--address", address, "--json").stdout
    assert len(shown.splitlines()) == 7 and "hf_secret" not in shown


def test_wrong_requests_name_the_fix(
    run: Run, relax: Relax, address: str, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    for query, said in (
        ("level=loud", "level: got loud; use one of"), ("since=yesterday", "since: got yesterday; give an age such as"),
        ("last=10001", "last: got 10001; give a number up to 10000"), ("step=x", "step: got 'x'"),
    ):  # fmt: skip
        answer = call(run.path, "GET", f"/logs?{query}")
        assert answer.status_code == 400 and answer.json()["error"].startswith(said)
    with pytest.raises(ConfigError, match="leave the run out"):
        relax("r", "--address", address)
    monkeypatch.setenv("RELAX_TOKEN", "another-token-of-16")
    with pytest.raises(ConfigError, match="authorization: got no or another token"):
        relax("--address", address)


def test_a_follower_gets_each_record_until_the_run_has_ended(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(log_stream, "QUIET_S", LOOK_S)

    async def next_line(lines: AsyncIterator[bytes]) -> dict[str, Any]:
        while not (line := await anext(lines)).strip():
            pass
        found: dict[str, Any] = json.loads(line)
        return found

    async def followed() -> None:
        lines = log_lines(RunView(run.path), LogFilter(), 2, followed=True)
        assert [(await next_line(lines))["message"] for _ in range(2)] == ["loading", "lost"]
        assert await anext(lines) == b"\n"
        run.record(10, "reward-0", "of a new process")
        assert (await next_line(lines))["message"] == "of a new process"
        run.record(11, "reward-0", "the last")
        run.end()
        assert (await next_line(lines))["message"] == "the last"
        assert await next_line(lines) == {"schema": REMARKS, "remarks": []}
        with pytest.raises(StopAsyncIteration):
            await anext(lines)

    asyncio.run(followed())


def test_the_newest_records_within_the_limits_are_sent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    records = [{"message": "x" * 100, "number": number} for number in range(9)]
    monkeypatch.setattr(log_stream, "MAX_BYTES", 500)
    lines, removed = newest(records, 8)
    assert [json.loads(line)["number"] for line in lines] == [6, 7, 8] and removed == 6
    assert newest(records, 2)[1] == 0  # the caller left the earlier records out

    async def all_lines() -> list[bytes]:
        return [line async for line in log_lines(RunView(run.path), LogFilter(), 100, followed=False)]

    *sent, remarks = map(json.loads, asyncio.run(all_lines()))
    assert len(sent) < 6 and f"{6 - len(sent)} earlier records are left out" in remarks["remarks"][-1]


def test_a_server_that_ends_early_or_is_another_is_named(
    run: Run, relax: Relax, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    monkeypatch.setenv("RELAX_TOKEN", TOKEN)
    answers = [(run.path / "logs" / "actor-0.jsonl").read_bytes(), b"<html>\n", b"{}\n"]

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answers.pop(0))

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            at = ("--address", f"127.0.0.1:{server.server_port}")
            with pytest.raises(InfrastructureError, match=r"ended the log early.*--since 2025-11-27T10:40:04"):
                relax(*at)
            with pytest.raises(ConfigError, match="give the address of `relax serve`"):
                relax(*at)
            with pytest.raises(InfrastructureError, match=r"ended the log early; repeat the command$"):
                relax(*at)
        finally:
            server.shutdown()
            thread.join()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(InfrastructureError, match="does not answer"):
        relax("--address", f"127.0.0.1:{port}")
