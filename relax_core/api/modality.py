# SPDX-License-Identifier: Apache-2.0
"""Modality processors: bytes of a medium to tensors and placeholders, once for all samples of a group."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from relax_core.api.component import Configurable, OptionsT
from relax_core.api.task import Media

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class ProcessedMedia:
    """What trainer and engine both read."""

    key: str
    tensors: Mapping[str, np.ndarray]
    num_placeholders: int


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

    def view(self, whole: ProcessedMedia, start_s: float, end_s: float) -> ProcessedMedia:
        """The part of a processed medium that one view shows; the whole is stored once for all its views."""
        raise NotImplementedError
