# SPDX-License-Identifier: Apache-2.0
"""The media of a rollout: each is processed once, in a killable process, for all samples that see it.

Media that can't be read, take too long or kill their process raise `MediaRefused` for whoever asked. Results, and refusals
that the content proves, are remembered by source; other failures are tried again, since a source may come back and a process
may have been killed by somebody else. Where a budget is given, media that nobody needs are deleted from the store and
processed again on demand. A file of the store that is found damaged is made again from its source.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine, Hashable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from relax_core.api.errors import PluginError, RelaxError, SourceUnavailable
from relax_core.api.family import ModelFamily, Rendered
from relax_core.api.modality import PlaceholderSpan
from relax_core.api.role import Clock, SystemClock, Workers
from relax_core.api.task import Media, Message, Part
from relax_core.config.run_config import RunContext
from relax_core.data.placeholders import (
    MediaRefused,
    MediaUnavailable,
    PlaceholderTokens,
    expand_placeholders,
    media_of,
)
from relax_core.data.task_files import source_access
from relax_core.media.access import SourceAccess
from relax_core.media.source import is_path, shown
from relax_core.media.store import MediaStore
from relax_core.rpc.isolated_pool import IsolatedPool, ItemCrash, ItemTimeout, Replaced, no_report, replaced_events
from relax_core.rpc.waiting import start_all

REMEMBERED = 1 << 16
"""Sources whose media are known."""
LONG = 256
"""Characters of a source; a longer one is remembered by its hash."""
MAX_KEPT_SOURCE = 1 << 12
"""Characters of a source that is kept by its medium's key."""
TRIES = 4
"""Attempts at a medium that is deleted while it is being asked for."""
ATTEMPTS = 3
"""Attempts at a medium whose failure its content does not prove, before whoever asked is refused."""
BACKOFF_S = 0.5
"""Pause behind the first failed attempt; it doubles with each."""
HOLD_OFF_S = 30.0
"""Time during which a source whose attempts all failed is not tried again; it doubles each time that happens in a row."""
MAX_HOLD_OFF_S = 600.0
RESTORE_POLL_S = 0.25
"""Interval at which damaged files of the store are looked for."""


