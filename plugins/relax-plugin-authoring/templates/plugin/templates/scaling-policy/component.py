"""The scaling policy `{{ cookiecutter.name }}`: proposes the number of engines of a pool, once for each window of signals.

A policy is a pure function of its state and the signals: no clock, no random numbers, no memory in `self`. The run
applies the limits of `[autoscale]` (minimum, maximum, cool-downs) to each proposal.
"""

from relax_core.api import Options, Proposal, ScalingPolicy, Signals


class {{ cookiecutter.class_name }}Options(Options):
    """Options of `{{ cookiecutter.name }}`."""

    trainer_wait: float = 0.3
    """Share of its time that the trainer may wait for rows. Above this share an engine joins."""
    staleness_wait: float = 0.6
    """Share of the time in which the staleness bound may keep groups from starting. Above this share an engine leaves."""
    windows: int = 6
    """Number of windows in a row in which the same reason must hold, so that one odd window changes nothing."""


class {{ cookiecutter.class_name }}(ScalingPolicy[{{ cookiecutter.class_name }}Options]):
    """Adds an engine while the trainer waits for rows; removes one while the rollout is ahead of the trainer."""

    def start(self) -> int:
        """Return the state before the first window: how many windows in a row asked for more (+) or fewer (-) engines."""
        return 0

    def decide(self, state: int, signals: Signals, now: float) -> tuple[int, Proposal | None]:
        """Return the next state, and a proposal or None. A signal that was not measured is None: propose nothing then."""
        size, waits, holds, busy = signals.size, signals.trainer_wait, signals.staleness_wait, signals.busy
        if size is None or waits is None or holds is None or busy is None:
            return self.start(), None
        more = waits > self.options.trainer_wait and holds < self.options.staleness_wait
        fewer = holds > self.options.staleness_wait and waits < self.options.trainer_wait and size > 1
        state = max(state, 0) + 1 if more else min(state, 0) - 1 if fewer else 0
        if state >= self.options.windows:
            return 0, Proposal(size + 1, f"the trainer waited {waits:.0%} of its time, for {state} windows in a row")
        if -state >= self.options.windows:
            return 0, Proposal(size - 1, f"groups were held back {holds:.0%} of the time, for {-state} windows in a row")
        return state, None
