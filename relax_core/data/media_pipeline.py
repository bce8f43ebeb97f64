# SPDX-License-Identifier: Apache-2.0
"""The media of a rollout: each is processed once, in a killable process, for all samples that see it.

What can't be read, takes too long or kills its process is `MediaRefused` for whoever asked; the process is replaced and
others go on. What was processed, or refused, is remembered by source. Where a budget is given, what nobody holds is deleted
from the store when it is over it, and processed again when it is needed again.

One processor's killable process, one medium at a time. What breaks it, or takes too long, is refused and it is replaced.

Which media of the store may go where all are over the budget: those that no owner holds, least recently used first.

A state machine without IO: who asks deletes what `evicted` says, at once. Owners are groups by number, which hold until the bus
needs none so old any more, and whoever else names himself and lets go.

Copies of media for people, in the run directory, by the key of the medium: the first ones of a run and the newest ones.

A page of transcripts shows a run's beginning and its end; what was between makes room. Nothing of a run reads them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_core.api.errors import DeadlineExceeded, InfrastructureError, PluginError, WorkerDied
from relax_core.api.family import ModelFamily, Rendered
from relax_core.api.modality import PlaceholderSpan
from relax_core.api.task import Media, Message
from relax_core.api.worker import Worker, Workers, WorkerSpec
from relax_core.data.placeholders import MediaRefused, PlaceholderTokens, held
from relax_core.media.source import shown
from relax_core.media.store import MediaStore, write_whole
from relax_core.rpc.waiting import start_all

START_S = 120.0


class MediaProcess:
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
            target="relax_core.data.media_host:MediaHost", memory_mb=self._choice.memory_mb,
            env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        (self._worker,) = await self._children.start([spec], START_S)
        return str(await self._worker.call("open", *self._opening, timeout_s=START_S))

    async def process(self, media: Media) -> PlaceholderTokens:
        """Raises MediaRefused."""
        key, layout = await self._asked("process", media)
        return PlaceholderTokens(media.kind, key, tuple(PlaceholderSpan(*span) for span in layout))

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


class MediaBudget:
    """Media by key, the least recently used first."""

    def __init__(self, limit_bytes: int, found: Mapping[str, int], known_groups: int = 0) -> None:
        """`found`: sizes of what is there, oldest first. Groups below `known_groups` may need any of it."""
        self._limit = limit_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict(found)
        self._total = sum(found.values())
        self._holders: dict[str, set[Hashable]] = {}
        self._held: dict[Hashable, set[str]] = {}
        self._oldest = 0
        for key in found:
            self.hold(known_groups - 1, key)

    @property
    def total_bytes(self) -> int:
        return self._total

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    def add(self, key: str, size_bytes: int) -> None:
        """It is there now."""
        self._total += size_bytes - self._sizes.get(key, 0)
        self._sizes[key] = size_bytes
        self._sizes.move_to_end(key)

    def hold(self, owner: Hashable, key: str) -> None:
        """It stays for this owner. A group that is over already holds nothing."""
        if key in self._sizes:
            self._sizes.move_to_end(key)
        if isinstance(owner, int) and owner < self._oldest:
            return
        self._held.setdefault(owner, set()).add(key)
        self._holders.setdefault(key, set()).add(owner)

    def let_go(self, owner: Hashable) -> None:
        for key in self._held.pop(owner, ()):
            holders = self._holders[key]
            holders.discard(owner)
            if not holders:
                del self._holders[key]

    def over_below(self, group: int) -> None:
        """Nothing of groups below this number is needed any more."""
        self._oldest = max(self._oldest, group)
        for owner in [owner for owner in self._held if isinstance(owner, int) and owner < self._oldest]:
            self.let_go(owner)

    def needed(self, key: str) -> bool:
        return key in self._holders

    def evicted(self) -> list[str]:
        """What is to be deleted now; forgotten here."""
        gone: list[str] = []
        if self._total <= self._limit:
            return gone
        for key in [key for key in self._sizes if key not in self._holders]:
            if self._total <= self._limit:
                break
            self._total -= self._sizes.pop(key)
            gone.append(key)
        return gone


REMEMBERED = 1 << 16
"""Sources whose media are known."""
LONG = 256
"""Characters of a source; a longer one is remembered by its hash."""
TRIES = 4
"""At a medium that is deleted while it is being asked for."""


class MediaPipeline:
    """Processors by kind of medium, and what is known of sources."""

    def __init__(
        self, choices: Sequence[Any], children: Workers, directory: str, model: Mapping[str, Any], family: ModelFamily,
        limit_bytes: int | None = None,
    ) -> None:  # fmt: skip
        """`limit_bytes`: of the store; None: nothing is ever deleted."""
        self._family, self._store, self._limit = family, MediaStore(directory), limit_bytes
        openings = (
            (directory, model, choice.max_mb << 20, getattr(choice, "preview_kb", 0) << 10) for choice in choices
        )
        self._lanes = [MediaProcess(*lane) for lane in zip(choices, [children] * len(choices), openings, strict=True)]
        self._by_kind: dict[str, MediaProcess] = {}
        self._known: OrderedDict[Any, asyncio.Future[PlaceholderTokens | str]] = OrderedDict()
        self._sizes: OrderedDict[Any, int | str] = OrderedDict()
        self._names: dict[str, set[Any]] = {}
        """Sources by the key of their medium."""
        self._budget: MediaBudget | None = None

    async def start(self, known_groups: int = 0) -> None:
        """`known_groups`: groups below this number were issued before, and may need what is in the store."""
        if self._limit is not None:
            self._budget = MediaBudget(self._limit, self._store.found(), known_groups)
        kinds = await start_all(*(lane.start() for lane in self._lanes))
        self._by_kind = dict(zip(kinds, self._lanes, strict=True))

    async def stop(self) -> None:
        await asyncio.gather(*(lane.stop() for lane in self._lanes))

    # -- before and for generation ------------------------------------------------------------------------------

    async def room(self, messages: Iterable[Message]) -> int:
        """Features that these messages' media will have, from their headers; of views, which only decoding tells, those that
        are known. Raises MediaRefused."""
        return sum([await self._features(media) for media in media_of(messages)])

    async def prepare(self, messages: Iterable[Message], owner: Hashable = None) -> None:
        """Process whatever these messages show and keep it for its owner. Raises MediaRefused with source and reason."""
        for media in media_of(messages):
            await self._processed(media, owner)

    def hold(self, rendered: Rendered, messages: Iterable[Message]) -> Rendered:
        """A rendering of prepared messages, with the tokens that their media take. Raises MediaRefused."""
        found = [self._now(media) for media in media_of(messages)]
        return held(rendered, found, self._family)

    def let_go(self, owner: Hashable) -> None:
        """He needs no medium any more."""
        if self._budget is not None:
            self._budget.let_go(owner)
            self._evict()

    def over_below(self, group: int) -> None:
        """Nothing of groups below this number is needed any more."""
        if self._budget is not None:
            self._budget.over_below(group)
            self._evict()

    async def examine(self, media: Media) -> dict[str, Any]:
        """What a medium is, for people. Raises MediaRefused."""
        return await self._lane(media).examine(media)

    # -- one medium ---------------------------------------------------------------------------------------------

    def _lane(self, media: Media) -> MediaProcess:
        if media.kind not in self._by_kind:
            raise MediaRefused(f'nothing here reads such media: write media = ["{media.kind}"]')
        return self._by_kind[media.kind]

    async def _features(self, media: Media) -> int:
        name = _name(media)
        known = self._known.get(name)
        if known is not None and known.done():
            return sum(span.size for span in self._now(media).layout)
        if media.view is not None:
            return 0
        if name not in self._sizes:
            try:
                self._sizes[name] = await self._lane(media).budget(media)
            except MediaRefused as refused:
                self._sizes[name] = str(refused)
            if len(self._sizes) > REMEMBERED:
                self._sizes.popitem(last=False)
        size = self._sizes[name]
        if isinstance(size, str):
            raise _refusal(media, size)
        return size

    def _now(self, media: Media) -> PlaceholderTokens:
        known = self._known.get(_name(media))
        return _result(media, known.result() if known is not None and known.done() else "it was not processed")

    async def _processed(self, media: Media, owner: Hashable) -> PlaceholderTokens:
        name = _name(media)
        for _ in range(TRIES):
            known = self._known.get(name)
            if known is None:
                known = await self._begin(name, media)
            found = _result(media, await asyncio.shield(known))
            if self._taken(found.key, name, owner):
                return found
            if self._known.get(name) is known:
                del self._known[name]
        raise MediaRefused(
            f"{media.kind} {shown(media.source)}: it vanishes from the media store as soon as it is there"
        )

    async def _begin(self, name: Any, media: Media) -> asyncio.Future[PlaceholderTokens | str]:
        known = self._known[name] = asyncio.get_running_loop().create_future()
        try:
            known.set_result(await self._process(media))
        except BaseException:
            del self._known[name]
            known.cancel()
            raise
        while len(self._known) > REMEMBERED:
            self._forget(*self._known.popitem(last=False))
        return known

    def _forget(self, name: Any, known: asyncio.Future[PlaceholderTokens | str]) -> None:
        """A source that was asked for long ago: its medium may stay, and is found again by its content."""
        found = known.result() if known.done() and not known.cancelled() else ""
        if isinstance(found, PlaceholderTokens) and found.key in self._names:
            self._names[found.key].discard(name)

    async def _process(self, media: Media) -> PlaceholderTokens | str:
        """What it became, or why it did not."""
        try:
            return await self._lane(media).process(media)
        except MediaRefused as refused:
            return str(refused)

    # -- the store ----------------------------------------------------------------------------------------------

    def _taken(self, key: str, name: Any, owner: Hashable) -> bool:
        """Whether it is in the store, where it stays for its owner from now on."""
        if self._budget is None:
            return True
        if key not in self._budget:
            size = self._store.size_of(key)
            if size is None:
                return False
            self._budget.add(key, size)
        self._names.setdefault(key, set()).add(name)
        if owner is not None:
            self._budget.hold(owner, key)
        self._evict()
        return True

    def _evict(self) -> None:
        for key in self._budget.evicted() if self._budget is not None else ():
            self._store.remove(key)
            for name in self._names.pop(key, ()):
                self._known.pop(name, None)


@dataclass(frozen=True, slots=True)
class MediaFor:
    """The desk as one owner's samples see it."""

    desk: MediaPipeline
    owner: Hashable

    async def prepare(self, messages: Iterable[Message]) -> None:
        """Raises MediaRefused."""
        await self.desk.prepare(messages, self.owner)

    def hold(self, rendered: Rendered, messages: Iterable[Message]) -> Rendered:
        """Raises MediaRefused."""
        return self.desk.hold(rendered, messages)


