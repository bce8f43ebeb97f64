# SPDX-License-Identifier: Apache-2.0
"""Media of a rollout: each medium is processed once, in a killable process, for all samples that show it.

`MediaRefused` is raised for media that can't be read, take too long or crash their process. Results and refusals of
unreadable content are cached by source. All further failures are retried: a source may come back, and a process may
have been killed for another reason. With a size limit, media that no owner needs are deleted from the store and
processed again on demand. A stored file that is found damaged is made again from its source.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, get_args

from relax_core.api.errors import PluginError, RelaxError, SourceUnavailable
from relax_core.api.family import ModelFamily, Rendered
from relax_core.api.modality import PlaceholderSpan
from relax_core.api.role import Clock, SystemClock
from relax_core.api.task import Media, MediaKind, Message, Part
from relax_core.media.access import SourceAccess
from relax_core.media.placeholders import (
    MediaRefused,
    MediaUnavailable,
    PlaceholderTokens,
    expand_placeholders,
    media_of,
)
from relax_core.media.source import is_path, shown
from relax_core.media.store import MediaStore
from relax_core.registry.shapes import checked
from relax_core.rpc.isolated_pool import (
    IsolatedPool,
    ItemCrash,
    ItemTimeout,
    PoolSettings,
    ProcessStarter,
    untrusted,
)
from relax_core.rpc.waiting import start_all
from relax_plugin_media.host import check_key

REMEMBERED = 1 << 16
"""Number of sources whose results are cached."""
LONG = 256
"""Length of a source, in characters, above which the cache key is the source's hash."""
MAX_KEPT_SOURCE = 1 << 12
"""Longest source, in characters, that is kept so that a damaged file can be made again."""
TRIES = 4
"""Attempts to process a medium whose file is deleted from the store before the caller can use it."""
ATTEMPTS = 3
"""Attempts to process a medium before the caller gets an error that the content did not cause."""
BACKOFF_S = 0.5
"""Seconds of pause after the first failed attempt; doubled with each further attempt."""
HOLD_OFF_S = 30.0
"""Seconds before a source is tried again after all attempts failed; doubled with each such failure in a row."""
MAX_HOLD_OFF_S = 600.0
RESTORE_POLL_S = 0.25
"""Seconds between two checks for damaged files in the store."""


