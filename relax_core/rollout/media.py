# SPDX-License-Identifier: Apache-2.0
"""The media of a rollout: each is processed once, in a killable process, for all samples that see it.

What can't be read, takes too long or kills its process is `MediaRefused` for whoever asked; the process is replaced and
others go on. What was processed, or refused, is remembered by source.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_core.api.errors import DeadlineExceeded, PluginError, WorkerDied
from relax_core.api.family import ModelFamily, Rendered
from relax_core.api.media_source import shown
from relax_core.api.modality import Span
from relax_core.api.task import Media, Message
from relax_core.api.worker import Worker, Workers, WorkerSpec
from relax_core.rollout.placeholders import Held, MediaRefused, held
from relax_core.rollout.together import together

START_S = 120.0
REMEMBERED = 1 << 16
"""Sources whose media are known."""


class _Lane:
    """One processor's process, one medium at a time."""

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
        async with self._turn:
            if self._worker is None:
                await self.start()
            try:
                key, layout = await self._ask("process", media)
                return Held(media.kind, key, tuple(Span(*span) for span in layout))
            except (ValueError, PluginError) as error:
                raise MediaRefused(str(error)) from error
            except DeadlineExceeded as error:
                await self._replace()
                raise MediaRefused(f"it takes longer than {self._choice.timeout_s:g} s") from error
            except WorkerDied as error:
                await self._replace()
                limit = f" (limit: {self._choice.memory_mb} MB)" if self._choice.memory_mb else ""
                raise MediaRefused(f"it broke the process that read it{limit}") from error

    async def _ask(self, method: str, media: Media) -> Any:
        if self._worker is None:
            raise WorkerDied(f"media-{self._choice.name} was never started")
        return await self._worker.call(method, media, timeout_s=self._choice.timeout_s)

    async def stop(self) -> None:
        if self._worker is not None:
            await self._worker.kill()

    async def _replace(self) -> None:
        worker, self._worker = self._worker, None
        self._replaced += 1
        if worker is not None:
            await worker.kill()


class MediaDesk:
    """Processors by kind of medium, and what is known of sources."""

    def __init__(
        self, choices: Sequence[Any], children: Workers, directory: str, model: Mapping[str, Any], family: ModelFamily
    ) -> None:
        self._family = family
        self._lanes = [_Lane(choice, children, (directory, model, choice.max_mb << 20)) for choice in choices]
        self._by_kind: dict[str, _Lane] = {}
        self._known: OrderedDict[Any, asyncio.Future[Held | str]] = OrderedDict()

    async def start(self) -> None:
        kinds = await together(*(lane.start() for lane in self._lanes))
        self._by_kind = dict(zip(kinds, self._lanes, strict=True))

    async def stop(self) -> None:
        await asyncio.gather(*(lane.stop() for lane in self._lanes))

    async def prepare(self, messages: Iterable[Message]) -> None:
        """Process whatever these messages show. Raises MediaRefused with the source and the reason."""
        for media in media_of(messages):
            await self._processed(media)

    def hold(self, rendered: Rendered, messages: Iterable[Message]) -> Rendered:
        """A rendering of prepared messages, with the tokens that their media take. Raises MediaRefused."""
        found = [self._now(media) for media in media_of(messages)]
        return held(rendered, found, self._family)

    def _now(self, media: Media) -> Held:
        known = self._known.get(_name(media))
        result = known.result() if known is not None and known.done() else "it was not processed"
        if isinstance(result, str):
            raise MediaRefused(f"{media.kind} {shown(media.source)}: {result}")
        return result

    async def _processed(self, media: Media) -> Held:
        name = _name(media)
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = asyncio.get_running_loop().create_future()
            try:
                known.set_result(await self._process(media))
            except BaseException:
                del self._known[name]
                known.cancel()
                raise
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        result = await asyncio.shield(known)
        if isinstance(result, str):
            raise MediaRefused(f"{media.kind} {shown(media.source)}: {result}")
        return result

    async def _process(self, media: Media) -> Held | str:
        """What it became, or why it did not."""
        lane = self._by_kind.get(media.kind)
        if lane is None:
            return f'nothing here reads such media: write media = ["{media.kind}"]'
        try:
            return await lane.process(media)
        except MediaRefused as refused:
            return str(refused)


def media_of(messages: Iterable[Message]) -> list[Media]:
    """All media that messages show, in order."""
    parts = (part for message in messages if not isinstance(message.content, str) for part in message.content)
    return [part.media for part in parts if part.media is not None]


def _name(media: Media) -> Any:
    """A source as it is now: a file that was changed is another one."""
    if ":" not in media.source:
        try:
            stat = Path(media.source).stat()
            return media.kind, media.source, media.view, stat.st_mtime_ns, stat.st_size
        except OSError:
            pass
    return media.kind, media.source, media.view


__all__ = ["MediaDesk", "MediaRefused", "media_of"]
