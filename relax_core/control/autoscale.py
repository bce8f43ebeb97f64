# SPDX-License-Identifier: Apache-2.0
"""The scaling policy of a run: decisions on the signals of a live run, and the replay on a recorded run."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from relax_core.api.events import EnginesMeasured, Logged, ScalingProposed
from relax_core.api.scaling import ScalingPolicy, Signals
from relax_core.config.run_config import RunConfig
from relax_core.engines.scaling_limits import LimitedPolicy
from relax_core.observe.event_log import event_name
from relax_core.registry.catalogue import Catalogue
from relax_core.registry.error_text import said

POOL = "rollout"
"""The pool of the policy's engines."""
MEASURED = event_name(EnginesMeasured)


def limited_policy(config: RunConfig, catalogue: Catalogue) -> LimitedPolicy | None:
    """Return the policy of `[autoscale]` within the limits of its table; None without this table."""
    table = config.autoscale
    if table is None:
        return None
    return LimitedPolicy(catalogue.build(table.chosen, ScalingPolicy), table, config.placement.rollout.least)


class Autoscaler:
    """The scaling policy of a run: `deciding -> off`, the latter after an error of the policy in a live run.

    Invariant: a proposal that a limit stops is returned once, until it changes.
    """

    def __init__(self, limited: LimitedPolicy) -> None:
        self._limited, self._state = limited, limited.start()
        self._held: tuple[int, int, str] | None = None
        """(size, wanted number, limit) of the proposal that was stopped last."""
        self._off = False

    @classmethod
    def of(cls, config: RunConfig, catalogue: Catalogue) -> Self | None:
        """Return the autoscaler of a configuration; None without `[autoscale]`."""
        limited = limited_policy(config, catalogue)
        return None if limited is None else cls(limited)

    def propose(self, signals: Signals, now: float) -> ScalingProposed | None:
        """Return a new proposal for one window. Raises the policy's error."""
        self._state, decision = self._limited.decide(self._state, signals, now)
        known, self._held = self._held, None
        if decision is None:
            return None
        if decision.target is None:
            self._held = (decision.size, decision.wanted, decision.held_by)
            if self._held == known:
                return None
        size, wanted, target = decision.size, decision.wanted, decision.target
        return ScalingProposed(POOL, size, wanted, target, decision.reason, decision.held_by)

    def decide(self, signals: Signals, now: float) -> ScalingProposed | Logged | None:
        """Return the event of a new proposal, or of the policy's error, after which the policy is off."""
        if self._off:
            return None
        try:
            return self.propose(signals, now)
        except Exception as error:  # code of a plugin: its fault must not end the training
            self._off = True
            why = f"the scaling policy is off, and the number of engines stays: {said(error)}"
            return Logged("error", POOL, why, {"frames": "".join(traceback.format_exception(error))})


@dataclass(frozen=True, slots=True)
class ReplayedProposal:
    """A proposal of a policy on a recorded run."""

    seconds: float
    """Time since the first window, in seconds."""
    proposal: ScalingProposed


def recorded_signals(records: Iterable[Mapping[str, Any]]) -> Iterator[Signals]:
    """Yield the signals in the records of `events.jsonl`, with times of the wall clock, which all starts share."""
    for record in records:
        if record["event"] == MEASURED:
            at = datetime.fromisoformat(record["time"]).timestamp()
            yield Signals.from_plain({**record["signals"], "at": at})


def replay(limited: LimitedPolicy, windows: Sequence[Signals]) -> list[ReplayedProposal]:
    """Return what a policy would have proposed for the windows of a recorded run. Raises the policy's error.

    The recorded run did not obey the policy, so a proposal may come again after its cool-down.
    """
    scaler, found = Autoscaler(limited), list[ReplayedProposal]()
    for signals in windows:
        if (proposal := scaler.propose(signals, signals.at)) is not None:
            found.append(ReplayedProposal(signals.at - windows[0].at, proposal))
    return found
