# SPDX-License-Identifier: Apache-2.0
"""The server over real sockets, asked by the vendors' own clients."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given, strategies as st
from relax_plugin_agents import gateway as served
from relax_plugin_agents.gateway import OVER, AgentSession, Gateway
from relax_plugin_agents.history import check_media
from relax_plugin_agents.model_request import Refused, before_stop, sure_before_stop

import relax_core.api.http_requests as http_requests
from relax_core.api import ConfigError, Environment, InfrastructureError, Message, Part, PromptRefused, Task, Trajectory
from relax_core.api.task import Media
from relax_core.engines.requests import PendingRequest
from relax_core.sampling.episode import InProcess, Limits
from relax_core.sampling.session import Branch
from relax_core.testing.scripted_client import ScriptedClient
from tests.unit.sampling import toy_policy
from tests.unit.sampling.toy_policy import Completion, Letters, Script, completion, play, texts

Agent = Callable[["Inside"], Awaitable[None]]
FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    },
}


class Inside:
    """What an agent's author has at hand."""

    def __init__(self, gateway: Gateway, session: AgentSession) -> None:
        import anthropic
        import openai

        self.gateway, self.session = gateway, session
        self.openai = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=session.agent_key, max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=gateway.url, api_key=session.agent_key, max_retries=0)

    async def chat(self, *said: str, **more: Any) -> Any:
        """User and assistant take turns; the answer as the client reads it."""
        roles = ["user", "assistant"] * len(said)
        messages: Any = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
        return await self.openai.chat.completions.create(model="policy", messages=messages, **more)

    @asynccontextmanager
    async def http(self, key: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
        headers = {"authorization": f"Bearer {key or self.session.agent_key}"}
        async with httpx.AsyncClient(base_url=self.gateway.url, headers=headers, timeout=60) as client:
            yield client


class Played(Environment):
    """Lets a test be the agent, over HTTP."""

    in_process = True
    agent: Agent
    local = False
    of_session: Mapping[str, Any] = {}

    async def run(self, task: Task, seed: int, session: Any) -> None:
        gateway = Gateway("policy")
        await gateway.start(local=self.local)
        try:
            async with gateway.session(session, **self.of_session) as opened:
                await self.agent(Inside(gateway, opened))
        finally:
            await gateway.stop()


async def sample(
    agent: Agent, policy: Any, turns: int = 100, local: bool = False, max_bytes: int | None = None, **clients: Any
) -> Trajectory:
    environment = Played()
    environment.agent, environment.local = agent, local
    environment.of_session = {"clients": clients, "max_bytes": max_bytes}
    trajectory = await play(InProcess(environment, 60.0), policy, limits=Limits(100, turns))
    assert trajectory.outcome.judged, trajectory.info
    return trajectory


class Slow:
    """A policy that answers when it is let."""

    def __init__(self, *said: str) -> None:
        self.said, self.calls = list(said), 0
        self.let = asyncio.Event()

    async def __call__(self, call: PendingRequest) -> Completion:
        self.calls += 1
        await self.let.wait()
        return completion(self.said.pop(0), call.max_new_tokens)


async def test_one_conversation_in_three_dialects_is_one_tree() -> None:
    async def agent(inside: Inside) -> None:
        first = await inside.chat("a")
        assert first.choices[0].message.content == "one" and first.choices[0].finish_reason == "stop"
        assert first.usage.completion_tokens == len("one$")
        second = await inside.openai.responses.create(
            model="policy",
            input=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "one"}, {"role": "user", "content": "b"}],
        )  # fmt: skip
        assert second.output_text == "two"
        third = await inside.anthropic.messages.create(
            model="policy", max_tokens=50,
            messages=[
                {"role": "user", "content": "a"}, {"role": "assistant", "content": "one"},
                {"role": "user", "content": "b"}, {"role": "assistant", "content": "two"},
                {"role": "user", "content": "c"},
            ],
        )  # fmt: skip
        assert third.content[0].type == "text" and third.content[0].text == "three"

    trajectory = await sample(agent, Script("one", "two", "three"))
    assert texts(trajectory) == ["[user:a][a:ONE$][user:b][a:TWO$][user:c][a:THREE$"]


