# SPDX-License-Identifier: Apache-2.0
"""The media of a rollout: each is processed once, in a killable process, for all samples that see it.

What can't be read, takes too long or kills its process is `MediaRefused` for whoever asked; the process is replaced and
others go on. What was processed, or refused, is remembered by source. Where a budget is given, what nobody holds is deleted
from the store when it is over it, and processed again when it is needed again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_core.api.family import ModelFamily, Rendered
from relax_core.api.media_source import shown
from relax_core.api.media_store import MediaStore
from relax_core.api.task import Media, Message
from relax_core.api.worker import Workers
from relax_core.rollout.media_budget import MediaBudget
from relax_core.rollout.media_lane import MediaLane
from relax_core.rollout.placeholders import Held, MediaRefused, held
from relax_core.rollout.together import together

REMEMBERED = 1 << 16
"""Sources whose media are known."""
LONG = 256
"""Characters of a source; a longer one is remembered by its hash."""
TRIES = 4
"""At a medium that is deleted while it is being asked for."""


class MediaDesk:
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
        self._lanes = [MediaLane(*lane) for lane in zip(choices, [children] * len(choices), openings, strict=True)]
        self._by_kind: dict[str, MediaLane] = {}
        self._known: OrderedDict[Any, asyncio.Future[Held | str]] = OrderedDict()
        self._sizes: OrderedDict[Any, int | str] = OrderedDict()
        self._names: dict[str, set[Any]] = {}
        """Sources by the key of their medium."""
        self._budget: MediaBudget | None = None

    async def start(self, known_groups: int = 0) -> None:
        """`known_groups`: groups below this number were issued before, and may need what is in the store."""
        if self._limit is not None:
            self._budget = MediaBudget(self._limit, self._store.found(), known_groups)
        kinds = await together(*(lane.start() for lane in self._lanes))
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

    def _lane(self, media: Media) -> MediaLane:
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

    def _now(self, media: Media) -> Held:
        known = self._known.get(_name(media))
        return _result(media, known.result() if known is not None and known.done() else "it was not processed")

    async def _processed(self, media: Media, owner: Hashable) -> Held:
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

    async def _begin(self, name: Any, media: Media) -> asyncio.Future[Held | str]:
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

    def _forget(self, name: Any, known: asyncio.Future[Held | str]) -> None:
        """A source that was asked for long ago: its medium may stay, and is found again by its content."""
        found = known.result() if known.done() and not known.cancelled() else ""
        if isinstance(found, Held) and found.key in self._names:
            self._names[found.key].discard(name)

    async def _process(self, media: Media) -> Held | str:
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

    desk: MediaDesk
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


def _result(media: Media, result: Held | str) -> Held:
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


__all__ = ["MediaDesk", "MediaFor", "MediaRefused", "media_of"]
