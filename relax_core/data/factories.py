# SPDX-License-Identifier: Apache-2.0
"""Media pipelines of a run from its configuration, and the bounds that its model sets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from relax_core.api.family import ModelFamily
from relax_core.config.model_folder import model_context
from relax_core.config.run_config import RunContext
from relax_core.data.media_pipeline import MediaPipeline

NO_BOUND = 1 << 30


def media_store(context: RunContext) -> str:
    """The directory of the run's processed media."""
    return str(Path(context.run_dir).absolute() / "media")


def context_of(run: Any) -> int:
    """The model's context in tokens; one that does not say has no bound of its own."""
    return model_context(run.model.path) or NO_BOUND


def make_media_pipeline(context: RunContext, family: ModelFamily, limit: int | None = None) -> MediaPipeline:
    """The processors of the run's media, and where what they make is kept, within a limit of bytes where one is given."""
    run = context.config
    return MediaPipeline(
        run.media, context.children, media_store(context), run.model.model_dump(mode="json"), family, limit
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