async def test_streamed_and_whole_answers_have_equal_text_and_training_rows() -> None:
    async def agent(inside: Inside) -> None:
        stream = await inside.chat("a", stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        assert text == "one"
        async with inside.anthropic.messages.stream(
            model="policy", max_tokens=50,
            messages=[
                {"role": "user", "content": "a"}, {"role": "assistant", "content": "one"}, {"role": "user", "content": "b"},
            ],
        ) as events:  # fmt: skip
            assert "".join([piece async for piece in events.text_stream]) == "two"

    trajectory = await sample(agent, Script("one", "two"))
    assert texts(trajectory) == ["[user:a][a:ONE$][user:b][a:TWO$"] and not trajectory.num_discarded


async def test_calls_of_tools_come_and_go_through_the_client() -> None:
    async def agent(inside: Inside) -> None:
        messages: list[Any] = [{"role": "user", "content": "a"}]
        first = await inside.openai.chat.completions.create(model="policy", messages=messages, tools=[FIND])  # type: ignore[list-item]
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
        call: Any = choice.message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)) == ("find", {"q": "x"})
        ids.append(call.id)
        messages += [choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "found"}]
        last = await inside.openai.chat.completions.create(model="policy", messages=messages, tools=[FIND])  # type: ignore[list-item]
        assert last.choices[0].message.content == "end"

    said = '<tool_call>{"name": "find", "arguments": {"q": "x"}}</tool_call>'
    ids: list[str] = []
    for _ in range(2):
        (row,) = texts(await sample(agent, Script(said, "end")))
        assert row == f"[user:a][a:{said.upper()}$][tool:found][a:END$"
    assert ids[0] == ids[1], "a prompt may show ids, so equal conversations have equal ids"


async def test_a_setting_that_changes_the_distribution_is_refused_without_a_retry() -> None:
    import anthropic
    import openai

    async def agent(inside: Inside) -> None:
        with pytest.raises(openai.BadRequestError, match="logit_bias") as refused:
            await inside.chat("a", logit_bias={"5": 3})
        assert refused.value.response.headers["x-should-retry"] == "false"
        with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
            await inside.anthropic.messages.create(
                model="policy", max_tokens=5, messages=[{"role": "user", "content": "a"}],
                tools=[{"name": "find", "input_schema": {"type": "object"}}], tool_choice={"type": "any"},
            )  # fmt: skip
        await inside.chat("a", temperature=0.1)  # the run's own sampling wins

    policy = Script("one")
    await sample(agent, policy)
    assert len(policy.calls) == 1


