# SPDX-License-Identifier: Apache-2.0
"""A remote reward against a real server that answers late, wrongly, or not at all: nothing but a score becomes one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from relax_plugin_rewards.remote import Remote, RemoteOptions, read_score

from relax_core.api import InfrastructureError, Media, Message, Outcome, Part, Score, Task, ToolCall
from relax_core.testing.samples import trajectory

HANG_UP, SILENT = 0, -1
TASK = Task("t1", "What is 2+2?", 4, {"level": 3})


@dataclass
class Service:
    """A server that gives its replies one after another, the last one for ever."""

    replies: list[tuple[int, str]]
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                length = next(
                    int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length:")
                )
                self.requests.append(json.loads(await reader.readexactly(length)))
                self.heads.append(head)
                status, text = self.replies[min(len(self.requests), len(self.replies)) - 1]
                if status == SILENT:
                    await reader.read()
                if status in (SILENT, HANG_UP):
                    break
                location = "Location: /elsewhere\r\n" if status == 302 else ""
                body = text.encode()
                writer.write(f"HTTP/1.1 {status} x\r\n{location}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def serving(*replies: tuple[int, str]) -> AsyncIterator[Service]:
    service = Service(list(replies))
    server = await asyncio.start_server(service.answer, "127.0.0.1", 0)
    service.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/score"
    yield service
    server.close()


def remote(url: str, **options: Any) -> Remote:
    return Remote(RemoteOptions(url=url, **{"backoff_s": 1e-3, **options}))


async def scored(service: Service, response: str = "4", outcome: Outcome = Outcome.FINISHED, **options: Any) -> Score:
    return await remote(service.url, **options).score(TASK, trajectory(TASK, response, outcome))


async def test_a_sample_goes_out_whole_and_its_score_comes_back() -> None:
    async with serving((200, '{"score": 0.5, "parts": {"style": 1}}')) as service:
        assert await scored(service) == Score(0.5, {"style": 1.0})
    asked = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "4"}]
    assert service.requests == [
        {
            "task_id": "t1", "prompt": "What is 2+2?", "messages": asked, "response": "4", "answer": 4,
            "metadata": {"level": 3}, "truncated": False,
        }
    ]  # fmt: skip


async def test_media_and_tool_calls_go_out_by_reference_and_by_name() -> None:
    picture = Part(media=Media("image", "a.png"))
    task = Task("t1", (Message("user", (Part("See "), picture)), Message("assistant", "", (ToolCall("f", {"x": 1}),))))
    async with serving((200, "1")) as service:
        await remote(service.url).score(task, trajectory(task, "4"))
    seen = [{"type": "text", "text": "See "}, {"type": "image", "source": "a.png"}]
    called = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}
    assert service.requests[0]["prompt"] == [{"role": "user", "content": seen}, called]


async def test_a_task_that_is_not_json_is_named() -> None:
    task = Task("t1", "?", float("nan"))
    with pytest.raises(ValueError, match="task t1 can't be written as JSON"):
        await remote("http://127.0.0.1:9").score(task, trajectory(task, "4"))


@pytest.mark.parametrize("status", [429, 503, HANG_UP])
async def test_a_service_that_is_busy_or_hangs_up_is_asked_again(status: int) -> None:
    async with serving((status, "later"), (status, "later"), (200, "1")) as service:
        assert await scored(service, retries=2) == Score(1.0)
    assert len(service.requests) == 3


async def test_a_service_that_stays_broken_is_an_error_that_says_how_it_ended() -> None:
    async with serving((500, "out of order")) as service:
        with pytest.raises(InfrastructureError, match=r"no score in 3 attempts, at last HTTP 500: 'out of order'"):
            await scored(service, retries=2)
    with pytest.raises(InfrastructureError, match="no score in 1 attempts, at last ConnectError"):
        await scored(service, retries=0)


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [(201, "1", "answered HTTP 201"), (302, "1", "answered HTTP 302"), (404, "1", "answered HTTP 404"),
     (200, "<html>", "'<html>', which is not")],
)  # fmt: skip
async def test_other_answers_are_neither_retried_nor_followed(status: int, text: str, said: str) -> None:
    async with serving((status, text)) as service:
        with pytest.raises(ValueError, match=said):
            await scored(service)
    assert len(service.requests) == 1


async def test_a_silent_service_is_an_error_within_its_time_and_not_asked_again() -> None:
    async with serving((SILENT, "")) as service:
        with pytest.raises(InfrastructureError, match=r"within request_timeout_s = 0\.05"):
            await scored(service, request_timeout_s=0.05)
    assert len(service.requests) == 1


@pytest.mark.parametrize(("text", "score"), [("1", Score(1.0)), ("-0.5", Score(-0.5)), ('{"score": 2}', Score(2.0))])
def test_a_number_or_a_score_is_read(text: str, score: Score) -> None:
    assert read_score(text) == score


@pytest.mark.parametrize(
    "text",
    [
        "", "good", "NaN", "Infinity", "1e999", "true", "null", '"1"', "[1]", "{}", '{"reward": 1}', '{"score": null}',
        '{"score": NaN}', '{"score": true}', '{"score": 1, "parts": [1]}', '{"score": 1, "parts": {"a": "b"}}',
        '{"score": 1, "why": "x"}', "9" * 400, "9" * 5000, "1e200", "[" * 99999, "<html>",
    ],
)  # fmt: skip
def test_anything_else_is_an_error_that_quotes_it(text: str) -> None:
    with pytest.raises(ValueError, match="the reward service answered"):
        read_score(text)


async def test_headers_can_be_secrets_and_options_show_no_credential(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_KEY", "Bearer swordfish")
    options = {"headers": {"Authorization": "env:REWARD_KEY", "X-Run": "seven"}}
    async with serving((200, "1")) as service:
        await scored(service, **options)
    assert "authorization: bearer swordfish" in service.heads[0].lower()
    assert "x-run: seven" in service.heads[0].lower()
    assert "swordfish" not in RemoteOptions(**options).model_dump_json()
    with pytest.raises(ValidationError, match="never the value itself"):
        RemoteOptions(headers={"X-Api-Key": "swordfish"})


async def test_a_cut_response_is_sent_and_marked_by_default() -> None:
    async with serving((200, "1")) as service:
        assert await scored(service, outcome=Outcome.TRUNCATED) == Score(1.0)
        assert await scored(service, outcome=Outcome.TRUNCATED, truncated=False) == Score(0.0)
    assert [request["truncated"] for request in service.requests] == [True]


async def test_concurrent_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, most, gate = 0, 0, asyncio.Event()

    async def post(self: httpx.AsyncClient, url: str, content: bytes) -> httpx.Response:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await gate.wait()
        at_once -= 1
        return httpx.Response(200, text="1")

    monkeypatch.setattr(httpx.AsyncClient, "post", post)
    reward = remote("http://127.0.0.1:9", concurrency=2)
    scores = [asyncio.ensure_future(reward.score(TASK, trajectory(TASK, "4"))) for _ in range(6)]
    while at_once < 2:
        await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*scores) == [Score(1.0)] * 6
    assert most == 2


async def test_the_remote_reward_needs_an_address() -> None:
    with pytest.raises(ValueError, match="reward remote has no url"):
        await Remote().score(TASK, trajectory(TASK, "4"))
    with pytest.raises(ValidationError):
        RemoteOptions(url="ftp://example.org")