class ProcessedOncePipeline:
    """The modality processors of a run, one per kind of medium, and a cache of their results by source.

    Life cycle of a medium: `unknown -> processing -> stored | refused | unavailable`. A stored medium is `deleted`, and
    unknown again, if its file is damaged, or if the store is over its limit and no owner needs the medium. An
    unavailable medium is unknown again after its hold-off.

    Invariants:
    - A source is processed once, no matter how many callers ask for it at once, and how many of them are cancelled.
    - A source that was refused for its content is not tried again. After any other failure there are `ATTEMPTS`
      attempts at once, and further attempts after the hold-off.
    - A medium stays in the store as long as an owner needs it.
    - A processor reads one medium at a time, so that this medium is the cause if the process crashes.
    """

    def __init__(
        self, choices: Sequence[Any], family: ModelFamily, starter: ProcessStarter, directory: str,
        model: Mapping[str, Any], limit_bytes: int | None = None, clock: Clock | None = None,
        access: SourceAccess | None = None,
    ) -> None:  # fmt: skip
        """Create the pipeline; `start` starts the processors.

        `limit_bytes` limits the store; None deletes nothing. `access` limits sources; None allows any file and no URL.
        """
        self._clock = clock or SystemClock()
        self._family, self._store, self._limit = family, MediaStore(directory), limit_bytes
        self._processors = [
            _Processor(choice, starter, directory, model, access or SourceAccess()) for choice in choices
        ]
        self._by_kind: dict[str, _Processor] = {}
        self._known: OrderedDict[Any, asyncio.Future[PlaceholderTokens | str]] = OrderedDict()
        self._sizes: OrderedDict[Any, int | str] = OrderedDict()
        self._names: dict[str, set[Any]] = {}
        """Keys of `_known` by the store key of their medium."""
        self._sources: OrderedDict[str, Media] = OrderedDict()
        """Media by store key, to make damaged files again; media with long sources are not kept."""
        self._outages: OrderedDict[Any, _Outage] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._budget: MediaBudget | None = None

    async def start(self, known_groups: int = 0) -> None:
        """Start the processors. Groups below `known_groups` were issued before and may need any medium in the store."""
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

    @property
    def kinds(self) -> tuple[MediaKind, ...]:
        """The kinds of media that a processor reads and for which the model has a placeholder."""
        return tuple(
            kind for kind in get_args(MediaKind) if kind in self._by_kind and kind in self._family.placeholders
        )

    # -- before and for generation ------------------------------------------------------------------------------

    async def num_features(self, messages: Iterable[Message]) -> int:
        """Return the number of tokens that the messages' media will take. Raises MediaRefused.

        The size of a view is known only after processing, so a view that is not processed yet counts as 0.
        """
        total = 0
        for media in media_of(messages):
            name = _name(media)
            future = self._known.get(name)
            if future is not None and future.done():
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
        """Process all media of the messages and keep them for `owner`. Raises MediaRefused naming source and reason."""
        for media in media_of(messages):
            name = _name(media)
            for _ in range(TRIES):
                future = self._known.get(name) or self._begin(name, media)
                await asyncio.shield(future)
                if self._keep(self._result(media, future).key, name, owner):
                    break
                if self._known.get(name) is future:
                    del self._known[name]
            else:
                raise _refusal(media, "the media store lost its file each time before it could be used")

    def fill_placeholders(self, rendered: Rendered, messages: Iterable[Message]) -> Rendered:
        """Expand the placeholders in a rendering of messages that `prepare` has processed. Raises MediaRefused."""
        return expand_placeholders(rendered, [self._result(media) for media in media_of(messages)], self._family)

    def release(self, owner: Hashable) -> None:
        """Release the media of an owner, which may then be deleted."""
        if self._budget is not None:
            self._budget.release(owner)
            self._evict()

    def release_below(self, group: int) -> None:
        """Release the media of all groups below this number."""
        if self._budget is not None:
            self._budget.release_below(group)
            self._evict()

    async def examine(self, media: Media) -> dict[str, object]:
        """Decode and process a medium without storing it; return facts about it for display. Raises MediaRefused."""
        facts: dict[str, object] = await self._processor(media).ask("examine", media)
        return facts

    # -- one medium ---------------------------------------------------------------------------------------------

    def _processor(self, media: Media) -> _Processor:
        if media.kind not in self._by_kind:
            raise MediaRefused(f'no processor reads media of this kind: set media = ["{media.kind}"]')
        return self._by_kind[media.kind]

    def _result(self, media: Media, future: asyncio.Future[PlaceholderTokens | str] | None = None) -> PlaceholderTokens:
        """Return the result of a processed medium. Raises MediaRefused if the medium was refused or not processed."""
        future = future or self._known.get(_name(media))
        result = future.result() if future is not None and future.done() else "it was not processed"
        if isinstance(result, str):
            raise _refusal(media, result)
        return result

    def _begin(self, name: Any, media: Media) -> asyncio.Future[PlaceholderTokens | str]:
        """Start to process a medium; return the future on which all callers wait."""
        future = self._known[name] = asyncio.get_running_loop().create_future()
        self._spawn(self._process(name, media, future))
        while len(self._known) > REMEMBERED:  # the medium may stay in the store: its key comes from its content
            oldest, forgotten = self._known.popitem(last=False)
            result = forgotten.result() if forgotten.done() and not forgotten.cancelled() else ""
            if isinstance(result, PlaceholderTokens) and result.key in self._names:
                self._names[result.key].discard(oldest)
        return future

    async def _process(self, name: Any, media: Media, future: asyncio.Future[PlaceholderTokens | str]) -> None:
        """Process a medium and set its future; cache only a result, or a refusal because of the content."""
        try:
            key, layout = await self._ask(name, media, "process")
            if len(media.source) <= MAX_KEPT_SOURCE:
                self._sources[key] = media
            if len(self._sources) > REMEMBERED:
                self._sources.popitem(last=False)
            future.set_result(PlaceholderTokens(media.kind, key, tuple(PlaceholderSpan(*span) for span in layout)))
            return
        except MediaUnavailable as unavailable:
            future.set_result(str(unavailable))
        except MediaRefused as refused:
            future.set_result(str(refused))
            return
        except asyncio.CancelledError:
            future.set_exception(RelaxError(f"{shown(media.source)}: the media processors were stopped"))
            future.exception()
            raise
        except Exception as error:  # a fault of the run, such as a full disk, not of the medium
            future.set_exception(error)
            future.exception()  # mark it as retrieved: all callers may have been cancelled
        if self._known.get(name) is future:
            del self._known[name]

    async def _ask(self, name: Any, media: Media, method: str) -> Any:
        """Call a method of `MediaHost`; retry after failures that the content did not cause. Raises MediaRefused."""
        outage = self._outages.get(name)
        if outage is not None and (left := outage.until - self._clock.now()) > 0:
            raise MediaUnavailable(f"{outage.reason}; the source is tried again in {left:.0f} s")
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
        """Keep a stored medium for its owner; return False if its file is missing or its size has changed."""
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
        """Until the pipeline stops, process media again when readers found their stored files damaged."""
        while True:
            for key in await asyncio.to_thread(self._store.damaged):
                if (media := self._sources.get(key)) is not None:
                    if (future := self._known.get(_name(media))) is not None and future.done():
                        del self._known[_name(media)]
                    with suppress(MediaRefused, RelaxError):  # readers raise at their own deadline
                        await self.prepare([Message("", (Part(media=media),))])
                self._store.clear_damaged(key)
            await self._clock.sleep(RESTORE_POLL_S)


@dataclass(frozen=True, slots=True)
class _Outage:
    """A source at which all attempts failed, and the time before which the source is not tried again."""

    reason: str
    until: float
    hold_off_s: float