class MediaPipeline:
    """Processors by kind of medium, and what is known of sources.

    A medium: `unknown -> processing -> stored | refused | unavailable`; a stored one is `deleted`, and unknown again, when the
    store is over its limit and nobody needs it, or its file is damaged; an unavailable one is unknown again after a while.

    Invariants:
    - A source is processed once, however many ask for it at once, and whoever of them is cancelled meanwhile.
    - One that was refused for its content is not tried again; after any other failure it is, `ATTEMPTS` times at once and
      again when its hold-off is over.
    - A medium in the store stays there as long as some owner needs it.
    - One processor reads one medium at a time, so that what breaks its process is that medium.
    """

    def __init__(
        self, choices: Sequence[Any], workers: Workers, directory: str, model: Mapping[str, Any], family: ModelFamily,
        limit_bytes: int | None = None, clock: Clock | None = None, access: SourceAccess | None = None,
        replaced: Replaced = no_report,
    ) -> None:  # fmt: skip
        """`limit_bytes`: of the store; None: nothing is ever deleted. `access`: bounds of sources; None: no URL, any file."""
        self._clock = clock or SystemClock()
        self._family, self._store, self._limit = family, MediaStore(directory), limit_bytes
        self._processors = [
            _Processor(choice, workers, directory, model, access or SourceAccess(), replaced) for choice in choices
        ]
        self._by_kind: dict[str, _Processor] = {}
        self._known: OrderedDict[Any, asyncio.Future[PlaceholderTokens | str]] = OrderedDict()
        self._sizes: OrderedDict[Any, int | str] = OrderedDict()
        self._names: dict[str, set[Any]] = {}
        """Sources by the key of their medium."""
        self._sources: OrderedDict[str, Media] = OrderedDict()
        """Media by key, from which damaged files are made again; long sources are not kept."""
        self._outages: OrderedDict[Any, _Outage] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._budget: MediaBudget | None = None

    async def start(self, known_groups: int = 0) -> None:
        """`known_groups`: groups below this number were issued before, and may need what is in the store."""
        if self._limit is not None:
            self._budget = MediaBudget(self._limit, self._store.found(), known_groups)
        await start_all(*(processor.pool.start() for processor in self._processors))
        self._by_kind = {processor.kind: processor for processor in self._processors}
        if self._processors:
            self._spawn(self._restore_damaged())

    async def stop(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(processor.pool.stop() for processor in self._processors))

    # -- before and for generation ------------------------------------------------------------------------------

    async def num_features(self, messages: Iterable[Message]) -> int:
        """Count the features that these messages' media will have, from their headers; of views, which only decoding tells,
        those that are known. Raises MediaRefused."""
        total = 0
        for media in media_of(messages):
            name = _name(media)
            known = self._known.get(name)
            if known is not None and known.done():
                total += sum(span.size for span in self._result(media).layout)
                continue
            if media.view is not None:
                continue
            if name not in self._sizes:
                try:
                    self._sizes[name] = int(await self._ask(name, media, "budget"))
                except MediaUnavailable as unavailable:
                    raise _refusal(media, str(unavailable)) from unavailable
                except MediaRefused as refused:
                    self._sizes[name] = str(refused)
                if len(self._sizes) > REMEMBERED:
                    self._sizes.popitem(last=False)
            size = self._sizes[name]
            if isinstance(size, str):
                raise _refusal(media, size)
            total += size
        return total

    async def prepare(self, messages: Iterable[Message], owner: Hashable = None) -> None:
        """Process whatever these messages show and keep it for its owner. Raises MediaRefused with source and reason."""
        for media in media_of(messages):
            name = _name(media)
            for _ in range(TRIES):
                known = self._known.get(name) or self._begin(name, media)
                await asyncio.shield(known)
                if self._keep(self._result(media, known).key, name, owner):
                    break
                if self._known.get(name) is known:
                    del self._known[name]
            else:
                raise _refusal(media, "it vanishes from the media store as soon as it is there")

    def fill_placeholders(self, rendered: Rendered, messages: Iterable[Message]) -> Rendered:
        """Give a rendering of prepared messages the tokens that their media take. Raises MediaRefused."""
        return expand_placeholders(rendered, [self._result(media) for media in media_of(messages)], self._family)

    def release(self, owner: Hashable) -> None:
        """Drop an owner's need of its media."""
        if self._budget is not None:
            self._budget.release(owner)
            self._evict()

    def release_below(self, group: int) -> None:
        """Drop the needs of all groups below this number."""
        if self._budget is not None:
            self._budget.release_below(group)
            self._evict()

    async def examine(self, media: Media) -> dict[str, Any]:
        """Describe a medium for people; decoded and processed, and not kept. Raises MediaRefused."""
        facts: dict[str, Any] = await self._processor(media).ask("examine", media)
        return facts

    # -- one medium ---------------------------------------------------------------------------------------------

    def _processor(self, media: Media) -> _Processor:
        if media.kind not in self._by_kind:
            raise MediaRefused(f'nothing here reads such media: write media = ["{media.kind}"]')
        return self._by_kind[media.kind]

    def _result(self, media: Media, known: asyncio.Future[PlaceholderTokens | str] | None = None) -> PlaceholderTokens:
        """Give what is known of a processed medium. Raises MediaRefused."""
        known = known or self._known.get(_name(media))
        result = known.result() if known is not None and known.done() else "it was not processed"
        if isinstance(result, str):
            raise _refusal(media, result)
        return result

    def _begin(self, name: Any, media: Media) -> asyncio.Future[PlaceholderTokens | str]:
        """Process a medium that nobody has asked for yet; those who ask meanwhile wait for the same future."""
        known = self._known[name] = asyncio.get_running_loop().create_future()
        self._spawn(self._process(name, media, known))
        while len(self._known) > REMEMBERED:  # the medium may stay, and is found by its content
            oldest, forgotten = self._known.popitem(last=False)
            found = forgotten.result() if forgotten.done() and not forgotten.cancelled() else ""
            if isinstance(found, PlaceholderTokens) and found.key in self._names:
                self._names[found.key].discard(oldest)
        return known

    async def _process(self, name: Any, media: Media, known: asyncio.Future[PlaceholderTokens | str]) -> None:
        """Settle what is known of a medium; anything but a result and a refusal for its content is forgotten at once."""
        try:
            key, layout = await self._ask(name, media, "process")
            if len(media.source) <= MAX_KEPT_SOURCE:
                self._sources[key] = media
            if len(self._sources) > REMEMBERED:
                self._sources.popitem(last=False)
            known.set_result(PlaceholderTokens(media.kind, key, tuple(PlaceholderSpan(*span) for span in layout)))
            return
        except MediaUnavailable as unavailable:
            known.set_result(str(unavailable))
        except MediaRefused as refused:
            known.set_result(str(refused))
            return
        except asyncio.CancelledError:
            known.set_exception(RelaxError(f"{shown(media.source)}: the processors of media were stopped"))
            known.exception()
            raise
        except Exception as error:  # a full disk and the like: of this run, and not of the medium
            known.set_exception(error)
            known.exception()  # all who asked may have been cancelled
        if self._known.get(name) is known:
            del self._known[name]

    async def _ask(self, name: Any, media: Media, method: str) -> Any:
        """Call a method of `MediaHost`, again where the content does not prove the failure. Raises MediaRefused."""
        outage = self._outages.get(name)
        if outage is not None and (left := outage.until - self._clock.now()) > 0:
            raise MediaUnavailable(f"{outage.reason}; it is tried again in {left:.0f} s")
        pause_s = BACKOFF_S
        while True:
            try:
                answer = await self._processor(media).ask(method, media)
                if method == "process":
                    self._outages.pop(name, None)
                return answer
            except MediaUnavailable as unavailable:
                if pause_s >= BACKOFF_S * 2 ** (ATTEMPTS - 1):
                    hold_off_s = min(2 * outage.hold_off_s if outage else HOLD_OFF_S, MAX_HOLD_OFF_S)
                    self._outages[name] = _Outage(str(unavailable), self._clock.now() + hold_off_s, hold_off_s)
                    self._outages.move_to_end(name)
                    if len(self._outages) > REMEMBERED:
                        self._outages.popitem(last=False)
                    raise MediaUnavailable(f"{unavailable} (tried {ATTEMPTS} times)") from unavailable
            await self._clock.sleep(pause_s)
            pause_s *= 2

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- the store ----------------------------------------------------------------------------------------------

    def _keep(self, key: str, name: Any, owner: Hashable) -> bool:
        """Keep a medium in the store for its owner from now on; False where it is not there any more, or was cut off."""
        size = self._store.size_of(key)
        if size is None:
            return False
        if self._budget is None:
            return True
        if self._budget.size_of(key) not in (None, size):
            self._store.set_aside(key)
            self._budget.forget(key)
            return False
        if key not in self._budget:
            self._budget.add(key, size)
        self._names.setdefault(key, set()).add(name)
        if owner is not None:
            self._budget.retain(owner, key)
        self._evict()
        return True

    def _evict(self) -> None:
        for key in self._budget.evicted() if self._budget is not None else ():
            self._store.remove(key)
            self._sources.pop(key, None)
            for name in self._names.pop(key, ()):
                self._known.pop(name, None)

    async def _restore_damaged(self) -> None:
        """Make media again whose files readers found damaged, as long as the pipeline lives."""
        while True:
            for key in await asyncio.to_thread(self._store.damaged):
                if (media := self._sources.get(key)) is not None:
                    if (known := self._known.get(_name(media))) is not None and known.done():
                        del self._known[_name(media)]
                    with suppress(MediaRefused, RelaxError):  # who needs it gives up at its own deadline, and says so
                        await self.prepare([Message("", (Part(media=media),))])
                self._store.clear_damaged(key)
            await self._clock.sleep(RESTORE_POLL_S)


