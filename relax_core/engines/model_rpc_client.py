# SPDX-License-Identifier: Apache-2.0
"""The child's side of a hand on an engine pool: what rewards and environments ask goes up a stream, answers come back.

The parent (`engine_desk`) reads `asks` for as long as the process lives and calls `answered`; nothing else travels. A
deadline of who asks stands still meanwhile: each request has its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from relax_core.api.engine import Generated, ModelClient, Prompt
from relax_core.api.errors import DeadlineExceeded, InfrastructureError

Ask = list[Any]
"""Number, pool, method, arguments and named ones."""


class ModelRpcConnection:
    """All open requests of one process."""

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self._asks: list[Ask] = []
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._numbers = 0

    def hands(self, names: Sequence[str]) -> dict[str, ModelClient]:
        return {name: ModelRpcClient(self, name) for name in names}

    @property
    def waits(self) -> bool:
        """Whether somebody here waits for an engine."""
        return bool(self._open)

    async def asks(self) -> AsyncIterator[list[Ask]]:
        """What is asked, as it is asked; it ends with the process."""
        while True:
            await self._news.wait()
            self._news.clear()
            asks, self._asks = self._asks, []
            yield asks

    def answered(self, number: int, failure: str, value: Any) -> None:
        """`failure`: the type of an error, whose message is the value; empty where it is an answer."""
        future = self._open.pop(number, None)
        if future is None or future.done():
            return
        if failure:
            future.set_exception(_error(failure, str(value)))
        else:
            future.set_result(value)

    async def ask(self, pool: str, method: str, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        self._numbers += 1
        number = self._numbers
        future = self._open[number] = asyncio.get_running_loop().create_future()
        self._asks.append([number, pool, method, list(args), dict(named)])
        self._news.set()
        try:
            with held():
                return await future
        finally:
            self._open.pop(number, None)


class ModelRpcClient:
    """`api.ModelClient` in a process of rewards or environments."""

    def __init__(self, line: ModelRpcConnection, name: str) -> None:
        self._line, self.name = line, name

    async def generate(
        self, prompt: Prompt, max_new_tokens: int = 256, *, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0,
        stop: tuple[str, ...] = (), timeout_s: float = 0.0,
    ) -> Generated:  # fmt: skip
        named = {"temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop, "timeout_s": timeout_s}
        generated: Generated = await self._line.ask(self.name, "generate", (prompt, max_new_tokens), named)
        return generated

    async def score(
        self, prompt: Prompt, completions: Sequence[str | Sequence[int]], *, temperature: float = 1.0,
        timeout_s: float = 0.0,
    ) -> tuple[tuple[float, ...], ...]:  # fmt: skip
        named = {"temperature": temperature, "timeout_s": timeout_s}
        scores: tuple[tuple[float, ...], ...] = await self._line.ask(self.name, "score", (prompt, completions), named)
        return scores


class OwnTime:
    """A deadline that stands still while engines are waited for, however many at once."""

    def __init__(self, deadline: asyncio.Timeout) -> None:
        self._deadline, self._held, self._left = deadline, 0, 0.0

    @contextmanager
    def still(self) -> Iterator[None]:
        loop, when = asyncio.get_running_loop(), self._deadline.when()
        self._held += 1
        if self._held == 1 and when is not None:
            self._left = when - loop.time()
            self._set(None)
        try:
            yield
        finally:
            self._held -= 1
            if not self._held:
                self._set(loop.time() + self._left)

    def _set(self, when: float | None) -> None:
        with suppress(RuntimeError):  # it is over, and a task that the author left behind is not
            self._deadline.reschedule(when)


_own_time: ContextVar[OwnTime | None] = ContextVar("own_time", default=None)


@contextmanager
def own_time(deadline: asyncio.Timeout) -> Iterator[None]:
    """For what runs in here, and the tasks that it begins."""
    token = _own_time.set(OwnTime(deadline))
    try:
        yield
    finally:
        _own_time.reset(token)


@contextmanager
def held() -> Iterator[None]:
    """The deadline that is in force stands still."""
    if (own := _own_time.get()) is None:
        yield
        return
    with own.still():
        yield


def _error(failure: str, message: str) -> Exception:
    if failure == "ValueError":
        return ValueError(message)
    if failure == "DeadlineExceeded":
        late = DeadlineExceeded.__new__(DeadlineExceeded)  # its sentence is made already
        late.args = (message,)
        return late
    return InfrastructureError(message)
