# SPDX-License-Identifier: Apache-2.0
"""The autoscaler of a run: reports each proposal of a limited policy once, and turns the policy off after an error."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from relax_core.api import Logged, ScalingLimits, ScalingPolicy, Signals
from relax_core.api.events import ScalingProposed
from relax_plugin_scaling.limits import POOL, LimitedPolicy, LimitedState


@dataclass(frozen=True, slots=True)
class AutoscalerState:
    """The state of an autoscaler whose policy is on."""

    limited: LimitedState
    stopped: ScalingProposed | None = None
    """Newest proposal, if a limit stopped it."""


class Autoscaler:
    """A `relax_core.api.Autoscaler`: `on -> off`, the latter after an error of the policy. A state of None is off.

    Invariant: a proposal that a limit stops is returned once, until size, wanted number or limit change.
    """

    def __init__(self, policy: ScalingPolicy, limits: ScalingLimits, min_engines: int = 1) -> None:
        """`min_engines`: number of the oldest engines, which never leave."""
        self._limited = LimitedPolicy(policy, limits, min_engines)

    def start(self) -> AutoscalerState:
        """Return the state before the first window."""
        return AutoscalerState(self._limited.start())

    def decide(
        self, state: AutoscalerState | None, signals: Signals, now: float
    ) -> tuple[AutoscalerState | None, ScalingProposed | Logged | None]:
        """Take one window; return the next state, and a new proposal or the policy's error, if any."""
        if state is None:
            return None, None
        try:
            limited, proposal = self._limited.decide(state.limited, signals, now)
        except Exception as error:  # code of a plugin: its fault must not end the training
            why = f"the scaling policy is off, and the number of engines stays: {type(error).__name__}: {error}"
            return None, Logged("error", POOL, why, {"frames": "".join(traceback.format_exception(error))})
        if proposal is None or proposal.target is not None:
            return AutoscalerState(limited), proposal
        before, again = state.stopped, AutoscalerState(limited, proposal)
        repeated = before is not None and (before.size, before.wanted, before.held_by) == (
            proposal.size, proposal.wanted, proposal.held_by,
        )  # fmt: skip
        return again, None if repeated else proposal
