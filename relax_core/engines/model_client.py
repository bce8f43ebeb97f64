# SPDX-License-Identifier: Apache-2.0
"""A client of an auxiliary engine pool in this process: text or messages in, text and log-probs out.

Pools handle token ids only; the client renders prompts and decodes completions with the pool's tokenizer. Every request
has a deadline.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from operator import index
from typing import Any, Literal

from relax_core.api.engine import Generated, Prompt
from relax_core.api.errors import ConfigError, DeadlineExceeded, InfrastructureError
from relax_core.api.family import ModelFamily
from relax_core.api.role import Clock
from relax_core.api.task import Message
from relax_core.engines.pool import EnginePool
from relax_core.engines.requests import PendingRequest, SamplingParams, stop_end, watch_for
from relax_core.registry.shapes import WrongShape, checked

TURN_LIMIT_S = 3600.0
"""Default limit, in seconds, on a request's wait for the pool's turn on shared devices."""


class PoolModelClient:
    """An `api.ModelClient` for a pool in this process.

    Invariant: while the pool is paused because another pool uses its devices, the deadlines of open requests stop. A
    separate limit, `turn_limit_s`, bounds each request's wait for the turn.
    """

    def __init__(
        self, name: str, pool: EnginePool, family: ModelFamily, clock: Clock, timeout_s: float,
        deterministic: bool = False, turn_limit_s: float = TURN_LIMIT_S,
        folder: str = "",
    ) -> None:  # fmt: skip
        """`folder`: name of the model's folder, which is mixed into every seed so that models sample differently."""
        self._salt = zlib.crc32(folder.encode()) >> 1
        self.name, self.pool, self._family, self._clock, self._timeout_s = name, pool, family, clock, timeout_s
        # Which concurrent requests share a batch depends on timing, so deterministic pools run one request at a time.
        self._exclusive: AbstractAsyncContextManager[Any] = asyncio.Semaphore(1) if deterministic else nullcontext()
        self._open: dict[int, float] = {}
        """Start time of each open request, by number."""
        self._num_requests = 0
        self._turn_limit_s = turn_limit_s
        self._deadlines: dict[int, tuple[asyncio.Timeout, float]] = {}
        """Deadline of each open request by number, with the seconds that were left when the pool was last paused."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when a request opens or closes. The rollout role sets it if the pool shares devices."""
        self.paused = False

    async def generate(
        self, prompt: Prompt, max_new_tokens: int = 256, *, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0,
        stop: tuple[str, ...] = (), timeout_s: float = 0.0,
    ) -> Generated:  # fmt: skip
        self._check("max_new_tokens", max_new_tokens, int, 1)
        self._check("temperature", temperature, float, 0)
        self._check("top_p", top_p, float, 0, 1)
        self._check("seed", seed, int)
        self._check("stop", stop, tuple[str, ...])
        self._check("timeout_s", timeout_s, float, 0)
        stop = tuple(stop)
        sampling = SamplingParams(temperature, top_p if temperature else 1.0)
        pending = PendingRequest(
            self._tokens(prompt), max_new_tokens, seed ^ self._salt, sampling, tuple(self._family.stop_tokens), stop,
            watch=watch_for(stop, self._family.decode),
        )  # fmt: skip
        async with self._request(timeout_s, "a request"):
            await self.pool.generate([pending])
        if pending.finish == "deadline":
            raise DeadlineExceeded(f"engine pool {self.name}", pending.error or "room", self._timeout_s)
        if pending.finish == "abort":
            raise InfrastructureError(f"engine pool {self.name}: {pending.error or 'its engines aborted a request'}")
        if pending.finish == "error":
            raise ValueError(f"engine pool {self.name}: {pending.error}")
        end = stop_end(pending.tokens, stop, self._family.decode)
        finish: Literal["stop", "length"] = "length" if end is None and pending.finish == "length" else "stop"
        tokens = tuple(pending.tokens[:end])
        return Generated(
            self._family.decode(self._family.without_stop(tokens)), tokens, tuple(pending.log_probs[:end]), finish
        )

    async def score(
        self, prompt: Prompt, completions: Sequence[str | Sequence[int]], *, temperature: float = 1.0,
        timeout_s: float = 0.0,
    ) -> tuple[tuple[float, ...], ...]:  # fmt: skip
        self._check("completions", completions, Sequence[Any])
        self._check("temperature", temperature, float, 0)
        self._check("timeout_s", timeout_s, float, 0)
        begin = self._tokens(prompt)
        ends = [self._end(begin, one, prompt == "") for one in completions]
        if not all(ends):
            raise ValueError(f"engine pool {self.name}: completion {ends.index(())} is empty; give text or token ids")
        found = await self.score_rows([begin + end for end in ends], temperature, timeout_s)
        return tuple(tuple(scores[len(begin) :]) for scores in found)

    async def score_rows(
        self, sequences: Sequence[Sequence[int]], temperature: float, timeout_s: float = 0.0
    ) -> list[Sequence[float]]:
        """Return the log-prob of every token of each sequence, [sequences][tokens]; the first token of each has 0."""
        async with self._request(timeout_s, "log-probs"):
            try:
                return await self.pool.score(sequences, temperature)
            except NotImplementedError:
                raise ValueError(f"engine pool {self.name}: its engine cannot score given tokens") from None
            except ValueError as error:
                raise ValueError(f"engine pool {self.name}: {error}") from error

    # -- turns on shared devices --------------------------------------------------------------------------------

    def work(self) -> int:
        """Return the number of open requests; with no open request, the number of pool tasks that need the devices."""
        return len(self._open) or self.pool.supervisor.work()

    async def pause(self) -> None:
        """End the pool's turn: pause its engines and the deadlines of open requests."""
        if not self.paused:
            self.paused, now = True, asyncio.get_running_loop().time()
            for number, (deadline, _) in self._deadlines.items():
                self._deadlines[number] = (deadline, max((deadline.when() or now) - now, 0.0))
                if not deadline.expired():
                    deadline.reschedule(now + self._turn_limit_s)
        await self.pool.pause()

    async def resume(self) -> None:
        """Begin the pool's turn: resume its engines and the deadlines of open requests."""
        await self.pool.supervisor.resume()
        self.paused, now = False, asyncio.get_running_loop().time()
        for deadline, left_s in self._deadlines.values():
            if not deadline.expired():
                deadline.reschedule(now + left_s)

    def facts(self) -> dict[str, Any]:
        """Return the state of open requests and of each engine, for `relax why`."""
        oldest = self._clock.now() - min(self._open.values()) if self._open else 0.0
        return {
            "open": len(self._open), "for_s": round(oldest, 3), "engines": self.pool.facts(), "paused": self.paused,
        }  # fmt: skip

    def _check(self, name: str, value: Any, wanted: Any, low: float | None = None, high: float = math.inf) -> None:
        """Raise ValueError for an argument that would fail in the router or in the engine, which are not to blame."""
        try:
            checked(value, wanted, name)
        except WrongShape as error:
            raise ValueError(f"engine pool {self.name}: {error}") from error
        if low is not None and not (low <= value <= high and math.isfinite(value)):
            fix = f"at least {low:g}" if high == math.inf else f"a number from {low:g} to {high:g}"
            raise ValueError(f"engine pool {self.name}: {name}: got {value!r}; give {fix}")

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self._family.start(prompt).tokens
        if prompt and all(isinstance(part, Message) for part in prompt):
            try:
                rendered = self._family.start(prompt)  # type: ignore[arg-type]  # the elements were just checked
            except ConfigError as error:
                raise ValueError(
                    f"engine pool {self.name}: {error.got}; set the pool's chat_template, or give the prompt as text"
                ) from error
            if rendered.media:
                raise ValueError(f"engine pool {self.name}: the prompt contains media; auxiliary pools take text only")
            return rendered.tokens
        if all(isinstance(part, int) for part in prompt):
            return tuple(prompt)  # type: ignore[arg-type]
        raise ValueError(f"engine pool {self.name}: got the prompt {prompt!r:.80}; give text, messages or token ids")

    def _end(self, begin: Sequence[int], completion: str | Sequence[int], begins: bool) -> tuple[int, ...]:
        """Return the ids of a completion after the prompt `begin`; `begins`: the prompt is empty text."""
        if not isinstance(completion, str):
            return tuple(map(index, completion))
        return self._family.start(completion).tokens[len(begin) :] if begins else self._family.encode(completion)

    @asynccontextmanager
    async def _request(self, timeout_s: float, what: str) -> AsyncIterator[None]:
        """Register an open request while the body runs; raise DeadlineExceeded naming the pool at its deadline."""
        self._num_requests += 1
        number = self._num_requests
        self._open[number] = self._clock.now()
        left_s = min(timeout_s, self._timeout_s) if timeout_s > 0 else self._timeout_s
        deadline = asyncio.timeout(self._turn_limit_s if self.paused else left_s)
        self.on_change()
        try:
            async with deadline:
                self._deadlines[number] = (deadline, left_s)
                async with self._exclusive:
                    yield
        except TimeoutError as late:
            if not deadline.expired():
                raise
            if self.paused:
                fix = 'give the pool its own devices (devices = "own"), or raise rollout.step_timeout_s'
                raise DeadlineExceeded(
                    f"engine pool {self.name}", "its turn on the devices", self._turn_limit_s, fix
                ) from late
            fix = f"raise timeout_s or count of the engine pool {self.name}"
            raise DeadlineExceeded(f"engine pool {self.name}", f"{what} to be answered", left_s, fix) from late
        finally:
            del self._open[number]
            self._deadlines.pop(number, None)
            self.on_change()