PNG = "data:image/png;base64,iVBORw0KGgo="
CALL = {"id": "c", "type": "function", "function": {"name": "find", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "c", "name": "find", "input": {}}
MEDIA: tuple[tuple[str, str, list[Any]], ...] = (
    ("/v1/chat/completions", "image", [{"type": "image_url", "image_url": {"url": PNG}}]),
    ("/v1/chat/completions", "audio", [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]),
    ("/v1/chat/completions", "video", [{"type": "video_url", "video_url": {"url": "http://x/a.mp4"}}]),
    ("/v1/chat/completions", "file", [{"type": "file", "file": {"file_data": PNG}}]),
    ("/v1/responses", "image", [{"type": "input_image", "image_url": PNG}]),
    ("/v1/responses", "file", [{"type": "input_file", "file_data": PNG}]),
    ("/v1/messages", "image", [{"type": "image", "source": {"type": "url", "url": "https://x/a.png"}}]),
    ("/v1/messages", "document", [{"type": "document", "source": {"type": "url", "url": "https://x/a.pdf"}}]),
)


@pytest.mark.parametrize("stream", [False, True])
async def test_media_for_a_model_that_is_text_only_are_refused_and_the_session_stays_usable(stream: bool) -> None:
    async def agent(inside: Inside) -> None:
        async with inside.http() as client:
            for path, kind, parts in MEDIA:
                user = {"role": "user", "content": parts}
                histories: list[list[Any]] = [[user]]
                if path == "/v1/chat/completions":
                    result = {"role": "tool", "tool_call_id": "c", "content": parts}
                    histories.append([{"role": "assistant", "tool_calls": [CALL]}, result])
                elif path == "/v1/responses":
                    call = {"type": "function_call", "call_id": "c", "name": "find", "arguments": "{}"}
                    histories.append([call, {"type": "function_call_output", "call_id": "c", "output": parts}])
                else:
                    results = [{"type": "tool_result", "tool_use_id": "c", "content": parts}]
                    histories.append([{"role": "assistant", "content": [USE]}, {"role": "user", "content": results}])
                for model, history in product(("policy", "judge"), histories):
                    body = {"model": model, "input": history, "messages": history, "stream": stream}
                    answer = await client.post(path, json=body)
                    assert answer.status_code == 400, (path, kind)
                    said = answer.json()["error"]["message"]
                    assert kind in said and "text only" in said
        assert (await inside.chat("a")).choices[0].message.content == "one"

    trajectory = await sample(agent, Script("one"), judge=ScriptedClient("judge", lambda prompt: "yes"))
    assert texts(trajectory) == ["[user:a][a:ONE$"]


class Strict(Letters):
    """A family whose template refuses messages of one role in a row, as many models' templates do."""

    def _said(self, messages: Sequence[Message]) -> str:
        if any(one.role == other.role for one, other in pairwise(messages)):
            raise ConfigError("model.chat_template", "roles that must alternate", "change the messages")
        return super()._said(messages)


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_that_the_template_refuses_get_its_reason_and_the_session_stays_usable(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy_policy, "Letters", Strict)

    async def agent(inside: Inside) -> None:
        said = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "one"), ("user", "b"))]
        wrong = [*said, {"role": "user", "content": "c"}]

        async def refused(history: Any) -> None:
            async with inside.http() as client:
                for path in inside.gateway._dialects:
                    answer = await client.post(path, json={"input": history, "messages": history, "stream": stream})
                    assert answer.status_code == 400, (path, answer.text)
                    error = answer.json()["error"]
                    assert "roles that must alternate" in error["message"] and error["type"] == "invalid_request_error"

        await refused(wrong[2:])
        assert (await inside.chat("a")).choices[0].message.content == "one"
        await refused(wrong)
        assert (await inside.chat("a", "one", "b")).choices[0].message.content == "two"
        assert inside.session.history.reasons() == {"first": 1, "continued": 1}

    trajectory = await sample(agent, Script("one", "two"))
    assert texts(trajectory) == ["[user:a][a:ONE$][user:b][a:TWO$"]
    assert [message.text for message in trajectory.messages] == ["a", "one", "b", "two"]


async def test_a_refusal_after_the_head_of_a_stream_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    let = asyncio.Event()

    async def refuse(*_: Any) -> None:
        await let.wait()
        raise PromptRefused("an image that can't be read")

    async def agent(inside: Inside) -> None:
        body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
        with monkeypatch.context() as patch:
            patch.setattr(Branch, "generate", refuse)
            patch.setattr(served, "HEARTBEAT_S", 0.0)  # the head of the answer waits for nothing
            async with inside.http() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
                assert answer.status_code == 200
                patch.setattr(served, "HEARTBEAT_S", 10.0)
                let.set()
                assert "an image that can't be read" in (await answer.aread()).decode()
        assert (await inside.chat("a")).choices[0].message.content == "one"

    await sample(agent, Script("one"))


def test_a_medium_is_refused_unless_the_model_takes_its_kind() -> None:
    image = (Message("user", (Part("see"), Part(media=Media("image", PNG)))),)
    check_media(image, ("image",))
    with pytest.raises(Refused, match="got images in a message of 'user'; the model takes only text and audio"):
        check_media(image, ("audio",))


async def test_a_broken_or_endless_body_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = (b"", b"[1]", b"{", b'{"messages": 3}', b"\xff\xfe", b"[" * 100_000,
              b'{"messages": [{"role": "user", "content": "a\\ud83d"}], "input": "\\udfff"}',
              b'{"x": [' + b"[]," * 600_000 + b"1]}",
              *(b'{"input": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": %s}' % number
                for number in (b"9" * 5000, b"9" * 30, b"-" + b"9" * 25, b"NaN", b"-Infinity", b"1e999")))  # fmt: skip

    async def agent(inside: Inside) -> None:
        async with inside.http() as client:
            for path, body in product(("/v1/chat/completions", "/v1/responses", "/v1/messages"), bodies):
                answer = await client.post(path, content=body)
                assert answer.status_code == 400 and answer.json()["error"]["message"]
            monkeypatch.setattr(served, "MAX_TEXT_BYTES", 1000)
            image = {"type": "image_url", "image_url": {"url": f"{PNG}{'A' * 2000}"}}
            for content, reason in (("a" * 2000, "besides images"), ([image], "text only")):
                body = {"messages": [{"role": "user", "content": content}]}
                answer = await client.post("/v1/chat/completions", json=body)
                assert answer.status_code == 400 and reason in answer.json()["error"]["message"]
            monkeypatch.setattr(served, "MAX_BODY_BYTES", 1000)
            answer = await client.post("/v1/chat/completions", content=b" " * 5000)
            assert answer.status_code == 400 and "MiB" in answer.json()["error"]["message"]

    await sample(agent, Script())


