# SPDX-License-Identifier: Apache-2.0
"""The contract of modality processors, which turn the bytes of a medium into tensors and placeholders."""

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
    """Consecutive features of one medium in a prompt; the model family chooses the tokens that stand for them."""

    kind: MediaKind
    size: int
    """Number of features in the span, at least 1."""
    seconds: float | None = None
    """Time of the features in seconds from the medium's start; None for an image."""


@dataclass(frozen=True, slots=True)
class ProcessedMedia:
    """A processed medium, as trainers and engines read it."""

    key: str
    tensors: Mapping[str, np.ndarray]
    num_placeholders: int
    layout: tuple[PlaceholderSpan, ...] = ()
    """The features in order. The prompt may insert tokens between two spans, such as between the frames of a video.
    Empty: all features are one span; the core adds this span before it stores the medium."""

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def laid_out(self, kind: MediaKind) -> ProcessedMedia:
        """Return a copy with a non-empty layout. Raises ValueError unless it has `num_placeholders` features."""
        layout = self.layout or (PlaceholderSpan(kind, self.num_placeholders),)
        if sum(span.size for span in layout) != self.num_placeholders or any(span.size < 1 for span in layout):
            raise ValueError(f"layout: got sizes {[span.size for span in layout]} for {self.num_placeholders} features")
        return replace(self, layout=layout)


class ModalityProcessor(Configurable[OptionsT], Generic[OptionsT]):
    """A processor of one kind of medium; runs in a killable process."""

    kind: ClassVar[str] = "modality-processor"
    medium: ClassVar[str] = ""
    """The kind of medium: `image`, `video` or `audio`."""

    @abstractmethod
    def budget(self, media: Media, model: Mapping[str, Any]) -> int:
        """Return the number of tokens that the medium will take, without processing it."""

    @abstractmethod
    def process(self, media: Media, data: bytes, model: Mapping[str, Any]) -> ProcessedMedia:
        """Process the bytes of a medium. Raises ValueError with medium and reason if the bytes can't be read."""

    def facts(self, media: Media, data: bytes) -> Mapping[str, object]:
        """Return facts to display from the medium's header: seconds, width, ... Raises ValueError for a bad header."""
        return {}

    def preview(self, media: Media, data: bytes, most_bytes: int) -> bytes | None:
        """Return a file of at most `most_bytes` that browsers can play, or None; by default, the medium's own bytes."""
        return data if len(data) <= most_bytes and browser_type(data).startswith(self.medium) else None

    def view(self, whole: ProcessedMedia, start_s: float, end_s: float) -> ProcessedMedia:
        """Return the part of a processed medium between two times, in seconds."""
        raise NotImplementedError


def browser_type(data: bytes) -> str:
    """Return the MIME type that the first bytes show, such as `image/png`; empty for formats that browsers can't play.

    The codec inside a container is not checked.
    """
    head = data[:16]
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if head[:4] == b"RIFF":
        return {b"WEBP": "image/webp", b"WAVE": "audio/wav"}.get(head[8:12], "")
    if head[4:8] == b"ftyp":
        return "audio/mp4" if head[8:11] == b"M4A" else "video/mp4"
    return "audio/mpeg" if head[:1] == b"\xff" and head[1:2] >= b"\xe0" else ""
