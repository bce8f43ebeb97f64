# SPDX-License-Identifier: Apache-2.0
"""One episode on an OpenEnv server: JSON messages over its WebSocket, one request at a time.

A request is `{"type": "reset" | "step" | "state" | "close", "data": {...}}`. The answer's type is `observation` (with
data `observation`, `reward` and `done`), `state`, or `error` with a code. A server opens a session for each connection,
and ends the session with the connection.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from relax_core.api.reward import LARGEST_REWARD

CLOSE_S = 5.0
"""Time limit for closing a connection, in seconds."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
"""First and longest pause in seconds before a new attempt at a server that has no free session."""
MAX_SCHEMA = 1 << 20
"""Maximum number of bytes that are read of a server's schema."""
INVALID, FULL = "VALIDATION_ERROR", "CAPACITY_REACHED"
"""Error codes for an action that does not fit the schema, and for a server without a free session."""
RAISED = "EXECUTION_ERROR"
"""Error code for an exception in the environment's own code."""


class ServerFailed(RuntimeError):
    """Error for a failure of the server or the connection, which is not the policy's fault."""


class NotAccepted(ValueError):
    """Error for a request that the server answers with an error; `code` is the server's error code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Answer:
    """The server's answer to a reset or a step."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class EpisodeConnection:
    """A session on a server: `new -> started -> (step -> answer)* -> closed`.

    Invariants: at most one request is pending; after a failure the connection is closed, so that a late answer is never
    matched to a later request.
    """

    def __init__(self, url: str, headers: Mapping[str, str], max_bytes: int) -> None:
        self.url = url.rstrip("/")
        self._headers, self._max_bytes = headers, max_bytes
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def begin(self, data: Mapping[str, Any], within_s: float) -> Answer:
        """Connect and reset; retry while the server has no free session. Raises ServerFailed after `within_s` seconds."""
        pause, full = FIRST_PAUSE_S, ""
        try:
            async with asyncio.timeout(within_s):
                while True:
                    await self._connect()
                    try:
                        return _observed(await self._answer("reset", data, "observation"))
                    except NotAccepted as error:
                        if error.code != FULL:
                            raise self._failed(f"the reset with {dict(data)} failed: {error}") from error
                        full = str(error)
                    await self.close()
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_S)
        except TimeoutError:
            await self.close()
            why = f"it has no session left: {full}" if full else "it did not begin an episode"
            raise self._failed(f"{why} within {within_s:g} s") from None
        except ServerFailed:
            await self.close()
            raise

    async def step(self, action: Mapping[str, Any], within_s: float) -> Answer:
        """Take an action. Raises NotAccepted if the server refuses the action, ServerFailed without a valid answer."""
        return _observed(await self._asked("step", action, "observation", within_s))

    async def state(self, within_s: float) -> dict[str, Any]:
        """Return the episode's state on the server. Raises ServerFailed, or NotAccepted for an error answer."""
        return await self._asked("state", None, "state", within_s)

    async def close(self) -> None:
        """End the session on the server; closing twice is allowed."""
        socket, client = self._socket, self._client
        self._socket = self._client = None
        with suppress(TimeoutError, aiohttp.ClientError, ConnectionError):
            async with asyncio.timeout(CLOSE_S):
                if socket is not None and not socket.closed:
                    await socket.send_str('{"type": "close"}')
                    await socket.close()
        if client is not None:
            await client.close()

    async def _connect(self) -> None:
        parts = urlsplit(self.url)
        place = parts._replace(scheme={"http": "ws", "https": "wss"}[parts.scheme], path=f"{parts.path}/ws").geturl()
        self._client = client(self._headers)
        try:
            self._socket = await self._client.ws_connect(place, max_msg_size=self._max_bytes)
        except (aiohttp.ClientError, OSError) as error:
            raise self._failed(f"no connection: {_words(error)}") from error

    async def _asked(self, what: str, data: Mapping[str, Any] | None, wanted: str, within_s: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(within_s):
                return await self._answer(what, data, wanted)
        except TimeoutError:
            await self.close()
            raise self._failed(f"did not answer a {what} within {within_s:g} s") from None
        except ServerFailed:
            await self.close()
            raise

    async def _answer(self, what: str, data: Mapping[str, Any] | None, wanted: str) -> dict[str, Any]:
        """Send a request and return the data of its answer.

        Raises NotAccepted if the server answers with an error, and ServerFailed for every answer of an unexpected type.
        """
        if self._socket is None or self._socket.closed:
            raise self._failed("the connection is gone")
        request = {"type": what} if data is None else {"type": what, "data": dict(data)}
        with suppress(ConnectionError, aiohttp.ClientError):  # an answer from before the close can still be read
            await self._socket.send_str(json.dumps(request))
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            code = f" (status {self._socket.close_code})" if self._socket.close_code else ""
            raise self._failed(f"closed the connection instead of answering a {what}{code}")
        try:
            answer = json.loads(message.data)
            kind, data = answer["type"], answer["data"]
            if kind == "error":
                raise NotAccepted(str(data["code"]), _error_text(data))
            if kind != wanted or not isinstance(data, dict):
                raise ValueError(kind)
        except NotAccepted:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self._failed(f"answered a {what} with {message.data[:200]!r}, not with type {wanted}") from error
        return data

    def _failed(self, why: str) -> ServerFailed:
        return ServerFailed(f"OpenEnv server {self.url}: {why}")


def client(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """Return an HTTP client that refuses redirects and ignores proxy variables, so it contacts only the given host."""

    async def refuse(_session: Any, _context: Any, params: aiohttp.TraceRequestRedirectParams) -> None:
        place = params.response.headers.get("Location", "")
        raise ServerFailed(
            f"the server redirects to {place[:200]}; redirects are not followed: set url to that address"
        )

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse)
    return aiohttp.ClientSession(headers=dict(headers), trace_configs=[trace])


async def action_schema(url: str, headers: Mapping[str, str], within_s: float) -> dict[str, Any]:
    """Return the JSON schema of a server's actions, without the property `metadata`. Raises ServerFailed."""
    place = f"{url.rstrip('/')}/schema"
    try:
        async with asyncio.timeout(within_s), client(headers) as asking, asking.get(place) as answer:
            body = await answer.content.read(MAX_SCHEMA)
            if answer.status != 200:
                raise ServerFailed(f"{place} answered with status {answer.status}")
            schema = json.loads(body)["action"]
            return {**schema, "properties": {n: one for n, one in schema["properties"].items() if n != "metadata"}}
    except TimeoutError:
        raise ServerFailed(f"{place} did not answer within {within_s:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise ServerFailed(f"{place}: no connection: {_words(error)}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ServerFailed(f"{place} answered without a schema of actions: {_words(error)}") from error


def _observed(data: Mapping[str, Any]) -> Answer:
    observation, reward, done = data.get("observation"), data.get("reward"), data.get("done", False)
    if not isinstance(observation, dict) or not isinstance(done, bool):
        raise ServerFailed(f"the server's answer has no valid observation: {str(data)[:200]}")
    if reward is not None and (not isinstance(reward, int | float) or not abs(reward) <= LARGEST_REWARD):
        raise ServerFailed(f"the server gave the reward {reward!r}; it must be a finite number from -1e9 to 1e9")
    return Answer(observation, None if reward is None else float(reward), done)


def _error_text(data: Mapping[str, Any]) -> str:
    """Return the message of an error answer, and the message about each field that does not fit the schema."""
    errors = data.get("errors") or []
    places = "; ".join(f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg', '')}" for one in errors)
    return f"{data.get('message', '')}{f' ({places})' if places else ''}"


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
