# SPDX-License-Identifier: Apache-2.0
"""The process of one modality processor: reads sources, processes their media and writes results to the media store.

The process may be killed. Tensors are never sent to the caller. The same bytes from two sources are processed once.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from relax_core.api.errors import ConfigError, PluginError, RelaxError
from relax_core.api.modality import ModalityProcessor, ProcessedMedia
from relax_core.api.task import Media
from relax_core.media.access import SourceAccess
from relax_core.media.source import content_key, read_source, restricted
from relax_core.media.store import MediaStore, write_media_file
from relax_core.registry.error_text import innermost, plugin_frames, said
from relax_core.registry.shapes import WrongShape, checked, returned_by, shown
from relax_core.rpc.isolated_host import IsolatedHost, who

KEY = re.compile("[0-9a-f]{32}")
MAX_KNOWN = 65536
"""Number of media contents for which the store key is cached; a full cache is cleared."""
T = TypeVar("T")
PREVIEWS = "previews"
FIRST_BYTES = 8 << 20
"""Total bytes of a run's first previews, per kind of medium. These previews are never deleted."""
NEWEST_BYTES = 24 << 20
"""Total bytes of a run's newest previews, per kind of medium. Older previews beyond this limit are deleted."""


class MediaHost(IsolatedHost):
    """The host of one modality processor.

    A work item is a pair: the name of a method (`budget`, `process`, `examine`) and a medium. Raises ValueError for
    unreadable media.
    """

    def open(
        self, directory: str, model: Mapping[str, Any], max_bytes: int, preview_bytes: int, access: Sequence[Any] = ()
    ) -> str:
        """Build the processor; return the kind of medium that it reads.

        `max_bytes` limits one source, `preview_bytes` one preview (0: no previews). `access`: fields of `SourceAccess`.
        """
        built = self.build(self.component)
        if not isinstance(built, ModalityProcessor) or not built.medium:
            raise ConfigError("media", self.component.name, "name a modality processor that sets `medium`")
        self._processor, self._store = built, MediaStore(directory)
        self._model, self._max_bytes, self._access = dict(model), max_bytes, SourceAccess(*access)
        self._previews, self._preview_bytes = Previews(Path(directory) / PREVIEWS, built.medium), preview_bytes
        self._known: dict[tuple[bytes, Any], tuple[str, list[tuple[object, ...]]]] = {}
        return built.medium

    def handle(self, item: Sequence[Any]) -> object:
        method, media = item
        with restricted(self._access, self._max_bytes):
            return getattr(self, method)(media)

    def budget(self, media: Media) -> int:
        """Return the number of tokens that a medium will take."""
        return self._asked(self._processor.budget, int, media, self._model)

    def process(self, media: Media) -> tuple[str, list[tuple[object, ...]]]:
        """Process a medium into the store; return its key and its layout, as fields of `PlaceholderSpan`."""
        data = read_source(media.source, self._max_bytes)
        content = (hashlib.blake2b(data, digest_size=16).digest(), media.view)
        if content not in self._known or self._known[content][0] not in self._store:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            done = self._processed(media, data).laid_out(media.kind)
            self._store.put(done)
            if self._preview_bytes and done.key not in self._previews:
                with suppress(ValueError, PluginError):  # the model can still read a medium without a preview
                    if preview := self._preview(media, data):
                        self._previews.put(done.key, preview)
            self._known[content] = done.key, [tuple(span) for span in done.layout]
        return self._known[content]

    def examine(self, media: Media) -> dict[str, object]:
        """Decode and process a medium without storing it; return facts about it for display."""
        data = read_source(media.source, self._max_bytes)
        facts = {"size_bytes": len(data), **self._asked(self._processor.facts, Mapping[str, Any], media, data)}
        done = self._processed(media, data)
        preview = self._preview(media, data) if self._preview_bytes else None
        return {"key": done.key, "tokens": done.num_placeholders, **facts, "preview": preview}

    def _processed(self, media: Media, data: bytes) -> ProcessedMedia:
        whole = self._asked(self._processor.process, ProcessedMedia, media, data, self._model)
        try:
            check_key(whole.key)
        except WrongShape as error:
            raise PluginError(who(self.component), str(error)) from error
        if media.view is None:
            return whole
        part = self._asked(self._processor.view, ProcessedMedia, whole, *media.view)
        key = content_key(bytes.fromhex(whole.key), media.view)
        return replace(part, key=key)

    def _preview(self, media: Media, data: bytes) -> bytes | None:
        return self._asked(self._processor.preview, bytes | None, media, data, self._preview_bytes)

    def _asked(self, method: Callable[..., T], wanted: Any, *args: Any) -> T:
        """Call a method of the processor whose result has the type `wanted`.

        ValueError means a medium that can't be read. All other errors of the processor, and results of another type,
        are raised as PluginError.
        """
        try:
            return cast(T, checked(method(*args), wanted, returned_by(method)))
        except (RelaxError, ValueError, MemoryError):
            raise
        except Exception as error:
            place = innermost(error)
            message = str(error) if isinstance(error, WrongShape) else f"{said(error)}{f' ({place})' * bool(place)}"
            raise PluginError(who(self.component), message, plugin_frames(error)) from error


def check_key(key: str) -> None:
    """Raise WrongShape unless `key` may name a file of the store: the result of `content_key`."""
    if not KEY.fullmatch(key):
        raise WrongShape(f"media key: got {shown(key)}; want 32 hexadecimal digits, as `content_key` returns")


class Previews:
    """The first and the newest previews of one kind of medium: files in the run directory, named by store key.

    The transcript page shows previews from the start and the end of a run. Training never reads previews.
    """

    def __init__(self, directory: Path, kind: str) -> None:
        self._directory, self._kind = directory, kind
        self._first = 0
        self._newest: OrderedDict[Path, int] = OrderedDict()
        files = [(path.stat().st_mtime, path) for path in directory.glob(f"*.{kind}")] if directory.is_dir() else []
        for _, path in sorted(files):
            self._count(path, path.stat().st_size)

    def __contains__(self, key: str) -> bool:
        return self._path(key).is_file()

    def put(self, key: str, data: bytes) -> None:
        """Write a preview atomically. Raises InfrastructureError if it can't be written."""
        path = self._path(key)
        write_media_file(path, [data])
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