@dataclass(frozen=True, slots=True)
class _Outage:
    """A source whose attempts all failed."""

    reason: str
    until: float
    hold_off_s: float


class _Processor:
    """One modality processor in a killable process of its own."""

    def __init__(
        self, choice: Any, workers: Workers, directory: str, model: Mapping[str, Any], access: SourceAccess,
        replaced: Replaced,
    ) -> None:  # fmt: skip
        self._choice = choice
        self.kind = ""
        """Kind of medium that it reads, known once it has started."""
        self.pool = IsolatedPool(
            [f"media-{choice.name}"], choice.chosen, "relax_core.data.media_host:MediaHost", workers,
            timeout_s=choice.timeout_s, memory_mb=choice.memory_mb, tries=1, max_batch=1, opened=self._opened,
            open_args=(directory, model, choice.max_mb << 20, getattr(choice, "preview_kb", 0) << 10, astuple(access)),
            env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}, writable=(directory,),
            replaced=replaced,
        )  # fmt: skip

    async def ask(self, method: str, media: Media) -> Any:
        """Call a method of `MediaHost` for one medium. Raises MediaRefused: MediaUnavailable unless the content is at fault."""
        try:
            return await self.pool.submit((method, media))
        except (SourceUnavailable, PluginError) as error:
            raise MediaUnavailable(str(error)) from error
        except ValueError as error:
            raise MediaRefused(str(error)) from error
        except ItemTimeout as error:
            raise MediaUnavailable(f"it takes longer than {self._choice.timeout_s:g} s") from error
        except ItemCrash as error:
            limit = f" (limit: {self._choice.memory_mb} MB)" if self._choice.memory_mb else ""
            raise MediaUnavailable(f"it broke the process that read it{limit}") from error

    def _opened(self, kind: str) -> dict[str, Any]:
        self.kind = kind
        return {}


