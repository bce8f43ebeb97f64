# SPDX-License-Identifier: Apache-2.0
"""Scaling policies: how many engines, from what was measured. A pure function of snapshots."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic

from relax_core.api.component import Configurable, OptionsT


@dataclass(frozen=True, slots=True)
class Load:
    """One role's load over the last window; times are shares of it."""

    engines: int
    busy: float
    waiting_for_rows: float
    """Share of the window in which the actor waited for rows."""
    waiting_for_credit: float
    """Share in which rollout was held by the staleness bound."""
    free_devices: int
    now: float


class ScalingPolicy(Configurable[OptionsT], Generic[OptionsT]):
    """Decides the number of engines."""

    kind: ClassVar[str] = "scaling-policy"

    @abstractmethod
    def engines(self, history: tuple[Load, ...]) -> int:
        """How many engines there should be now."""
