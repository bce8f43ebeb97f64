# SPDX-License-Identifier: Apache-2.0
"""HTTP server through which agents call the policy and auxiliary pools; one server per environment process.

The key of a request identifies its sample. `AgentSession` holds the state of one sample; the server has no further
state.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from relax_core.api import Action, Generated, InfrastructureError, ModelClient, PromptRefused, Session
from relax_core.api.engine import NO_ENGINES
from relax_core.api.http_requests import MAX_ITEMS, HeadDeadline, parse_json
from relax_core.api.reward import LARGEST_REWARD
from relax_core.api.task import ToolCall
from relax_plugin_agents.dialects import DIALECTS
from relax_plugin_agents.dialects.reading import LONGEST_SHOWN, check_characters
from relax_plugin_agents.history import Call, History
from relax_plugin_agents.model_request import (
    Dialect,
    Finish,
    ModelRequest,
    ModelTurn,
    Refused,
    Sent,
    before_stop,
    sure_before_stop,
)
from relax_plugin_agents.side_calls import SideCalls

HEARTBEAT_S = 10.0
"""Seconds between two keep-alive events on a stream while no new part of the answer arrives."""
MAX_BODY_BYTES, MAX_TEXT_BYTES = 64 << 20, 4 << 20
"""Maximum size of a request's body in bytes, and of the body without its images. The limits protect memory and time."""
BOXED_SHARE = 4
"""A request from a sandbox may have 1/BOXED_SHARE of the bytes, brackets and commas of other requests."""
OVER = "This session is over: its limit of turns or tokens is reached, or the model can't answer any more."
"""Answer to calls after the sample's end: text, because agents would retry after an error or an empty answer."""
CONTEXT, MAX_CONTEXT = "x-relax-context", 64
"""Header that names the context of a call, and the maximum length of a context's name in characters."""
AGAIN = ("x-stainless-retry-count", "x-relax-retry")
"""Headers with the number of times that a client has sent this request before; any value but empty or 0 is a retry."""


class SessionOver(Exception):
    """Error for a call after the sample's end, or whose answer failed or was cancelled."""


class AgentSession:
    """The state of one sample's agent: `open -> calls ... -> close`; later calls raise SessionOver.

    Invariants:
    - a retried request gets the answer of its first attempt, even if that answer is still being sampled or was never
      delivered;
    - `close` cancels all pending calls, even if clients still wait for their answers.
    """

    def __init__(
        self, session: Session, max_bytes: int | None, clients: Mapping[str, ModelClient] = NO_ENGINES
    ) -> None:
        self.side_calls = SideCalls(clients)
        self.bytes_left = max_bytes
        """Number of bytes that the bodies of later requests may still have in total; None disables the limit."""
        self.agent_key, self.reporter_key = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self.history = History(session)
        self.reported: dict[str, float] = {}
        """Reported rewards by context; the sample's own reward is under the empty name."""
        self._answers: dict[Call, asyncio.Task[Action]] = {}
        self._more: dict[Call, asyncio.Event] = {}
        """One event per call. When more of the answer is sampled, the event is set and a new event replaces it."""
        self._closed = False

    @contextlib.asynccontextmanager
    async def asked(self, request: ModelRequest, again: bool) -> AsyncIterator[Call]:
        """Start a call for a request, or find the call that the request repeats; yield the call.

        The client counts as waiting until the context ends; `answer` returns the call's answer. Raises Refused for a
        request that can't be served, and SessionOver after the sample's end.
        """
        if self._closed:
            raise SessionOver
        call = self.history.same(request, again)
        if call is None:
            call = self.history.begin(request)
            self._more[call] = asyncio.Event()
            self._answers[call] = asyncio.create_task(self._generate(call, request))
        call.clients += 1
        try:
            yield call
        finally:
            call.clients -= 1

    @property
    def closed(self) -> bool:
        return self._closed

    def answered(self, call: Call) -> bool:
        """Return True if the answer of a call is complete, failed or cancelled."""
        return self._answers[call].done()

    async def answer(self, call: Call) -> Action:
        """Wait for the answer of a call and return it.

        Raises Refused if the policy can't take the call's messages, and SessionOver if the call failed or was cancelled.
        """
        answer = self._answers[call]
        await asyncio.wait([answer])
        if not answer.cancelled() and isinstance(refused := answer.exception(), Refused):
            raise refused
        if answer.cancelled() or answer.exception() is not None:
            raise SessionOver
        return answer.result()

    async def more(self, call: Call, known: int, timeout_s: float) -> bool:
        """Wait until the answer has more than `known` characters, or has ended; return False after `timeout_s` seconds.

        A call whose messages are rendered has an answer of 0 characters.
        """
        answer = self._answers[call]
        if answer.done() or (call.partial is not None and len(call.partial.text) > known):
            return True
        more = asyncio.create_task(self._more[call].wait())
        try:
            return bool((await asyncio.wait([answer, more], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED))[0])
        finally:
            more.cancel()
            await asyncio.gather(more, return_exceptions=True)

    async def close(self) -> None:
        """Cancel all pending calls. Answers that no client has read are discarded, so they are not trained."""
        self._closed = True
        await self.side_calls.close()
        for answer in self._answers.values():
            answer.cancel()
        await asyncio.gather(*self._answers.values(), return_exceptions=True)
        self.history.discard_unread()

    async def _generate(self, call: Call, request: ModelRequest) -> Action:
        def on_partial(partial: Action) -> None:
            call.partial = replace(partial, text=sure_before_stop(partial.text, call.stop))
            more, self._more[call] = self._more[call], asyncio.Event()
            more.set()

        try:
            action = await call.branch.generate(
                request.max_new_tokens, request.stop, on_partial if request.stream else None
            )
        except PromptRefused as refused:
            self.history.refused(call)
            raise Refused("messages", str(refused)) from refused
        self.history.answered(call, action)
        return action