async def test_a_box_may_send_less(monkeypatch: pytest.MonkeyPatch) -> None:
    async def agent(inside: Inside) -> None:
        async with inside.http() as client:
            for body, reason in ((b'{"x": "' + b"," * 600 + b'"}', "brackets and commas"), (b" " * 5000, "MiB")):
                answer = await client.post("/v1/messages", content=body)
                assert answer.status_code == 400 and reason in answer.json()["error"]["message"]
                inside.session.bytes_left = None
                answer = await client.post("/v1/messages", content=body)
                assert reason not in answer.json()["error"]["message"]
                inside.session.bytes_left = 1 << 20

    monkeypatch.setattr(served, "MAX_ITEMS", 1000)
    monkeypatch.setattr(served, "MAX_BODY_BYTES", 10_000)
    await sample(agent, Script(), max_bytes=1 << 20)


async def test_a_route_that_is_not_served_is_answered_in_json_with_those_that_are() -> None:
    async def agent(inside: Inside) -> None:
        async with inside.http() as client:
            for method, path, status in (
                ("POST", "/v1/completions", 404), ("POST", "/v1/messages/count_tokens", 404), ("GET", "/v1/responses", 405),
            ):  # fmt: skip
                answer = await client.request(method, path)
                error = answer.json()["error"]
                assert (answer.status_code, error["type"]) == (status, "not_found_error")
                assert f"{method} {path} is not served; use POST /v1/chat/completions, " in error["message"]
                assert (answer.json().get("type") == "error") == ("messages" in path)

    await sample(agent, Script())


async def test_each_key_opens_only_its_own_routes_and_expires_with_its_sample() -> None:
    kept: list[Inside] = []

    async def agent(inside: Inside) -> None:
        kept.append(inside)
        await inside.chat("a")
        body = {"model": "policy", "messages": [{"role": "user", "content": "a"}]}
        for key in (inside.session.reporter_key, "nobody", ""):
            async with inside.http(key or "-") as client:
                assert (await client.post("/v1/chat/completions", json=body)).status_code == 401
                assert (await client.get("/v1/models")).status_code == 401
        async with inside.http() as client:
            assert (await client.post("/report", json={"reward": 9})).status_code == 401
            assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["policy"]
        assert inside.session.reported == {}
        async with inside.http(inside.session.reporter_key) as client:
            for wrong in ({}, [1], *({"reward": reward} for reward in (True, "1", None, 10**400, -1e308))):
                assert (await client.post("/report", json=wrong)).status_code == 400
            assert (await client.post("/report", content=b'{"reward": NaN}')).status_code == 400
            assert (await client.post("/report", json={"reward": 0.5})).json()["reward"] == 0.5
        assert inside.session.reported == {"": 0.5}
        async with inside.gateway.session(inside.session.history.root) as other:
            gone = other.agent_key
        async with inside.http(gone) as client:
            late = await client.post("/v1/chat/completions", json=body)
            assert late.status_code == 401 and "over" in late.json()["error"]["message"]

    await sample(agent, Script("one"))


async def test_at_the_limit_an_agent_gets_a_message_that_is_not_trained() -> None:
    async def agent(inside: Inside) -> None:
        await inside.chat("a")
        for stream in (False, True):
            answer = await inside.chat("a", "one", "b", stream=stream)
            if stream:
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in answer if chunk.choices])
            else:
                text = answer.choices[0].message.content
            assert text == OVER

    trajectory = await sample(agent, Script("one"), turns=1)
    assert texts(trajectory) == ["[user:a][a:ONE$"] and trajectory.outcome == "truncated"


