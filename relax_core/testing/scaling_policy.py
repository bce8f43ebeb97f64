# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of scaling policies: a valid number of engines that depends only on the load snapshots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from relax_core.api.engine import Load
from relax_core.testing.suite import Suite

EVEN = Load(2, busy=0.5, waiting_for_rows=0.1, waiting_for_credit=0.1, free_devices=2, now=0.0)


class ScalingPolicySuite(Suite):
    """The suite of a scaling policy; a subclass sets `component`."""

    kind = "scaling-policy"
    loads: ClassVar[tuple[Load, ...]] = (
        EVEN,
        replace(EVEN, busy=1.0, waiting_for_rows=0.9),
        replace(EVEN, busy=0.0, waiting_for_credit=0.9),
        replace(EVEN, engines=1, free_devices=0),
    )

    @classmethod
    def exercise(cls, component: Any) -> Any:
        return [component.engines(cls.history(load)) for load in cls.loads]

    @classmethod
    def history(cls, load: Load) -> tuple[Load, ...]:
        """Return ten minutes of the same load, with one snapshot per minute."""
        return tuple(replace(load, now=60.0 * minute) for minute in range(10))

    def test_the_number_is_one_that_devices_allow(self, made: Any) -> None:
        for load in self.loads:
            number = made.engines(self.history(load))
            assert isinstance(number, int) and 1 <= number <= load.engines + load.free_devices, (
                f"engines() returned {number!r} at {load}; return an int from 1 to engines + free_devices"
            )

    def test_a_run_without_history_keeps_its_engines(self, made: Any) -> None:
        assert made.engines((EVEN,)) >= 1
