# SPDX-License-Identifier: Apache-2.0
"""Dynamic loss scaling for fp16: losses are multiplied before the backward pass, so that small gradients are not rounded
to 0, and gradients divided after it. An overflow halves the scale, and the shell computes the update again; a scale
that held for `window` updates is doubled. Other formats have a scale of 1 that never moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

LEAST, MOST = 1.0, 2.0**24


@dataclass(slots=True)
class LossScale:
    """All ranks hold the same one: they see the same norms."""

    value: float = LEAST
    window: int = 0
    """Updates without overflow until it is doubled; 0: it stays."""
    held: int = 0
    """Updates since it last changed."""

    @classmethod
    def of(cls, dtype: torch.dtype, first: float, window: int) -> LossScale:
        return cls(first, window) if dtype == torch.float16 else cls()

    @property
    def dynamic(self) -> bool:
        return self.window > 0

    def overflowed(self) -> bool:
        """Whether a lower scale is worth another try; it is in force from now on."""
        if not self.dynamic or self.value <= LEAST:
            return False
        self.value, self.held = max(LEAST, self.value / 2), 0
        return True

    def applied(self) -> None:
        """An update went well."""
        self.held += 1
        if self.dynamic and self.held >= self.window:
            self.value, self.held = min(MOST, self.value * 2), 0

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "held": self.held}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Restore the scale of a checkpoint; one of another format tells nothing about this one."""
        if self.dynamic and state is not None and state["value"] > LEAST:
            self.value, self.held = float(state["value"]), int(state["held"])
