# SPDX-License-Identifier: Apache-2.0
"""One processor's killable process, one medium at a time. What breaks it, or takes too long, is refused and it is replaced."""

from __future__ import annotations

import asyncio
from typing import Any

from relax_core.api.errors import DeadlineExceeded, InfrastructureError, PluginError, WorkerDied
from relax_core.api.modality import Span
from relax_core.api.task import Media
from relax_core.api.worker import Worker, Workers, WorkerSpec
from relax_core.rollout.placeholders import Held, MediaRefused

START_S = 120.0


class MediaLane:
    """Starts its process when it is first needed after a loss."""

    def __init__(self, choice: Any, children: Workers, opening: tuple[Any, ...]) -> None:
        self._choice, self._children, self._opening = choice, children, opening
        self._worker: Worker | None = None
        self._replaced = 0
        self._turn = asyncio.Lock()  # the host has one thread, and a deadline counts from when work begins

    async def start(self) -> str:
        """The kind of medium that it reads."""
        name = f"media-{self._choice.name}"
        spec = WorkerSpec(
            f"{name}.{self._replaced}" if self._replaced else name, self._choice.chosen,
            target="relax_core.rollout.media_host:MediaHost", memory_mb=self._choice.memory_mb,
            env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        (self._worker,) = await self._children.start([spec], START_S)
        return str(await self._worker.call("open", *self._opening, timeout_s=START_S))

    async def process(self, media: Media) -> Held:
        """Raises MediaRefused."""
        key, layout = await self._asked("process", media)
        return Held(media.kind, key, tuple(Span(*span) for span in layout))

    async def budget(self, media: Media) -> int:
        """Features that it will have, from its header. Raises MediaRefused."""
        return int(await self._asked("budget", media))

    async def examine(self, media: Media) -> dict[str, Any]:
        """What it is, for people; decoded and processed, and not kept. Raises MediaRefused."""
        told: dict[str, Any] = await self._asked("examine", media)
        return told

    async def stop(self) -> None:
        if self._worker is not None:
            await self._worker.kill()

    async def _asked(self, method: str, media: Media) -> Any:
        async with self._turn:
            worker = await self._started()  # that it does not start is no medium's fault
            try:
                return await worker.call(method, media, timeout_s=self._choice.timeout_s)
            except (ValueError, PluginError) as error:
                raise MediaRefused(str(error)) from error
            except DeadlineExceeded as error:
                await self._replace()
                raise MediaRefused(f"it takes longer than {self._choice.timeout_s:g} s") from error
            except WorkerDied as error:
                await self._replace()
                limit = f" (limit: {self._choice.memory_mb} MB)" if self._choice.memory_mb else ""
                raise MediaRefused(f"it broke the process that read it{limit}") from error

    async def _started(self) -> Worker:
        if self._worker is None:
            await self.start()
        if self._worker is None:
            raise InfrastructureError(f"media-{self._choice.name}: its process does not start")
        return self._worker

    async def _replace(self) -> None:
        worker, self._worker = self._worker, None
        self._replaced += 1
        if worker is not None:
            await worker.kill()
