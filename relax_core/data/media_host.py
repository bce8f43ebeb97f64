# SPDX-License-Identifier: Apache-2.0
"""What runs in the killable process of a modality processor: a source is read, processed and put into the media store.

Only keys and counts go back. The same bytes from two sources are processed once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from relax_core.api.errors import ConfigError
from relax_core.api.modality import ModalityProcessor, ProcessedMedia
from relax_core.api.task import Media
from relax_core.api.trainer import Chosen
from relax_core.data.media_pipeline import PREVIEWS, Previews
from relax_core.media.source import content_key, read_source
from relax_core.media.store import MediaStore

MAX_KNOWN = 65536
"""Contents whose keys are remembered."""


class MediaHost:
    """Holds one processor; the worker's host sets `component` and `build` before the first call."""

    component: Chosen
    build: Callable[[Chosen], Any]

    def open(self, directory: str, model: Mapping[str, Any], max_bytes: int, preview_bytes: int) -> str:
        """Build the processor; the kind of medium that it reads. `preview_bytes`: of copies for people; 0: none."""
        built = self.build(self.component)
        if not isinstance(built, ModalityProcessor) or not built.medium:
            raise ConfigError("media", self.component.name, "it is no processor of a kind of medium")
        self._processor, self._store = built, MediaStore(directory)
        self._model, self._max_bytes = dict(model), max_bytes
        self._previews, self._preview_bytes = Previews(Path(directory) / PREVIEWS, built.medium), preview_bytes
        self._known: dict[tuple[bytes, Any], tuple[str, list[tuple[Any, ...]]]] = {}
        return built.medium

    def budget(self, media: Media) -> int:
        """Tokens that it will take. ValueError for what can't be read."""
        return self._processor.budget(media, self._model)

    def process(self, media: Media) -> tuple[str, list[tuple[Any, ...]]]:
        """(key in the store, how its features lie: values of `Span`). ValueError for what can't be read."""
        data = read_source(media.source, self._max_bytes)
        content = (hashlib.blake2b(data, digest_size=16).digest(), media.view)
        if content not in self._known or self._known[content][0] not in self._store:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            done = self._processed(media, data).laid_out(media.kind)
            self._store.put(done)
            self._keep_preview(done.key, media, data)
            self._known[content] = done.key, [tuple(span) for span in done.layout]
        return self._known[content]

    def examine(self, media: Media) -> dict[str, Any]:
        """What it is, for people; decoded and processed, and not kept. ValueError for what can't be read."""
        data = read_source(media.source, self._max_bytes)
        facts = {"size_bytes": len(data), **self._processor.facts(media, data)}
        done = self._processed(media, data)
        preview = self._processor.preview(media, data, self._preview_bytes) if self._preview_bytes else None
        return {"key": done.key, "tokens": done.num_placeholders, **facts, "preview": preview}

    def _keep_preview(self, key: str, media: Media, data: bytes) -> None:
        if not self._preview_bytes or key in self._previews:
            return
        try:
            preview = self._processor.preview(media, data, self._preview_bytes)
        except ValueError:
            return  # it was read for the model; people see its name
        if preview:
            self._previews.put(key, preview)

    def _processed(self, media: Media, data: bytes) -> ProcessedMedia:
        whole = self._processor.process(media, data, self._model)
        if media.view is None:
            return whole
        part = self._processor.view(whole, *media.view)
        key = content_key(bytes.fromhex(whole.key), media.view)
        return replace(part, key=key)
