# SPDX-License-Identifier: Apache-2.0
"""Sinks: where metrics and samples go besides the run directory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic

from relax_core.api.component import Configurable, OptionsT


class Sink(Configurable[OptionsT], Generic[OptionsT]):
    """Receives each step's metrics in the controller; a sink that raises three times is off and reported."""

    kind: ClassVar[str] = "sink"

    @abstractmethod
    def open(self, run_dir: str, name: str, config: Mapping[str, Any]) -> None:
        """Start writing for a run; a resumed run opens again."""

    @abstractmethod
    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """A few transcripts of the step."""

    def close(self) -> None:
        """Flush."""