class _Processor:
    """A modality processor in its own killable process."""

    def __init__(
        self, choice: Any, starter: ProcessStarter, directory: str, model: Mapping[str, Any], access: SourceAccess
    ) -> None:
        self._choice = choice
        self.kind = ""
        """Kind of medium that the processor reads; empty until it has started."""
        self.pool = IsolatedPool(
            [f"media-{choice.name}"],
            untrusted(
                choice.chosen, "relax_plugin_media.host:MediaHost", memory_mb=choice.memory_mb,
                env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                writable=(directory, *map(str, choice.writable)),
            ),
            starter,
            PoolSettings(
                timeout_s=choice.timeout_s, tries=1, max_batch=1, opened=self._opened, check=_check_answer,
                open_args=(directory, model, choice.max_mb << 20, getattr(choice, "preview_kb", 0) << 10, astuple(access)),
            ),
        )  # fmt: skip

    async def ask(self, method: str, media: Media) -> Any:
        """Call a method of `MediaHost` for one medium.

        Raises MediaRefused if the content is at fault, else its subclass MediaUnavailable.
        """
        try:
            return await self.pool.submit((method, media))
        except (SourceUnavailable, PluginError) as error:
            raise MediaUnavailable(str(error)) from error
        except ValueError as error:
            raise MediaRefused(str(error)) from error
        except ItemTimeout as error:
            raise MediaUnavailable(f"processing takes longer than {self._choice.timeout_s:g} s") from error
        except ItemCrash as error:
            limit = f" (limit: {self._choice.memory_mb} MB)" if self._choice.memory_mb else ""
            raise MediaUnavailable(f"reading it broke the process{limit}") from error

    def _opened(self, kind: object) -> dict[str, Callable[..., object]]:
        self.kind = checked(kind, str, "start")
        return {}


def _check_answer(item: tuple[str, Media], answer: Any) -> None:
    """Raise WrongShape unless `answer` may be what `MediaHost` sends for an item."""
    method, _ = item
    if method == "budget":
        checked(answer, int, method)
    elif method == "process":
        checked(answer, tuple[str, Sequence[tuple[str, int, float | None]]], method)
        check_key(answer[0])
    else:
        checked(answer, Mapping[str, Any], method)


class MediaBudget:
    """Sizes and owners of the media in the store, least recently used first.

    This class does no I/O: its caller must at once delete the media that `evicted` returns. An owner is a group number,
    or any value that the caller later gives to `release`.

    Invariants:
    - A medium that an owner needs is never evicted, even if the store stays over its limit.
    - After `release_below(n)`, groups below n need no media, even if `retain` is called for such a group later.
    """

    def __init__(self, limit_bytes: int, found: Mapping[str, int], known_groups: int = 0) -> None:
        """Count the media of a store: `found` has their sizes in bytes by key, oldest first.

        Groups below `known_groups` may need any medium in `found`.
        """
        self._limit = limit_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict(found)
        self._total = sum(found.values())
        self._holders: dict[str, set[Hashable]] = {}
        self._held: dict[Hashable, set[str]] = {}
        self._oldest = 0
        for key in found:
            self.retain(known_groups - 1, key)

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    def size_of(self, key: str) -> int | None:
        """Return the size of a medium in bytes, or None if the medium is not counted."""
        return self._sizes.get(key)

    def forget(self, key: str) -> None:
        """Stop counting a medium whose file is gone. Its owners still need it when it is stored again."""
        self._total -= self._sizes.pop(key, 0)

    def add(self, key: str, size_bytes: int) -> None:
        """Count a medium that was put into the store."""
        self._total += size_bytes - self._sizes.get(key, 0)
        self._sizes[key] = size_bytes
        self._sizes.move_to_end(key)

    def retain(self, owner: Hashable, key: str) -> None:
        """Keep a medium until the owner releases it."""
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
        """Release the media of all groups below this number."""
        self._oldest = max(self._oldest, group)
        for owner in [owner for owner in self._held if isinstance(owner, int) and owner < self._oldest]:
            self.release(owner)

    def needed(self, key: str) -> bool:
        return key in self._holders

    def evicted(self) -> list[str]:
        """Stop counting unneeded media until the rest is within the limit; return their keys, to be deleted at once."""
        gone: list[str] = []
        for key in [key for key in self._sizes if key not in self._holders]:
            if self._total <= self._limit:
                break
            self._total -= self._sizes.pop(key)
            gone.append(key)
        return gone


def _refusal(media: Media, why: str) -> MediaRefused:
    return MediaRefused(f"{media.kind} {shown(media.source)}: {why}")


def _name(media: Media) -> Hashable:
    """Return the cache key of a source. It contains a file's size and time, so a changed file is processed again."""
    if is_path(media.source):
        try:
            stat = Path(media.source).stat()
            return media.kind, media.source, media.view, stat.st_mtime_ns, stat.st_size
        except OSError:
            pass
    source: Any = media.source
    if len(source) > LONG:  # data-URIs may be large, and many are cached
        source = hashlib.blake2b(source.encode(), digest_size=16).digest()
    return media.kind, source, media.view
