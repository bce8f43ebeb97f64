# SPDX-License-Identifier: Apache-2.0
"""The contract of the media pipeline, which hosts the modality processors of a run."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Protocol

from relax_core.api.family import Rendered
from relax_core.api.task import Media, MediaKind, Message


class MediaPipeline(Protocol):
    """The host of a run's modality processors: processes each medium once, for all prompts that show it.

    The hook `relax_media_pipeline` names the class. Methods that read media raise `MediaRefused` of
    `relax_core.media.placeholders`, with the medium and the reason.
    """

    @property
    def kinds(self) -> tuple[MediaKind, ...]:
        """The kinds of media that a processor reads and for which the model has a placeholder."""

    async def start(self, known_groups: int = 0) -> None:
        """Start the processors. Groups below `known_groups` were issued before and may need any medium in the store."""

    async def stop(self) -> None:
        """Stop the processors."""

    async def num_features(self, messages: Iterable[Message]) -> int:
        """Return the number of tokens that the messages' media will take; unknown sizes count as 0."""

    async def prepare(self, messages: Iterable[Message], owner: Hashable = None) -> None:
        """Process all media of the messages, and keep them in the run's store for `owner`."""

    def fill_placeholders(self, rendered: Rendered, messages: Iterable[Message]) -> Rendered:
        """Expand the placeholders in a rendering of messages that `prepare` has processed."""

    def release(self, owner: Hashable) -> None:
        """Release the media of an owner, which may then be deleted."""

    def release_below(self, group: int) -> None:
        """Release the media of all groups below this number."""

    async def examine(self, media: Media) -> dict[str, object]:
        """Process a medium without storing it; return facts about it for display."""