async def test_a_request_that_is_sent_again_in_flight_is_one_call() -> None:
    async def agent(inside: Inside) -> None:
        first = asyncio.create_task(inside.chat("a"))
        while not policy.calls:
            await asyncio.sleep(0.01)
        again = asyncio.create_task(inside.chat("a", extra_headers={"x-relax-retry": "1"}))
        await asyncio.sleep(0.2)
        policy.let.set()
        one, other = await first, await again
        assert one.choices[0].message == other.choices[0].message

    policy = Slow("one")
    trajectory = await sample(agent, policy)
    assert policy.calls == 1 and texts(trajectory) == ["[user:a][a:ONE$"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_whose_client_left_is_returned_to_the_repeated_request(stream: bool) -> None:
    import openai

    async def agent(inside: Inside) -> None:
        with pytest.raises(openai.APITimeoutError):
            answer = await inside.chat("a", stream=stream, timeout=0.5)
            [chunk async for chunk in answer]
        policy.let.set()
        while any(call.clients for call in inside.session.history.calls):
            await asyncio.sleep(0.01)
        assert (await inside.chat("a")).choices[0].message.content == "one"

    policy = Slow("one")
    trajectory = await sample(agent, policy)
    assert policy.calls == 1 and texts(trajectory) == ["[user:a][a:ONE$"] and not trajectory.num_discarded


async def test_an_unread_answer_is_not_trained() -> None:
    import openai

    async def agent(inside: Inside) -> None:
        assert (await inside.chat("first")).choices[0].message.content == "read"
        policy.let.clear()
        with pytest.raises(openai.APITimeoutError):
            await inside.chat("second", timeout=0.5)
        policy.let.set()
        while inside.session.history.calls[-1].action is None:
            await asyncio.sleep(0.01)

    policy = Slow("read", "nobody")
    policy.let.set()
    trajectory = await sample(agent, policy)
    assert texts(trajectory) == ["[user:first][a:READ$"]
    assert trajectory.num_discarded == {"undelivered": len("nobody$")}


async def test_a_stream_shows_life_while_its_answer_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "HEARTBEAT_S", 0.1)
    beats = {"/v1/chat/completions": ": keepalive", "/v1/messages": "event: ping"}

    async def agent(inside: Inside) -> None:
        for path, beat in beats.items():
            policy.let.clear()
            body = {"model": "m", "stream": True, "max_tokens": 9, "messages": [{"role": "user", "content": path}]}
            seen = 0
            async with inside.http() as client, client.stream("POST", path, json=body) as answer:
                async for line in answer.aiter_lines():
                    seen += line == beat
                    if seen == 3:
                        policy.let.set()
            assert seen >= 3

    policy = Slow("one", "two")
    assert len((await sample(agent, policy)).rows()) == 2


async def test_a_request_that_hangs_ends_with_its_sample() -> None:
    async def agent(inside: Inside) -> None:
        waiting.append(asyncio.create_task(inside.chat("a")))
        while not policy.calls:
            await asyncio.sleep(0.01)

    waiting: list[asyncio.Task[Any]] = []
    policy = Slow("one")
    trajectory = await sample(agent, policy)
    assert not any(node.sampled for node in trajectory.forest)
    await asyncio.wait(waiting, timeout=30)
    assert waiting[0].done()
    waiting[0].exception()


async def test_an_answer_does_not_wait_for_the_acknowledgement_of_its_head() -> None:
    """Nagle's algorithm would let it, for up to 40 ms."""

    async def agent(inside: Inside) -> None:
        async with inside.http() as client:
            assert (await client.get("/v1/models")).status_code == 200
            (connection,) = inside.gateway._server.server_state.connections
            connected = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
            assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    await sample(agent, Script())


