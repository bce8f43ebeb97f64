# SPDX-License-Identifier: Apache-2.0
"""The measurement of a rollout's load from heartbeats: signals of scaling policies, and `engines/` metrics of steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from relax_core.api.role import Heartbeat
from relax_core.api.scaling import Signals
from relax_core.observe.spans import first_blocker

WINDOW_S = 10.0
"""Seconds of one window of signals."""
FRESH_S = 5.0
"""Longest time without a heartbeat, in seconds, before the measurements of a role count as missing."""
STALENESS_WAIT = "leave to start groups"
"""Reason of the rollout's wait while the staleness bound keeps groups from starting."""
ROLLOUT, TRAINER = "rollout", "actor"


@dataclass(frozen=True, slots=True)
class _Load:
    """The load that one heartbeat of the rollout reports."""

    time: float
    serving: int
    starting: int
    leaving: int
    running: int
    waiting: int
    oldest_wait_s: float
    busy: float | None
    slot_use: float | None
    kv_use: float | None
    scored: int
    trainer_waits: bool
    held: bool
    """True if the staleness bound keeps groups from starting."""
    prompt_tokens: int
    """Prompt tokens of ended requests so far, for engines that count how many they found in prefix caches."""
    cached_tokens: int
    drafted_tokens: int
    """Tokens that engines drafted ahead for ended requests so far."""
    kept_drafts: int


class SignalMeter:
    """The load of the policy's engine pool and of the trainer. Times are in seconds of the caller's clock.

    Invariants:
    - Each heartbeat counts once, in one window and in one step.
    - A value of a role without a heartbeat in the last `FRESH_S` seconds of a window is None.
    """

    def __init__(self) -> None:
        self._window_at: float | None = None
        """Start of the window; None before the first heartbeat."""
        self._seen: dict[str, tuple[float, float]] = {}
        """(own time, time of arrival here) of each role's newest heartbeat."""
        self._window: list[_Load] = []
        self._step: list[_Load] = []
        self._trainer: list[bool] = []
        """For each heartbeat of the trainer in the window, True if it waits for rows."""
        self._steps = 0
        self._before: _Load | None = None
        """Last load before the current step."""
        self._last: _Load | None = None
        """Last load of the previous window; None if that window had none."""
        self._trainer_waits = False
        """True if the trainer waited for rows at its newest heartbeat."""

    def add(self, heartbeats: Iterable[Heartbeat], now: float) -> None:
        """Count the heartbeats that were not seen before."""
        for beat in sorted(heartbeats, key=lambda one: one.role):  # the trainer's before the rollout's
            if beat.role not in (ROLLOUT, TRAINER) or beat.state in ("starting", "stopped", "failed"):
                continue
            if self._seen.get(beat.role, (None, 0.0))[0] == beat.at:
                continue
            self._window_at = now if self._window_at is None else self._window_at
            self._seen[beat.role] = (beat.at, now)
            if beat.role == TRAINER:
                self._trainer_waits = any(first_blocker(wait.blocked_by) == ROLLOUT for wait in beat.waits)
                self._trainer.append(self._trainer_waits)
            elif (load := _load(beat, now, self._trainer_waits)) is not None:
                self._window.append(load)
                self._step.append(load)

    def step(self) -> dict[str, float]:
        """End a step; return its `engines/` metrics, empty without a heartbeat since the last step."""
        loads, self._step = self._step, []
        self._steps += 1
        if not loads:
            return {}
        before, self._before = self._before, loads[-1]
        metrics = {
            "engines/serving": _mean(load.serving for load in loads),
            "engines/running": _mean(load.running for load in loads),
            "engines/waiting": _mean(load.waiting for load in loads),
            "engines/oldest_wait_s": max(load.oldest_wait_s for load in loads),
            "engines/busy": _mean(load.busy for load in loads),
            "engines/slot_use": _mean(load.slot_use for load in loads),
            "engines/kv_use": _mean(load.kv_use for load in loads),
            "engines/staleness_wait": _mean(load.held for load in loads),
            "engines/prefix_hits": _share(loads[-1], before, "cached_tokens", "prompt_tokens"),
            "engines/draft_acceptance": _share(loads[-1], before, "kept_drafts", "drafted_tokens"),
        }
        return {key: value for key, value in metrics.items() if value is not None}

    def window(self, now: float) -> Signals | None:
        """Return the signals of the window that ends now; None before `WINDOW_S` have passed."""
        if self._window_at is None or (window_s := now - self._window_at) < WINDOW_S:
            return None
        loads, trainer, steps = self._window, self._trainer, self._steps
        self._window_at, self._window, self._trainer, self._steps = now, [], [], 0
        before, self._last = self._last, loads[-1] if loads else None
        waits = _mean(trainer) if self._fresh(TRAINER, now) else None
        if not loads or not self._fresh(ROLLOUT, now):
            return Signals(at=now, window_s=window_s, steps=steps, trainer_wait=waits)
        newest, first = loads[-1], before or loads[0]
        scored, seconds = newest.scored - first.scored, newest.time - first.time
        return Signals(
            at=now, window_s=window_s, serving=newest.serving, starting=newest.starting, leaving=newest.leaving,
            running=_mean(load.running for load in loads), waiting=_mean(load.waiting for load in loads),
            oldest_wait_s=max(load.oldest_wait_s for load in loads), busy=_mean(load.busy for load in loads),
            busy_in_wait=_mean(load.busy for load in loads if load.trainer_waits),
            slot_use=_mean(load.slot_use for load in loads), kv_use=_mean(load.kv_use for load in loads),
            groups_per_s=scored / seconds if seconds > 0 and scored >= 0 else None,  # a restarted role counts from 0
            steps=steps, trainer_wait=waits, staleness_wait=_mean(load.held for load in loads),
        )  # fmt: skip

    def _fresh(self, role: str, now: float) -> bool:
        return role in self._seen and now - self._seen[role][1] <= FRESH_S


def _load(beat: Heartbeat, now: float, trainer_waits: bool) -> _Load | None:
    """Return the load in a heartbeat of the rollout; None if the rollout does not report its engines."""
    engines: Mapping[str, Mapping[str, Any]] = beat.facts.get("engines") or {}
    queue = beat.facts.get("scheduling") or {}
    if not engines or "waiting" not in queue:
        return None
    serving = [engine for engine in engines.values() if engine["serving"]]
    leaving = sum(engine.get("state") == "leaving" for engine in engines.values())
    running, slots = sum(engine["running"] for engine in serving), queue["requests_per_engine"] * len(serving)
    counted = [engine for engine in serving if engine["kv_capacity"]]
    kv = sum(engine["kv_capacity"] for engine in counted)
    return _Load(
        now, len(serving), len(engines) - len(serving) - leaving, leaving, running, queue["waiting"],
        queue["oldest_wait_s"], sum(engine["running"] > 0 for engine in serving) / len(serving) if serving else None,
        running / slots if slots else None,
        sum(engine["kv_running"] for engine in counted) / kv if kv else None, queue["scored"],
        trainer_waits, any(wait.reason == STALENESS_WAIT for wait in beat.waits), queue["prompt_tokens"],
        queue["cached_tokens"], queue["drafted_tokens"], queue["kept_drafts"],
    )  # fmt: skip


def _share(last: _Load, before: _Load | None, part: str, whole: str) -> float | None:
    """Return the share of one count in another since `before`; None for no count, or if the role restarted from 0."""
    some, everything = (getattr(last, name) - (getattr(before, name) if before else 0) for name in (part, whole))
    return some / everything if everything > 0 and some >= 0 else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
