# SPDX-License-Identifier: Apache-2.0
"""Where this trainer stands: completed steps, and whether the present one has changed the weights. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from relax_core.api import Version


@dataclass(slots=True)
class Progress:
    """A step begun at version s completes version s + 1, at the latest when the next one begins."""

    step: int = 0
    """The version at the start of the present step."""
    incarnation: int = 0
    begun: bool = False
    updated: bool = False
    """An update of the present step was applied."""

    def begin(self, version: Version) -> None:
        """Start the step at `version`. Raises ValueError where these weights are not that version."""
        self._check(version, "begin_step")
        self.step, self.incarnation = version.step, version.incarnation
        self.begun, self.updated = True, False

    def check_publish(self, version: Version) -> None:
        self._check(version, "publish")

    def check_transfer(self, version: Version) -> None:
        """Refuse to hand out a published version once these weights are another."""
        self._check(version, "transfer")

    def _check(self, version: Version, call: str) -> None:
        """Weights that an update changed are the next version; unchanged ones may close a step without any."""
        possible = {self.step + 1} if self.updated else {self.step, self.step + 1} if self.begun else {self.step}
        if version.step not in possible or version.incarnation < self.incarnation:
            mine = " or ".join(f"{self.incarnation}.{step}" for step in sorted(possible))
            raise ValueError(
                f"{call}: got version {version}, but this trainer holds version {mine}; load its checkpoint first"
            )

    def state(self) -> dict[str, int | bool]:
        return {"step": self.step, "begun": self.begun, "updated": self.updated, "incarnation": self.incarnation}