async def test_a_connection_without_a_whole_head_in_time_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def agent(inside: Inside) -> None:
        address = inside.gateway.url.removeprefix("http://").split(":")
        for begin in (b"", b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"):
            monkeypatch.setattr(http_requests, "HEAD_S", 10.0 if begin else 0.0)
            reader, writer = await asyncio.open_connection(*address)
            if begin:  # a whole request is answered; the head of a second one stays unfinished
                writer.write(begin)
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                await reader.readexactly(int(head.partition("content-length: ")[2].split()[0]))
                monkeypatch.setattr(http_requests, "HEAD_S", 0.0)
                writer.write(begin[:10])
            assert await reader.read() == b""
            writer.close()

    await sample(agent, Script())


class Telling:
    """A policy that says a turn letter by letter, each when it is let."""

    def __init__(self, said: str) -> None:
        self.said, self.let, self.sampled = said, asyncio.Semaphore(0), 0

    async def __call__(self, call: PendingRequest) -> Completion:
        assert call.watch is not None
        for end in range(1, len(self.said) + 1):
            await self.let.acquire()
            self.sampled = end
            if call.watch(tuple(map(ord, self.said[:end]))):
                break
        return completion(self.said[: self.sampled], call.max_new_tokens)


async def test_the_first_token_is_at_the_client_before_the_last_is_sampled() -> None:
    policy, heard = Telling("four"), []

    async def agent(inside: Inside) -> None:
        policy.let.release()
        async for chunk in await inside.chat("a", stream=True):
            if chunk.choices and chunk.choices[0].delta.content:
                heard.append((chunk.choices[0].delta.content, policy.sampled))
                policy.let.release()

    trajectory = await sample(agent, policy)
    assert "".join(piece for piece, _ in heard) == "four"
    assert heard[0] == ("f", 1) and len(heard) == 4, heard
    assert texts(trajectory) == ["[user:a][a:FOUR$"]


class Spelling(Script):
    """A policy that shows every letter of a line before the next."""

    async def __call__(self, call: PendingRequest) -> Completion:
        answer = await super().__call__(call)
        for end in range(1, len(answer.tokens)):
            await asyncio.sleep(0)
            if call.watch is not None and call.watch(answer.tokens[:end]):
                break
        return answer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_gets_the_text_before_a_stop_text_and_its_next_request_continues_the_sampled_turn(
    stream: bool,
) -> None:
    heard: list[str] = []

    async def agent(inside: Inside) -> None:
        answer = await inside.chat("q", stop=["b"], stream=stream)
        if stream:
            chunks = [chunk async for chunk in answer]
            heard.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
            assert chunks[-1].choices[0].finish_reason == "stop"
        else:
            heard.append(answer.choices[0].message.content)
            assert answer.choices[0].finish_reason == "stop"
        history: Any = [("user", "q"), ("assistant", heard[-1]), ("user", "r")]
        history = [{"role": role, "content": text} for role, text in history]
        final: Any = await inside.openai.responses.create(
            model="policy", input=history, extra_body={"stop": "</s"}, stream=stream
        )
        if stream:
            events = [event async for event in final]
            said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            final = events[-1].response
            assert said == final.output_text
        heard.append(final.output_text)
        assert final.status == "completed"
        history += [{"role": "assistant", "content": heard[-1]}, {"role": "user", "content": "s"}]
        asked: Any = {"model": "policy", "max_tokens": 50, "messages": history, "stop_sequences": ["##", "END"]}
        for _ in range(2):
            if stream:
                async with inside.anthropic.messages.stream(**asked) as events:
                    pieces = "".join([piece async for piece in events.text_stream])
                    final = await events.get_final_message()
                assert pieces == final.content[0].text
            else:
                final = await inside.anthropic.messages.create(**asked)
            heard.append(final.content[0].text)
            ends.append((final.stop_reason, final.stop_sequence))
            history += [{"role": "assistant", "content": heard[-1]}, {"role": "user", "content": "t"}]
        assert inside.session.history.reasons() == {"first": 1, "continued": 3}

    ends: list[Any] = []
    trajectory = await sample(agent, Spelling("abc", "<</s>>", "#END##", "E#ND"))
    assert heard == ["a", "<", "#", "E#ND"]
    assert ends == [("stop_sequence", "END"), ("end_turn", None)]
    row = "[user:q][a:AB$][user:r][a:<</S$][user:s][a:#END$][user:t][a:E#ND$"
    assert texts(trajectory) == [row] and not trajectory.num_discarded


@given(st.text("ab#", max_size=9), st.lists(st.text("ab#", min_size=1, max_size=3), max_size=3), st.integers(0, 9))
@example("ab#", ["b#", "#"], 2)
@example("ba#", ["a#", "ab"], 2)
def test_a_part_that_is_sent_early_stays_the_beginning_of_the_answer(text: str, stop: list[str], end: int) -> None:
    whole, stop_text = before_stop(text, stop)
    assert not any(one in whole for one in stop) and text.startswith(whole + stop_text)
    assert bool(stop_text) == any(one in text for one in stop)
    assert whole.startswith(sure_before_stop(text[:end], stop))


async def test_a_client_that_comes_late_to_a_stream_reads_it_from_its_beginning() -> None:
    policy = Telling("four")

    async def agent(inside: Inside) -> None:
        first = await inside.chat("a", stream=True)
        policy.let.release()
        await anext(first)
        again = await inside.chat("a", stream=True, extra_headers={"x-stainless-retry-count": "1"})
        for _ in range(3):
            policy.let.release()
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in again]) == "four"

    trajectory = await sample(agent, policy)
    assert texts(trajectory) == ["[user:a][a:FOUR$"]


