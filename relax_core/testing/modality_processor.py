# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of modality processors: reproducible tensors, correct budgets, refusal of damaged bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from relax_core.api.modality import ProcessedMedia
from relax_core.api.task import Media
from relax_core.testing.suite import Suite


class ModalityProcessorSuite(Suite):
    """The suite of a processor; a subclass sets `component`, a `[model]` table, and a medium with its bytes."""

    kind = "modality-processor"
    model: ClassVar[Mapping[str, Any]] = {}
    media: ClassVar[Media | None] = None
    data: ClassVar[bytes] = b""

    @classmethod
    def processed(cls, component: Any) -> tuple[int, Any]:
        """Process the suite's medium; return (budget, result)."""
        if cls.media is None:
            raise NotImplementedError("the suite has no sample; set `media` and `data` in it")
        return component.budget(cls.media, cls.model), component.process(cls.media, cls.data, cls.model)

    @classmethod
    def exercise(cls, component: Any) -> Any:
        budget, result = cls.processed(component)
        return [budget, result.key, {name: tensor.tolist() for name, tensor in result.tensors.items()}]

    def test_a_medium_takes_the_declared_number_of_tokens(self, made: Any) -> None:
        budget, result = self.processed(made)
        assert isinstance(result, ProcessedMedia), f"process() returned {type(result).__name__}; return ProcessedMedia"
        assert result.num_placeholders == budget
        assert result.key and result.tensors

    def test_damaged_bytes_are_refused(self, made: Any) -> None:
        with pytest.raises(ValueError):
            made.process(self.media, b"not a medium", self.model)