class Gateway:
    """The server with its open samples, identified by keys.

    Invariant: an agent key opens only the model routes, a reporter key only `/report`; both keys become invalid when
    their sample ends.
    """

    def __init__(self, model: str) -> None:
        self.model, self.url, self.socket = model, "", ""
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._agents: dict[str, AgentSession] = {}
        self._reporters: dict[str, AgentSession] = {}
        self._dialects: dict[str, Dialect] = {dialect.path: dialect() for dialect in DIALECTS}
        self._serving: asyncio.Task[None] | None = None

    async def start(self, local: bool = False) -> None:
        """Listen on a free loopback port; if `local`, also on a Unix socket that only this user can open."""
        # With protocol 0, asyncio would leave Nagle's algorithm on, which would delay each answer by 40 ms.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        routes = [
            *(Route(path, self._ask, methods=["POST"]) for path in self._dialects),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/report", self._report, methods=["POST"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes, exception_handlers={HTTPException: self._unserved}), log_level="error",
            access_log=False, lifespan="off", timeout_keep_alive=120, http=HeadDeadline,
        )  # fmt: skip
        self._server = _Server(config)
        listeners = [listener, *([self._local()] if local else [])]
        self._serving = asyncio.create_task(self._server.serve(sockets=listeners))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Stop the server and delete the folder of its Unix socket."""
        if self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._serving
        if self._folder is not None:
            self._folder.cleanup()

    def _local(self) -> socket.socket:
        """Open the Unix socket in a new temporary folder."""
        self._folder = tempfile.TemporaryDirectory(prefix="relax-agent-", ignore_cleanup_errors=True)
        self.socket = f"{self._folder.name}/gateway"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self.socket)
        except OSError as error:
            listener.close()
            raise OSError(f"{self.socket}: {error}; set TMPDIR to a folder with a short path") from error
        os.chmod(self.socket, 0o600)
        return listener

    @contextlib.asynccontextmanager
    async def session(
        self, session: Session, max_bytes: int | None = None, clients: Mapping[str, ModelClient] = NO_ENGINES
    ) -> AsyncIterator[AgentSession]:
        """Accept requests of one sample's agent until the context ends.

        `max_bytes` limits the total size of the agent's request bodies. `clients`: auxiliary pools that the agent may
        call, by model name.
        """
        opened = AgentSession(session, max_bytes, clients)
        self._agents[opened.agent_key] = self._reporters[opened.reporter_key] = opened
        try:
            yield opened
        finally:
            del self._agents[opened.agent_key], self._reporters[opened.reporter_key]
            await opened.close()

    async def _unserved(self, http: Request, error: Exception) -> Response:
        """Answer a request to another route or with another method than those that the gateway serves."""
        path = http.url.path
        claude = "anthropic-version" in http.headers or path.startswith("/v1/messages")
        dialect = self._dialects["/v1/messages" if claude else "/v1/chat/completions"]
        message = f"{http.method} {path[:LONGEST_SHOWN]} is not served; use POST {', '.join(self._dialects)}, or GET /v1/models"
        return _failed(
            dialect, error.status_code if isinstance(error, HTTPException) else 500, message, "not_found_error"
        )

    async def _ask(self, http: Request) -> Response:
        dialect = self._dialects[http.url.path]
        session = self._agents.get(_key(http))
        if session is None:
            message = "no open sample has this agent key: the sample is over, or the key is not an agent key"
            return _failed(dialect, 401, message, "authentication_error")
        try:
            body, size = await _body(http, session)
            request = replace(dialect.ask(body), context=_context(http.headers.get(CONTEXT, "")))
            again = any(http.headers.get(header, "0") not in ("", "0") for header in AGAIN)
            _check_text(request, size)
            if isinstance(name := body.get("model"), str) and name in session.side_calls.clients:
                return await self._side_call(http, dialect, session, name, request, body, again)
            if not request.stream:
                return await self._whole(http, dialect, session, request, again)
            return await self._stream(http, dialect, session, request, body, again)
        except Refused as refused:
            return _failed(dialect, 400, str(refused), "invalid_request_error", refused.field)
        except SessionOver:
            if not request.stream:
                return JSONResponse(dialect.reply(self._over()))
            return StreamingResponse(dialect.events(self._over(), body, Sent()), media_type="text/event-stream")

    async def _whole(
        self, http: Request, dialect: Dialect, session: AgentSession, request: ModelRequest, again: bool
    ) -> Response:
        async with session.asked(request, again) as call:
            gone = asyncio.create_task(_disconnected(http))
            answer = asyncio.create_task(session.answer(call))
            try:
                await asyncio.wait([gone, answer], return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    return Response(status_code=499)  # the client has disconnected
                turn = self._turn(call, answer.result())
                call.delivered = not gone.done()
                return JSONResponse(dialect.reply(turn))
            finally:
                gone.cancel()
                answer.cancel()
                await asyncio.gather(gone, answer, return_exceptions=True)

    async def _stream(
        self, http: Request, dialect: Dialect, session: AgentSession, request: ModelRequest, body: Mapping[str, Any],
        again: bool,
    ) -> Response:  # fmt: skip
        async with contextlib.AsyncExitStack() as asked:
            call = await asked.enter_async_context(session.asked(request, again))
            # The response's headers wait until the messages are rendered, so that a refused request gets status 400.
            gone = asyncio.create_task(_disconnected(http))
            begun = asyncio.create_task(session.more(call, -1, HEARTBEAT_S))
            try:
                await asyncio.wait([gone, begun], return_when=asyncio.FIRST_COMPLETED)
                if not begun.done():
                    return Response(status_code=499)  # the client has disconnected
                if session.answered(call):
                    with contextlib.suppress(SessionOver):
                        await session.answer(call)
            finally:
                gone.cancel()
                begun.cancel()
                await asyncio.gather(gone, begun, return_exceptions=True)
            return StreamingResponse(
                self._events(asked.pop_all(), dialect, session, call, body), media_type="text/event-stream",
                headers={"cache-control": "no-cache"},
            )  # fmt: skip

    async def _events(
        self,
        asked: contextlib.AsyncExitStack,
        dialect: Dialect,
        session: AgentSession,
        call: Call,
        body: Mapping[str, Any],
    ) -> AsyncIterator[str]:
        created, sent, finish = int(time.time()), Sent(), ""
        async with asked:
            while not finish:
                if not await session.more(call, len(sent.text), HEARTBEAT_S):
                    yield dialect.heartbeat
                    continue
                try:
                    turn = await self._so_far(session, call, created)
                except Refused as refused:
                    yield dialect.failed_event(str(refused))
                    return
                finish, events = turn.finish, list(dialect.events(turn, body, sent))
                sent = Sent(sent.events + len(events), turn.text)
                for event in events:
                    yield event
            call.delivered = True

    async def _side_call(
        self, http: Request, dialect: Dialect, session: AgentSession, name: str, request: ModelRequest,
        body: Mapping[str, Any], again: bool,
    ) -> Response:  # fmt: skip
        """Answer a call to an auxiliary pool. Raises Refused, and SessionOver after the sample's end."""
        if session.closed:
            raise SessionOver
        answer = session.side_calls.ask(name, request, body, again)
        gone = asyncio.create_task(_disconnected(http))
        try:  # a call that is refused at once gets its error status, even if the client asked for a stream
            within_s = HEARTBEAT_S if request.stream else None
            await asyncio.wait([answer, gone], timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
        if not answer.done():
            if not request.stream:
                return Response(status_code=499)  # the client has disconnected
        elif answer.cancelled():
            raise SessionOver
        elif isinstance(failed := answer.exception(), InfrastructureError):
            return _failed(dialect, 503, str(failed), "api_error")
        elif failed is not None:
            raise failed
        elif not request.stream:
            return JSONResponse(dialect.reply(_answered(name, answer.result(), request.stop)))
        headers = {"cache-control": "no-cache"}
        events = _side_call_events(dialect, name, answer, body, request.stop)
        return StreamingResponse(events, 200, headers, "text/event-stream")

    async def _so_far(self, session: AgentSession, call: Call, created: int) -> ModelTurn:
        """Return a call's answer as a turn: complete if sampling has ended, else the part that is sampled so far."""
        partial = call.partial
        if partial is not None and not session.answered(call):
            return replace(self._turn(call, partial), created=created, tool_calls=(), finish="")
        try:
            return replace(self._turn(call, await session.answer(call)), created=created)
        except SessionOver:
            over = replace(self._over(), created=created)
            if partial is None or not partial.text:
                return over
            # A part of the answer was already sent, so append the text that explains the end.
            turn = self._turn(call, partial)
            return replace(turn, created=created, tool_calls=(), finish="stop", text=f"{partial.text}\n{over.text}")

    async def _models(self, http: Request) -> Response:
        session = self._agents.get(_key(http))
        if session is None:
            return JSONResponse({"error": {"message": "no open sample has this agent key"}}, 401)
        listed = [
            {"id": name, "object": "model", "created": 0, "owned_by": "relax", "type": "model"}
            for name in (self.model, *session.side_calls.clients)
        ]
        return JSONResponse({"object": "list", "data": listed, "has_more": False})

    async def _report(self, http: Request) -> Response:
        """Store the reward that a client posts for a sample, or for a context in the sample; the last post counts."""
        session = self._reporters.get(_key(http))
        if session is None:
            return JSONResponse({"error": "no open sample has this reporter key"}, 401)
        try:
            body, _ = await _body(http, session)
            reward, context = body.get("reward"), _context(body.get("context", ""))
        except Refused as refused:
            return JSONResponse({"error": str(refused)}, 400)
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= LARGEST_REWARD:
            fix = "send a finite number from -1e9 to 1e9"
            return JSONResponse({"error": f"reward: got {str(reward)[:LONGEST_SHOWN]}; {fix}"}, 400)
        if context and not any(call.context == context and call.action for call in session.history.calls):
            return JSONResponse({"error": f"context: got {context!r}; no call of this context was answered"}, 400)
        session.reported[context] = float(reward)
        return JSONResponse({"reward": float(reward), "context": context})

    def _turn(self, call: Call, action: Action) -> ModelTurn:
        number = call.name.replace("/", "_")
        calls = tuple(
            ToolCall(one.name, one.arguments, f"call_{number}_{place}") for place, one in enumerate(action.tool_calls)
        )
        finish: Finish = "length" if action.cut else "tool_calls" if calls else "stop"
        text, stop_text = before_stop(action.text, call.stop)
        return ModelTurn(
            number, self.model, int(time.time()), text, calls, finish, action.prompt_tokens, len(action.tokens), stop_text
        )  # fmt: skip

    def _over(self) -> ModelTurn:
        return ModelTurn(f"over_{secrets.token_hex(6)}", self.model, int(time.time()), OVER, (), "stop", 0, 0)


def _answered(name: str, answer: Generated, stop: Sequence[str]) -> ModelTurn:
    """Return a pool's answer as a turn; its `prompt_tokens` is 0, because pools do not report the prompt's length."""
    number, (text, stop_text) = f"side_{secrets.token_hex(6)}", before_stop(answer.text, stop)
    return ModelTurn(number, name, int(time.time()), text, (), answer.finish, 0, len(answer.tokens), stop_text)


async def _side_call_events(
    dialect: Dialect, name: str, answer: asyncio.Task[Generated], body: Mapping[str, Any], stop: Sequence[str]
) -> AsyncIterator[str]:
    """Yield keep-alive events until a pool has answered, then the whole answer or the error."""
    while not (await asyncio.wait([answer], timeout=HEARTBEAT_S))[0]:
        yield dialect.heartbeat
    if not answer.cancelled() and isinstance(failed := answer.exception(), InfrastructureError | Refused):
        yield dialect.failed_event(str(failed))
        return
    for event in dialect.events(_answered(name, answer.result(), stop), body, Sent()):
        yield event


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the process handles its signals itself."""
        yield


def _context(name: Any) -> str:
    """Return a context's name. Raises Refused if it is not a string or too long."""
    if not isinstance(name, str) or len(name) > MAX_CONTEXT:
        raise Refused("context", f"got {str(name)[:MAX_CONTEXT]!r}; send text of at most {MAX_CONTEXT} characters")
    return name


def _key(http: Request) -> str:
    scheme, _, key = http.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else http.headers.get("x-api-key", "")


async def _body(http: Request, session: AgentSession) -> tuple[Mapping[str, Any], int]:
    """Read the JSON object of a request; return it and its size in bytes. Raises Refused if too large or malformed."""
    data, share = bytearray(), 1 if session.bytes_left is None else BOXED_SHARE
    async for chunk in http.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES // share:
            most = f"{(MAX_BODY_BYTES // share) >> 20} MiB"
            raise Refused("body", f"the request has more than {most}; send a shorter history")
        if session.bytes_left is not None:
            session.bytes_left -= len(chunk)
            if session.bytes_left < 0:
                raise Refused("body", "this sample's requests exceed the total size that a sandbox may send")
    try:
        body = parse_json(bytes(data), MAX_ITEMS // share)
    except ValueError as error:
        raise Refused("body", f"the request is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused("body", f"got {type(body).__name__}; send a JSON object")
    if b"\\u" in data:
        check_characters(body, "body")
    return body, len(data)


def _check_text(request: ModelRequest, size: int) -> None:
    """Raise Refused for a request of `size` bytes whose texts are too long to be read while other samples wait."""
    parts = (part for message in request.messages if not isinstance(message.content, str) for part in message.content)
    text = size - sum(len(part.media.source) for part in parts if part.media is not None)
    if text > MAX_TEXT_BYTES:
        most = f"{MAX_TEXT_BYTES >> 20} MiB"
        raise Refused(
            "messages", f"the request has {text} bytes besides images; send at most {most}: a shorter history"
        )


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _failed(dialect: Dialect, status: int, message: str, kind: str, field: str | None = None) -> Response:
    """Return an error response that tells the client not to retry."""
    return JSONResponse(dialect.failed(message, kind, field), status, {"x-should-retry": "false"})