async def test_a_stream_whose_sample_ends_closes_with_an_error_event() -> None:
    class Breaking(Telling):
        async def __call__(self, call: PendingRequest) -> Completion:
            await super().__call__(call)
            raise RuntimeError("no engine is left")

    async def agent(inside: Inside) -> None:
        for _ in range(2):
            policy.let.release()
        stream = await inside.chat("a", stream=True)
        heard.append("".join([chunk.choices[0].delta.content or "" async for chunk in stream]))

    policy, heard, environment = Breaking("fo"), [], Played()
    environment.agent = agent
    with pytest.raises(RuntimeError, match="no engine"):
        await play(InProcess(environment, 60.0), policy)
    assert heard == [f"fo\n{OVER}"]


async def test_a_context_has_conversations_of_its_own_and_a_reward() -> None:
    import openai

    async def agent(inside: Inside) -> None:
        for context in ("planner", "worker"):
            await inside.chat("a", extra_headers={"x-relax-context": context})
        await inside.chat("a", "one", "b", extra_headers={"x-relax-context": "planner"})
        assert inside.session.history.reasons() == {"first": 1, "tools": 1, "continued": 1}
        with pytest.raises(openai.BadRequestError, match="at most 64 characters"):
            await inside.chat("a", extra_headers={"x-relax-context": "x" * 65})
        async with inside.http(inside.session.reporter_key) as client:
            for body in ({"reward": 1, "context": "nobody"}, {"reward": 1, "context": 7}):
                refused = await client.post("/report", json=body)
                assert refused.status_code == 400 and "context" in refused.json()["error"]
            assert (await client.post("/report", json={"reward": 1, "context": "worker"})).status_code == 200
        assert inside.session.reported == {"worker": 1.0}

    trajectory = await sample(agent, Script("one", "one", "two"))
    assert trajectory.contexts == ("planner", "worker", "planner")
    assert sorted(texts(trajectory)) == ["[user:a][a:ONE$", "[user:a][a:ONE$][user:b][a:TWO$"]


async def test_a_local_gateway_serves_the_same_routes_to_this_user_alone_and_leaves_nothing() -> None:
    sockets: list[Path] = []

    async def agent(inside: Inside) -> None:
        path = Path(inside.gateway.socket)
        sockets.append(path)
        assert [os.stat(at).st_mode & 0o777 for at in (path, path.parent)] == [0o600, 0o700]
        headers = {"authorization": f"Bearer {inside.session.agent_key}"}
        over = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(base_url="http://local", transport=over, headers=headers) as client:
            body = {"messages": [{"role": "user", "content": "a"}]}
            answer = (await client.post("/v1/chat/completions", json=body)).json()
            assert answer["choices"][0]["message"]["content"] == "one"
            assert (await client.get("/v1/models")).status_code == 200
            assert (await client.post("/report", json={"reward": 1})).status_code == 401

    assert texts(await sample(agent, Script("one"), local=True)) == ["[user:a][a:ONE$"]
    assert not sockets[0].parent.exists()


async def test_a_folder_whose_path_is_too_long_for_a_socket_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(OSError, match="set TMPDIR to a folder with a short path"):
        await Gateway("policy").start(local=True)


async def test_requests_of_one_sample_share_a_limit_if_configured() -> None:
    import openai

    async def agent(inside: Inside) -> None:
        assert (await inside.chat("a" * 1000)).choices[0].message.content == "one"
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match="exceed the total size that a sandbox may send"):
                await inside.chat("b" * 2000)

    await sample(agent, Script("one"), max_bytes=2000)


