# SPDX-License-Identifier: Apache-2.0
"""The values that programs log, held until their step has finished: a state machine without IO and clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

HELD = 10_000
"""Most values that are held at once."""
NAMES = 1000
"""Most names in one run: a sink makes a chart of each."""


class LoggedValues:
    """Values by step: `held -> taken | cleared`.

    Invariants:
    - A value is taken once, and not before its step has finished. The last value of a name and step counts.
    - At most HELD values are held, and at most NAMES names are ever taken. `refused` counts the other values.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        """`names`: the names that the run has recorded already."""
        self._names, self._steps, self.refused = set(names), dict[int, dict[str, float]](), 0

    def __len__(self) -> int:
        return sum(map(len, self._steps.values()))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Hold the values of a step. Values beyond the limits are refused."""
        held, count = self._steps.setdefault(step, {}), len(self)
        for name, value in values.items():
            new = name not in held
            if (new and count >= HELD) or (name not in self._names and len(self._names) >= NAMES):
                self.refused += 1
                continue
            self._names.add(name)
            held[name] = float(value)
            count += new

    def take(self, finished: int) -> dict[int, dict[str, float]]:
        """Return the values of the steps up to the newest finished one, by step."""
        return {step: values for step in sorted(self._steps) if step <= finished and (values := self._steps.pop(step))}

    def clear(self, step: int | None) -> None:
        """Forget the values of a step; None: of all steps."""
        for cleared in list(self._steps) if step is None else [step]:
            self._steps.pop(cleared, None)
