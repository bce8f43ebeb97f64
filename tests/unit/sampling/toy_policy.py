# SPDX-License-Identifier: Apache-2.0
"""A family whose tokens are characters, and a policy that says what it was told to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from relax_plugin_chat.tool_calls import FORMATS

from relax_core.api import Environment, Message, ModelFamily, Rendered, Task, Tool, Trajectory
from relax_core.engines.requests import Ending, Generate, PendingRequest, RoutedExperts
from relax_core.sampling.episode import EnvironmentHandle, InProcess, Limits, run_episode

END = 0


class Completion(NamedTuple):
    """The answer of a scripted policy or engine to a request: one entry per token."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    oldest_cache: tuple[int, ...] = ()
    """Empty if equal to `versions`."""
    finish: Ending = "stop"
    error: str = ""
    routed_experts: RoutedExperts | None = None
    incarnations: tuple[tuple[int, int], ...] = ((0, 0),)


Policy = Callable[[PendingRequest], Awaitable[Completion]]


def answered(request: PendingRequest, answer: Completion) -> PendingRequest:
    """Settle a request with an answer."""
    request.tokens, request.log_probs = list(answer.tokens), list(answer.log_probs)
    request.versions, request.oldest_cache = list(answer.versions), list(answer.oldest_cache or answer.versions)
    request.finish, request.error, request.routed_experts = answer.finish, answer.error, answer.routed_experts
    request.incarnations, request.settled = list(answer.incarnations), True
    return request


def completion_of(request: PendingRequest) -> Completion:
    return Completion(
        tuple(request.tokens), tuple(request.log_probs), tuple(request.versions), tuple(request.oldest_cache),
        request.finish, request.error, request.routed_experts, tuple(request.incarnations),
    )  # fmt: skip


def answering(policy: Policy) -> Generate:
    """Let a policy of one request answer the requests of a batch one after another."""

    async def generate(requests: Sequence[PendingRequest]) -> None:
        for request in requests:
            answered(request, await policy(request))

    return generate


class Letters(ModelFamily):
    """`[role:text]`, a token a character; the policy ends its turn with token 0, and writes calls in a format by name."""

    tool_calls = "hermes"

    def open(self, model: Mapping[str, Any]) -> None:
        """Nothing to load."""

    def start(self, prompt: str | Sequence[Message], tools: Sequence[Tool] = ()) -> Rendered:
        return Rendered(self.encode(prompt if isinstance(prompt, str) else self._said(prompt) + "[a:"))

    def delta(self, before: Sequence[Message], appended: Sequence[Message], last_token: int | None = None) -> Rendered:
        closing = () if last_token in (None, END) else (END,)
        return Rendered(closing + self.encode("]" + self._said(appended) + "[a:"))

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        return "".join(chr(token) for token in tokens if token != END)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def parse(
        self, tokens: Sequence[int], tools: Sequence[Tool] = (), before: Sequence[int] = ()
    ) -> tuple[str, Any, str]:
        said = self.decode(tokens)
        return FORMATS[self.tool_calls].parse(said, tools) if tools else (said, (), "")

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return (END,)

    @property
    def vocab_size(self) -> int:
        return 0x110000

    def _said(self, messages: Sequence[Message]) -> str:
        return "".join(f"[{message.role}:{message.text}]" for message in messages)


class Script:
    """Says its lines in order; a line is text, a completion, or an error to raise. Keeps every call."""

    def __init__(self, *lines: str | Completion | Exception, version: int = 5) -> None:
        self._lines, self._version = list(lines), version
        self.calls: list[PendingRequest] = []

    async def __call__(self, call: PendingRequest) -> Completion:
        self.calls.append(call)
        await asyncio.sleep(0)
        line = self._lines.pop(0)
        if isinstance(line, Exception):
            raise line
        return line if isinstance(line, Completion) else completion(line, call.max_new_tokens, self._version)


def completion(text: str, limit: int = 1000, version: int = 5) -> Completion:
    tokens = (*map(ord, text), END)[:limit]
    finish = "stop" if tokens[-1] == END else "length"
    count = len(tokens)
    return Completion(tokens, tuple(-0.1 * n for n in range(count)), (version,) * count, (version,) * count, finish)


class Driven(Environment):
    """Drives its sample as a function says."""

    in_process = True
    drive: Callable[[Any], Awaitable[None]]

    async def run(self, task: Task, seed: int, session: Any) -> None:
        await self.drive(session)


def driven(drive: Callable[[Any], Awaitable[None]], timeout_s: float = 60.0, total_timeout_s: float = 0.0) -> InProcess:
    environment = Driven()
    environment.drive = drive
    return InProcess(environment, timeout_s, total_timeout_s)


async def play(
    environment: EnvironmentHandle,
    policy: Policy,
    task: Task | None = None,
    limits: Limits | None = None,
    seed: int = 7,
) -> Trajectory:
    task = task or Task("t", (Message("user", "go"),), "x")
    family = Letters()
    prompt = family.start(task.prompt, environment.tools)
    limits = limits or Limits(100, 8, 0, 0)
    async with asyncio.timeout(120):
        return await run_episode(task, prompt, seed, environment, family, answering(policy), limits)


def texts(trajectory: Trajectory) -> list[str]:
    """Rows as text, trained characters in upper case."""
    return [
        "".join(
            (chr(token) if token else "$").upper() if trained else (chr(token) if token else "$").lower()
            for token, trained in zip(row.tokens, row.loss_mask, strict=True)
        )
        for row in trajectory.rows()
    ]
