# SPDX-License-Identifier: Apache-2.0
"""The parent's side of hands on engine pools: reads what a process asks, has the pools answer, brings the answers back.

It goes over the worker's own two ways, a stream and calls, so that it is the same on every runner. A process that dies
takes its requests with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing, suppress
from typing import Any

from relax_core.api.engine import ModelClient
from relax_core.api.errors import ConfigError, DeadlineExceeded, RelaxError, WorkerDied
from relax_core.api.worker import Worker

LONGEST_S = 1e9
"""Of the stream's own silence: whether a process lives is seen by those who wait for its work."""
ANSWER_S = 60.0
METHODS = ("generate", "score")


class ModelRpcServer:
    """For the processes of a role."""

    def __init__(self, hands: Mapping[str, ModelClient]) -> None:
        self.hands = hands
        self._processes: set[asyncio.Task[None]] = set()

    def attend(self, worker: Worker, who: str, needs: tuple[str, ...]) -> None:
        """Answer a process until it ends. Raises ConfigError where it needs a pool that is not there."""
        if lacking := [name for name in needs if name not in self.hands]:
            fix = "try it with a configuration whose [[engines]] have it: relax try FILE"
            raise ConfigError("engines", f"nothing named {', '.join(lacking)}, which {who} asks", fix)
        if needs:
            process = asyncio.create_task(self._serve(worker, frozenset(needs)))
            self._processes.add(process)
            process.add_done_callback(self._processes.discard)

    async def close(self) -> None:
        processes = tuple(self._processes)
        for process in processes:
            process.cancel()
        await asyncio.gather(*processes, return_exceptions=True)

    async def _serve(self, worker: Worker, allowed: frozenset[str]) -> None:
        answers: set[asyncio.Task[None]] = set()
        stream: Any = worker.stream("asks", timeout_s=LONGEST_S)
        try:
            with suppress(WorkerDied, DeadlineExceeded):
                async with aclosing(stream) as items:
                    async for asks in items:
                        for ask in asks:
                            answer = asyncio.create_task(self._answer(worker, allowed, *ask))
                            answers.add(answer)
                            answer.add_done_callback(answers.discard)
        finally:
            left = tuple(answers)
            for answer in left:
                answer.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _answer(
        self, worker: Worker, allowed: frozenset[str], number: int, pool: str, method: str, args: Any, named: Any
    ) -> None:
        failure, value = "", None
        try:
            if pool not in allowed or method not in METHODS:
                raise ValueError(f"engine pool {pool}: {method} was not asked for before start (needs_engines)")
            value = await getattr(self.hands[pool], method)(*args, **named)
        except (RelaxError, ValueError, TypeError) as error:
            failure = "ValueError" if isinstance(error, (TypeError, ConfigError)) else type(error).__name__
            value = str(error)
        with suppress(WorkerDied, DeadlineExceeded):
            await worker.call("answered", number, failure, value, timeout_s=ANSWER_S)
