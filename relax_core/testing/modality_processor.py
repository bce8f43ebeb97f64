# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of modality processors: the same tensors for the same bytes, as many placeholders as announced,
clear refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from relax_core.api.modality import ProcessedMedia
from relax_core.api.task import Media
from relax_core.testing.suite import Suite


class ModalityProcessorSuite(Suite):
    """Subclass it, name the component, and give a `[model]` table and the bytes of a medium."""

    kind = "modality-processor"
    model: ClassVar[Mapping[str, Any]] = {}
    media: ClassVar[Media | None] = None
    data: ClassVar[bytes] = b""

    @classmethod
    def processed(cls, component: Any) -> tuple[int, Any]:
        """(budget, result) of the suite's medium."""
        if cls.media is None:
            raise NotImplementedError("give `media` and `data` in the suite")
        return component.budget(cls.media, cls.model), component.process(cls.media, cls.data, cls.model)

    @classmethod
    def exercise(cls, component: Any) -> Any:
        budget, result = cls.processed(component)
        return [budget, result.key, {name: tensor.tolist() for name, tensor in result.tensors.items()}]

    def test_it_takes_the_tokens_it_said(self, made: Any) -> None:
        budget, result = self.processed(made)
        assert isinstance(result, ProcessedMedia), f"got {type(result).__name__}; return ProcessedMedia"
        assert result.num_placeholders == budget
        assert result.key and result.tensors

    def test_damaged_bytes_are_refused(self, made: Any) -> None:
        with pytest.raises(ValueError):
            made.process(self.media, b"not a medium", self.model)
