# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of scaling policies: pure, valid proposals, none without data, and no oscillation."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields, replace
from typing import Any, ClassVar

from relax_core.api.scaling import Proposal, Signals
from relax_core.api.scaling_limits import ScalingLimits
from relax_core.testing.simulated_pool import SimulatedPool, reversals, simulate
from relax_core.testing.suite import Suite

EVEN = Signals(
    at=0.0, window_s=10.0, serving=4, starting=0, leaving=0, running=8.0, waiting=0.0, oldest_wait_s=0.0, busy=0.8,
    busy_in_wait=0.8, slot_use=0.5, kv_use=0.5, groups_per_s=1.0, steps=1, trainer_wait=0.1, staleness_wait=0.1,
)  # fmt: skip
"""A pool that is neither too large nor too small."""
BUSY = replace(
    EVEN, running=16.0, waiting=99.0, oldest_wait_s=60.0, busy=1.0, busy_in_wait=1.0, slot_use=1.0, kv_use=0.99,
    trainer_wait=0.9, staleness_wait=0.0,
)  # fmt: skip
IDLE = replace(
    EVEN,
    running=0.0,
    busy=0.0,
    busy_in_wait=None,
    slot_use=0.0,
    kv_use=0.0,
    groups_per_s=0.1,
    trainer_wait=0.0,
    staleness_wait=0.9,
)
MEASURED = tuple(field.name for field in fields(Signals) if field.default is None)
"""Names of the signals that may be None."""


class ScalingPolicySuite(Suite):
    """The suite of a scaling policy; a subclass sets `component`."""

    kind = "scaling-policy"
    loads: ClassVar[tuple[Signals, ...]] = (EVEN, BUSY, IDLE)
    windows: ClassVar[int] = 90
    """Windows of 10 s for which each load lasts, longer than the policy's conditions must hold."""

    @classmethod
    def exercise(cls, component: Any) -> Any:
        return [
            None if proposal is None else (proposal.target, proposal.reason)
            for load in cls.loads
            for proposal in cls.proposals(component, load)
        ]

    @classmethod
    def proposals(cls, policy: Any, load: Signals) -> Iterator[Any]:
        """Yield the proposals for a load that stays the same."""
        state = policy.start()
        for number in range(cls.windows):
            now = 10.0 * number
            state, proposal = policy.decide(state, replace(load, at=now), now)
            yield proposal

    def test_a_proposal_has_a_number_of_engines_and_a_reason(self, made: Any) -> None:
        for load in self.loads:
            for proposal in self.proposals(made, load):
                assert proposal is None or isinstance(proposal, Proposal), f"decide() proposed {proposal!r} at {load}"
                if proposal is not None:
                    valid = type(proposal.target) is int and proposal.target >= 1
                    assert valid, f"decide() proposed {proposal.target!r} engines at {load}; want an int of at least 1"
                    assert proposal.reason, f"decide() gave no reason for {proposal.target} engines at {load}"

    def test_the_decision_depends_only_on_the_arguments(self, made: Any) -> None:
        state = made.start()
        for number, load in enumerate(self.loads * 3):
            signals = replace(load, at=10.0 * number)
            before = deepcopy(state)
            first = made.decide(state, signals, signals.at)
            assert state == before, "decide() changed the state that it received; return a new state"
            assert made.decide(state, signals, signals.at) == first, "decide() has a memory besides the state"
            state = first[0]

    def test_no_proposal_follows_from_data_that_are_missing(self, made: Any) -> None:
        """Without one signal the policy raises nothing; without any it proposes nothing."""
        for load in self.loads:
            for name in MEASURED:
                lacking: dict[str, Any] = {name: None}
                list(self.proposals(made, replace(load, **lacking)))
            for proposal in self.proposals(made, Signals(at=0.0)):
                assert proposal is None, f"decide() proposed {proposal} without any signal"

    def test_a_constant_load_does_not_make_the_pool_oscillate(self, made: Any) -> None:
        limits = ScalingLimits(max_engines=12)
        for engines, train_s in ((3, 5.0), (3, 60.0), (10, 60.0)):
            windows = simulate(made, limits, SimulatedPool(engines=engines, train_s=train_s), 200)
            sizes = [window.signals.size for window in windows]
            assert reversals(windows) <= 1, f"with {train_s:g} s of training a step the pool had {sizes} engines"
