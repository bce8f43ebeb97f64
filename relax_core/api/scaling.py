# SPDX-License-Identifier: Apache-2.0
"""Contracts of scaling: policies, which propose the number of engines of a pool, and the limits around a policy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol

from relax_core.api.component import Configurable, OptionsT

if TYPE_CHECKING:
    from relax_core.api.events import Logged, ScalingProposed


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """The load of one engine pool and of the trainer, measured over one window. None: not measured in this window.

    Shares are from 0 to 1.
    """

    at: float
    """Time of the window's end, in seconds of the clock of `ScalingPolicy.decide`."""
    window_s: float = 0.0
    """Length of the window in seconds."""
    serving: int | None = None
    """Engines that serve requests."""
    starting: int | None = None
    """Engines that do not serve yet: they start, load weights, or replace a failed engine."""
    leaving: int | None = None
    """Engines that get no new requests and stop when their requests have moved."""
    running: float | None = None
    """Requests that run on engines, mean over the window."""
    waiting: float | None = None
    """Requests that wait for an engine, mean over the window."""
    oldest_wait_s: float | None = None
    """Longest time that a waiting request had waited, in seconds; 0 if no request waited."""
    busy: float | None = None
    """Share of the serving engines that run at least one request, mean over the window."""
    busy_in_wait: float | None = None
    """`busy` over the time in which the trainer waited for rows; None also if the trainer did not wait."""
    slot_use: float | None = None
    """Share of the serving engines' request slots in use; None also if the number of requests is not limited."""
    kv_use: float | None = None
    """Share of the serving engines' KV caches in use by running requests; None also if caches are not counted."""
    groups_per_s: float | None = None
    """Groups that were scored in the window, per second."""
    steps: int | None = None
    """Steps that the trainer finished in the window."""
    trainer_wait: float | None = None
    """Share of the window in which the trainer waited for rows of the rollout."""
    staleness_wait: float | None = None
    """Share of the window in which the staleness bound kept the rollout from starting groups."""

    @property
    def size(self) -> int | None:
        """Engines of the pool without those that leave; None if a state was not measured."""
        return None if self.serving is None or self.starting is None else self.serving + self.starting

    @property
    def use(self) -> float | None:
        """The larger of `slot_use` and `kv_use`, which is the share that limits the pool; None if both are None."""
        return max((share for share in (self.slot_use, self.kv_use) if share is not None), default=None)

    def plain(self) -> dict[str, float]:
        """Return the measured fields as JSON data, the input of `from_plain`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: round(value, 6) for name, value in values.items() if value is not None}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Signals:
        """Return the signals of `plain`; unknown fields are ignored."""
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})


@dataclass(frozen=True, slots=True)
class Proposal:
    """The number of engines that a policy wants."""

    target: int
    """Number of engines of the pool, at least 1."""
    reason: str
    """One sentence with the signal, its value and the bound."""


class ScalingPolicy(Configurable[OptionsT], Generic[OptionsT]):
    """A rule that proposes the number of engines of a pool.

    A policy is a pure state machine. It has no clock and no memory besides the state that it returns, so a recorded run
    can be replayed. An `Autoscaler` limits every proposal: minimum, maximum, cool-downs between two changes, and
    one change at a time. A policy need not check these limits.
    """

    kind: ClassVar[str] = "scaling-policy"

    def start(self) -> Any:
        """Return the state before the first signals, and after a gap in the signals. A state is never changed."""
        return None

    @abstractmethod
    def decide(self, state: Any, signals: Signals, now: float) -> tuple[Any, Proposal | None]:
        """Return the next state, and the wanted number of engines; None keeps the present number.

        Called once for each window. `now` is in seconds of a clock that never goes back. If a signal that the rule needs
        is None, return None: no proposal without data.
        """


class Autoscaler(Protocol):
    """A scaling policy within limits: `(state, signals, now) -> (state, event)`, without a clock and other memory.

    The controller of a run calls it, records its events, and asks the pool for the targets of its proposals.
    """

    def start(self) -> object:
        """Return the state before the first window."""

    def decide(self, state: Any, signals: Signals, now: float) -> tuple[object, ScalingProposed | Logged | None]:
        """Take one window; return the next state, and a new proposal or the policy's error, if any.

        Raises nothing: after an error of the policy, the policy is off, and the number of engines stays.
        """
