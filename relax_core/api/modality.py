# SPDX-License-Identifier: Apache-2.0
"""Modality processors: bytes of a medium to tensors and placeholders, once for all samples of a group."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple

from relax_core.api.component import Configurable, OptionsT
from relax_core.api.task import Media, MediaKind

if TYPE_CHECKING:
    import numpy as np

_MAGIC = (
    (b"\x89PNG", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"), (b"BM", "image/bmp"),
    (b"fLaC", "audio/flac"), (b"OggS", "audio/ogg"), (b"ID3", "audio/mpeg"), (b"\x1a\x45\xdf\xa3", "video/webm"),
)  # fmt: skip


class PlaceholderSpan(NamedTuple):
    """Features that stand together in a prompt; a model's family knows which tokens that is."""

    kind: MediaKind
    size: int
    """Features, at least one."""
    seconds: float | None = None
    """When they are seen or heard, from the medium's beginning; None where it has no time."""


@dataclass(frozen=True, slots=True)
class ProcessedMedia:
    """Media after processing, in the form that both the trainer and the engine read."""

    key: str
    tensors: Mapping[str, np.ndarray]
    num_placeholders: int
    layout: tuple[PlaceholderSpan, ...] = ()
    """Its features in order, in the pieces that a prompt may part them into: those of two frames of a video, say. Empty: all
    in one, of the processor's kind; that is written out before it is stored."""

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def laid_out(self, kind: MediaKind) -> ProcessedMedia:
        """With a layout. ValueError where it holds more or fewer features than there are."""
        layout = self.layout or (PlaceholderSpan(kind, self.num_placeholders),)
        if sum(span.size for span in layout) != self.num_placeholders or any(span.size < 1 for span in layout):
            raise ValueError(f"a layout of {[span.size for span in layout]} for {self.num_placeholders} features")
        return replace(self, layout=layout)


class ModalityProcessor(Configurable[OptionsT], Generic[OptionsT]):
    """Decodes and processes one kind of medium, in a killable process."""

    kind: ClassVar[str] = "modality-processor"
    medium: ClassVar[str] = ""

    @abstractmethod
    def budget(self, media: Media, model: Mapping[str, Any]) -> int:
        """Tokens it will take, known before generation."""

    @abstractmethod
    def process(self, media: Media, data: bytes, model: Mapping[str, Any]) -> ProcessedMedia:
        """Raises ValueError naming medium and reason for what can't be read."""

    def facts(self, media: Media, data: bytes) -> Mapping[str, Any]:
        """Return facts about the media that people may want to know (seconds, width, rate, ...), from its header.
        Raises ValueError."""
        return {}

    def preview(self, media: Media, data: bytes, most_bytes: int) -> bytes | None:
        """A copy that a browser shows or plays, no larger than this; by default itself, where it is one."""
        return data if len(data) <= most_bytes and browser_type(data).startswith(self.medium) else None

    def view(self, whole: ProcessedMedia, start_s: float, end_s: float) -> ProcessedMedia:
        """The part of a processed medium that one view shows; the whole is stored once for all its views."""
        raise NotImplementedError


def browser_type(data: bytes) -> str:
    """`image/png` and the like, by the first bytes; empty for what browsers don't show. A container may still hold a codec
    that they don't know."""
    head = data[:16]
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if head[:4] == b"RIFF":
        return {b"WEBP": "image/webp", b"WAVE": "audio/wav"}.get(head[8:12], "")
    if head[4:8] == b"ftyp":
        return "audio/mp4" if head[8:11] == b"M4A" else "video/mp4"
    return "audio/mpeg" if head[:1] == b"\xff" and head[1:2] >= b"\xe0" else ""