class MediaBudget:
    """Media in the store by key, the least recently used first; without IO: the caller deletes what `evicted` says, at once.

    Owners are groups by number, and whoever else names himself and releases.

    Invariants:
    - A medium that some owner needs is never evicted, even where all are over the limit.
    - A group below `release_below` needs nothing, whoever asks for it later.
    """

    def __init__(self, limit_bytes: int, found: Mapping[str, int], known_groups: int = 0) -> None:
        """`found`: sizes of what is there, oldest first. Groups below `known_groups` may need any of it."""
        self._limit = limit_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict(found)
        self._total = sum(found.values())
        self._holders: dict[str, set[Hashable]] = {}
        self._held: dict[Hashable, set[str]] = {}
        self._oldest = 0
        for key in found:
            self.retain(known_groups - 1, key)

    @property
    def total_bytes(self) -> int:
        return self._total

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    def size_of(self, key: str) -> int | None:
        """Return the size that was counted for a medium; None where it is not there."""
        return self._sizes.get(key)

    def forget(self, key: str) -> None:
        """Count a medium no more, whoever needs it: its file is gone, and its owners still hold it when it is there again."""
        self._total -= self._sizes.pop(key, 0)

    def add(self, key: str, size_bytes: int) -> None:
        """Count a medium that is there now."""
        self._total += size_bytes - self._sizes.get(key, 0)
        self._sizes[key] = size_bytes
        self._sizes.move_to_end(key)

    def retain(self, owner: Hashable, key: str) -> None:
        """Keep a medium for this owner."""
        if key in self._sizes:
            self._sizes.move_to_end(key)
        if isinstance(owner, int) and owner < self._oldest:
            return
        self._held.setdefault(owner, set()).add(key)
        self._holders.setdefault(key, set()).add(owner)

    def release(self, owner: Hashable) -> None:
        for key in self._held.pop(owner, ()):
            holders = self._holders[key]
            holders.discard(owner)
            if not holders:
                del self._holders[key]

    def release_below(self, group: int) -> None:
        """Drop the needs of all groups below this number."""
        self._oldest = max(self._oldest, group)
        for owner in [owner for owner in self._held if isinstance(owner, int) and owner < self._oldest]:
            self.release(owner)

    def needed(self, key: str) -> bool:
        return key in self._holders

    def evicted(self) -> list[str]:
        """Forget media until the rest is within the limit; return them, to be deleted now."""
        gone: list[str] = []
        for key in [key for key in self._sizes if key not in self._holders]:
            if self._total <= self._limit:
                break
            self._total -= self._sizes.pop(key)
            gone.append(key)
        return gone


def _refusal(media: Media, why: str) -> MediaRefused:
    return MediaRefused(f"{media.kind} {shown(media.source)}: {why}")


def _name(media: Media) -> Any:
    """Name a source as it is now: a file that was changed is another one."""
    if is_path(media.source):
        try:
            stat = Path(media.source).stat()
            return media.kind, media.source, media.view, stat.st_mtime_ns, stat.st_size
        except OSError:
            pass
    source: Any = media.source
    if len(source) > LONG:  # a data-URI may be large, and many are remembered
        source = hashlib.blake2b(source.encode(), digest_size=16).digest()
    return media.kind, source, media.view


def media_store(context: RunContext) -> str:
    """The directory of the run's processed media."""
    return str(Path(context.run_dir).absolute() / "media")


def make_media_pipeline(context: RunContext, family: ModelFamily, limit: int | None = None) -> MediaPipeline:
    """The processors of the run's media, and where what they make is kept, within a limit of bytes where one is given."""
    run = context.config
    return MediaPipeline(
        run.media,
        context.children,
        media_store(context),
        run.model.model_dump(mode="json"),
        family,
        limit,
        context.clock,
        source_access(run.data, [run.data.train, *(table.path for table in run.eval.sets)]),
        replaced_events(context.run_status),
    )


@asynccontextmanager
async def opened_media_pipeline(context: RunContext, family: ModelFamily) -> AsyncIterator[MediaPipeline]:
    """A pipeline for rows that nobody samples."""
    pipeline = make_media_pipeline(context, family)
    try:
        await pipeline.start()
        yield pipeline
    finally:
        await pipeline.stop()