async def test_a_pool_is_called_by_its_model_name_and_its_answers_are_not_trained() -> None:
    import openai

    heard: list[str] = []

    async def agent(inside: Inside) -> None:
        listed = await inside.openai.models.list()
        assert [model.id for model in listed.data] == ["policy", "judge"]
        assert (await inside.chat("a")).choices[0].message.content == "one"
        said = [{"role": "user", "content": "good?"}]
        asked: Any = {"model": "judge", "messages": said}
        answer = await inside.openai.chat.completions.create(**asked, temperature=0.0)
        assert (answer.model, answer.choices[0].message.content) == ("judge", "yes")
        other = await inside.anthropic.messages.create(**asked, max_tokens=2)
        assert other.content[0].text == "ye" and other.stop_reason == "max_tokens"
        stream = await inside.openai.chat.completions.create(**asked, stream=True)
        assert "".join([part.choices[0].delta.content or "" async for part in stream if part.choices]) == "yes"
        cut = await inside.anthropic.messages.create(**asked, max_tokens=9, stop_sequences=["es"])
        assert (cut.content[0].text, cut.stop_reason, cut.stop_sequence) == ("y", "stop_sequence", "es")
        with pytest.raises(openai.BadRequestError, match="answers in text"):
            await inside.openai.chat.completions.create(**asked, tools=[FIND])
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await inside.openai.chat.completions.create(**asked, temperature=3.0)
        assert inside.session.side_calls.summary() == {"judge": {"calls": 4, "tokens": 11}}

    client = ScriptedClient("judge", lambda prompt: heard.append(prompt) or "yes")
    trajectory = await sample(agent, Script("one"), judge=client)
    assert heard == ["good?"] * 4
    assert [node.turn for node in trajectory.forest if node.sampled] == [0], "only the policy's turn is trained"


async def test_a_pool_that_is_not_allowed_is_the_policy_as_any_other_name() -> None:
    async def agent(inside: Inside) -> None:
        answer = await inside.openai.chat.completions.create(model="judge", messages=[{"role": "user", "content": "a"}])
        assert answer.choices[0].message.content == "one"

    assert len([node for node in (await sample(agent, Script("one"))).forest if node.sampled]) == 1


class Seeded:
    """A pool that says its seed."""

    name = "judge"

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.seeds = error, list[int]()

    async def generate(self, prompt: Any, max_new_tokens: int, *, seed: int, **more: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.seeds.append(seed)
        return await ScriptedClient("judge", lambda prompt: str(seed)).generate(prompt, 99)


async def test_seeds_of_side_calls_depend_on_their_content_and_not_on_their_order() -> None:
    async def said(*questions: str) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}

        async def agent(inside: Inside) -> None:
            await inside.chat("a")
            for question in questions:
                messages: Any = [{"role": "user", "content": question}]
                answer = await inside.openai.chat.completions.create(model="judge", messages=messages)
                found.setdefault(question, []).append(answer.choices[0].message.content)

        await sample(agent, Script("one"), judge=Seeded())
        return found

    one, other = await said("x", "y", "x"), await said("y", "x", "x")
    assert one == other and len({*one["x"], *one["y"]}) == 3


async def test_a_broken_stream_of_a_pool_ends_with_the_reason_in_every_dialect(monkeypatch: pytest.MonkeyPatch) -> None:
    import anthropic
    import openai

    monkeypatch.setattr("relax_plugin_agents.gateway.HEARTBEAT_S", 0.05)

    class Late(Seeded):
        async def generate(self, prompt: Any, max_new_tokens: int, **more: Any) -> Any:
            await asyncio.sleep(0.3)
            raise InfrastructureError("no engine is left")

    async def agent(inside: Inside) -> None:
        messages: Any = [{"role": "user", "content": "x"}]
        asked: Any = (
            inside.openai.chat.completions.create(model="judge", messages=messages, stream=True),
            inside.openai.responses.create(model="judge", input="x", stream=True),
            inside.anthropic.messages.create(model="judge", messages=messages, max_tokens=9, stream=True),
        )
        for one in asked:
            with pytest.raises((openai.APIError, anthropic.APIError), match="no engine is left"):
                async for _ in await one:
                    pass
        await inside.chat("a")

    await sample(agent, Script("one"), judge=Late())


async def test_an_unavailable_pool_is_reported_and_fails_the_sample() -> None:
    import openai

    async def agent(inside: Inside) -> None:
        await inside.chat("a")
        with pytest.raises(openai.InternalServerError, match="no engine"):
            messages: Any = [{"role": "user", "content": "x"}]
            await inside.openai.chat.completions.create(model="judge", messages=messages)
        assert isinstance(inside.session.side_calls.failure, InfrastructureError)

    await sample(agent, Script("one"), judge=Seeded(InfrastructureError("no engine can be had")))