def media_of(messages: Iterable[Message]) -> list[Media]:
    """All media that messages show, in order."""
    parts = (part for message in messages if not isinstance(message.content, str) for part in message.content)
    return [part.media for part in parts if part.media is not None]


def _result(media: Media, result: PlaceholderTokens | str) -> PlaceholderTokens:
    if isinstance(result, str):
        raise _refusal(media, result)
    return result


def _refusal(media: Media, why: str) -> MediaRefused:
    return MediaRefused(f"{media.kind} {shown(media.source)}: {why}")


def _name(media: Media) -> Any:
    """A source as it is now: a file that was changed is another one."""
    if ":" not in media.source:
        try:
            stat = Path(media.source).stat()
            return media.kind, media.source, media.view, stat.st_mtime_ns, stat.st_size
        except OSError:
            pass
    source: Any = media.source
    if len(source) > LONG:  # a data-URI may be large, and many are remembered
        source = hashlib.blake2b(source.encode(), digest_size=16).digest()
    return media.kind, source, media.view


__all__ = ["MediaPipeline", "MediaFor", "MediaRefused", "media_of"]


PREVIEWS = "previews"
FIRST_BYTES = 8 << 20
"""Of each kind of medium, what came first stays."""
NEWEST_BYTES = 24 << 20


class Previews:
    """Those of one kind of medium."""

    def __init__(self, directory: Path, kind: str) -> None:
        self._directory, self._kind = directory, kind
        self._first = 0
        self._newest: OrderedDict[Path, int] = OrderedDict()
        found = [(path.stat().st_mtime, path) for path in directory.glob(f"*.{kind}")] if directory.is_dir() else []
        for _, path in sorted(found):
            self._count(path, path.stat().st_size)

    def __contains__(self, key: str) -> bool:
        return self._path(key).is_file()

    def put(self, key: str, data: bytes) -> None:
        """Whole or not at all; InfrastructureError where it can't be written."""
        path = self._path(key)
        write_whole(path, [data])
        self._count(path, len(data))

    def _count(self, path: Path, size: int) -> None:
        if self._first + size <= FIRST_BYTES:
            self._first += size
            return
        self._newest[path] = size
        while sum(self._newest.values()) > NEWEST_BYTES and len(self._newest) > 1:
            self._newest.popitem(last=False)[0].unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}.{self._kind}"
