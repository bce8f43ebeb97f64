# SPDX-License-Identifier: Apache-2.0
"""Which weights: a model, an incarnation of its trainer, and the steps completed."""

from __future__ import annotations

from typing import NamedTuple


class Version(NamedTuple):
    """Completed steps of one model; ordered by incarnation, then step."""

    model: str
    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.model}@{self.incarnation}.{self.step}"

    def next(self) -> Version:
        return self._replace(step=self.step + 1)

    def supersedes(self, other: Version) -> bool:
        """Whether a receiver that has `other` may load this one: same model, same or newer incarnation."""
        return self.model == other.model and self[1:] >= other[1:] and self.incarnation >= other.incarnation
