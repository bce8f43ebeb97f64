# SPDX-License-Identifier: Apache-2.0
"""The media of a run: its store, and the pipeline of processors that a plugin offers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from relax_core.api.family import ModelFamily, Rendered
from relax_core.api.media import MediaPipeline
from relax_core.api.task import Media, MediaKind, Message
from relax_core.config.run_config import RunContext
from relax_core.data.task_files import source_access
from relax_core.media.placeholders import MediaRefused, expand_placeholders, media_of
from relax_core.registry.loader import import_target
from relax_core.rpc.isolated_pool import ProcessStarter, replaced_events


class TextOnly:
    """The media pipeline of a run without processors, which refuses media and placeholders in text."""

    kinds: tuple[MediaKind, ...] = ()

    def __init__(self, family: ModelFamily[Any]) -> None:
        self._family = family

    async def start(self, known_groups: int = 0) -> None:
        """Start nothing."""

    async def stop(self) -> None:
        """Stop nothing."""

    async def num_features(self, messages: Iterable[Message]) -> int:
        await self.prepare(messages)
        return 0

    async def prepare(self, messages: Iterable[Message], owner: Hashable = None) -> None:
        for media in media_of(messages):
            await self.examine(media)

    def fill_placeholders(self, rendered: Rendered, messages: Iterable[Message]) -> Rendered:
        return expand_placeholders(rendered, [], self._family)

    def release(self, owner: Hashable) -> None:
        """Release nothing."""

    def release_below(self, group: int) -> None:
        """Release nothing."""

    async def examine(self, media: Media) -> dict[str, object]:
        raise MediaRefused(f'no processor reads media of this kind: set media = ["{media.kind}"]')


def media_store(context: RunContext) -> str:
    """Return the directory of the run's processed media."""
    return str(Path(context.run_dir).absolute() / "media")


def media_pipeline(target: str, choices: Sequence[Any], family: ModelFamily[Any], *settings: Any) -> MediaPipeline:
    """Create the pipeline of the chosen processors; `target` is its class. Without processors, refuse all media.

    `settings`: the starter of processes, the store's directory, the table of the model, the store's limit in bytes or
    None, the clock, and the `SourceAccess`.
    """
    if not choices:
        return TextOnly(family)
    return cast(Callable[..., MediaPipeline], import_target(target))(choices, family, *settings)


def make_media_pipeline(context: RunContext, family: ModelFamily[Any], limit_bytes: int | None = None) -> MediaPipeline:
    """Create the media pipeline of a run; `limit_bytes` is the store's size limit, None for no limit."""
    run = context.config
    starter = ProcessStarter(context.children, replaced_events(context.run_status))
    access = source_access(run.data, [run.data.train, *(table.path for table in run.eval.sets)])
    return media_pipeline(
        context.plan.media_pipeline, run.media, family, starter, media_store(context),
        run.model.model_dump(mode="json"), limit_bytes, context.clock, access,
    )  # fmt: skip


@asynccontextmanager
async def opened_media_pipeline(context: RunContext, family: ModelFamily[Any]) -> AsyncIterator[MediaPipeline]:
    """Run a media pipeline without a size limit, for rows of a dataset, during a `with` block."""
    pipeline = make_media_pipeline(context, family)
    try:
        await pipeline.start()
        yield pipeline
    finally:
        await pipeline.stop()
