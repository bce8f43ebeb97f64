# SPDX-License-Identifier: Apache-2.0
"""Fixtures: a server that speaks the protocol of OpenEnv as a real one of version 0.10.0 was heard to, with the same messages,
codes and shapes.

Its environment repeats what it is told and pays a tenth for each letter, for three steps.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import WSMsgType, web

METADATA = {"additionalProperties": True, "description": "Additional metadata for the action", "type": "object"}
SCHEMA = {
    "action": {
        "additionalProperties": False,
        "properties": {"metadata": METADATA, "message": {"title": "Message", "type": "string"}},
        "required": ["message"],
        "title": "EchoAction",
        "type": "object",
    },
    "observation": {"type": "object"},
    "state": {"type": "object"},
}


class EchoServer:
    """A server in a thread of its own: started -> closed."""

    def __init__(self, sessions: int = 8) -> None:
        self.url, self.sessions, self.open = "", sessions, 0
        self.heard: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self._loop = asyncio.new_event_loop()

    @contextmanager
    def serving(self) -> Iterator[EchoServer]:
        started = threading.Event()
        thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        thread.start()
        assert started.wait(10)
        yield self
        self._loop.call_soon_threadsafe(self._loop.stop)
        thread.join(10)

    def _serve(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        application = web.Application()
        application.router.add_get("/ws", self._episode)
        application.router.add_get("/schema", self._schema)
        application.router.add_get("/moved/ws", self._moved)
        application.router.add_get("/moved/schema", self._schema)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _schema(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers)
        return web.json_response(SCHEMA)

    async def _moved(self, request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect(f"{self.url}/ws")

    async def _episode(self, request: web.Request) -> web.WebSocketResponse:
        self.headers.append(request.headers)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.open >= self.sessions:
            told = f"Server at capacity: {self.open}/{self.sessions} sessions active. Cannot accept new connections."
            await socket.send_str(
                _error(told, "CAPACITY_REACHED", active_sessions=self.open, max_sessions=self.sessions)
            )
            await socket.close()
            return socket
        self.open += 1
        try:
            await self._converse(socket)
        finally:
            self.open -= 1
        return socket

    async def _converse(self, socket: web.WebSocketResponse) -> None:
        steps, episode = 0, "e"
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                return
            asked = json.loads(message.data)
            self.heard.append(asked)
            data = asked.get("data", {})
            said = data.get("message")
            if asked["type"] == "reset":
                steps, episode = 0, data.get("episode_id", "e")
                word = f"seed {data.get('seed')} word {data.get('word', 'none')}"
                await socket.send_str(_observation({"metadata": {}, "echoed": word, "length": 0}, None, False))
            elif asked["type"] == "state":
                await socket.send_str(
                    json.dumps({"type": "state", "data": {"episode_id": episode, "step_count": steps}})
                )
            elif asked["type"] == "close":
                return
            elif not isinstance(said, str):
                errors = [
                    {"type": "missing", "loc": ["message"], "msg": "Field required", "input": data},
                    *(
                        {"type": "extra_forbidden", "loc": [one], "msg": "Extra inputs are not permitted"}
                        for one in data
                    ),
                ]
                await socket.send_str(_error("Invalid message", "VALIDATION_ERROR", errors=errors))
            elif said == "vanish":
                return
            elif said == "nonsense":
                await socket.send_str("[1, 2]")
            elif said != "silence":
                steps += 1
                if said == "boom":
                    await socket.send_str(_error("boom inside", "EXECUTION_ERROR"))
                    continue
                shown = {"metadata": {"k": 1}, "echoed": said, "length": len(said)}
                reward = None if said == "nothing" else float("nan") if said == "nan" else len(said) / 10
                await socket.send_str(_observation(shown, reward, steps >= 3))


def _observation(observation: dict[str, Any], reward: float | None, done: bool) -> str:
    data = {"observation": observation, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data})


def _error(message: str, code: str, **more: Any) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **more}})


@pytest.fixture
def server() -> Iterator[EchoServer]:
    with EchoServer().serving() as serving:
        yield serving


@pytest.fixture(scope="class")
def served(request: pytest.FixtureRequest) -> Iterator[None]:
    """The suite of this class plays on a server, in its other processes too, which import it again."""
    with EchoServer().serving() as serving, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENENV_TEST_URL", serving.url)
        patch.setitem(request.cls.options, "url", serving.url)
        yield
