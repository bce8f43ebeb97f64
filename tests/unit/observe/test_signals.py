# SPDX-License-Identifier: Apache-2.0
"""Heartbeats become the signals of scaling policies, and metrics of steps."""

from __future__ import annotations

from typing import Any

import pytest

from relax_core.api import Heartbeat, Signals, Wait
from relax_core.observe.signals import STALENESS_WAIT, SignalMeter

ENGINE = {"serving": True, "running": 3, "kv_capacity": 100, "kv_running": 50}
QUEUE = {
    "waiting": 2,
    "oldest_wait_s": 1.5,
    "requests_per_engine": 4,
    "scored": 0,
    "prompt_tokens": 0,
    "cached_tokens": 0,
    "drafted_tokens": 0,
    "kept_drafts": 0,
}


def rollout(at: float, *engines: dict[str, Any], held: bool = False, **queue: float) -> Heartbeat:
    waits = (Wait("rollout", STALENESS_WAIT, "actor (its version bounds staleness)", at, at + 1),) if held else ()
    facts = {"engines": {f"engine-{n}": ENGINE | one for n, one in enumerate(engines)}, "scheduling": QUEUE | queue}
    return Heartbeat("rollout", "busy", waits=waits, facts=facts, at=at)


def actor(at: float, *, waits: bool) -> Heartbeat:
    waiting = (Wait("actor", "8 groups for step 1", "rollout, then advantages", at, at + 60),) if waits else ()
    return Heartbeat("actor", "busy", waits=waiting, at=at)


def metered(now: float) -> SignalMeter:
    """Return a meter whose window begins now."""
    meter = SignalMeter()
    meter.add([Heartbeat("rollout", "busy", at=-1.0)], now)
    return meter


def test_a_window_has_the_newest_counts_and_the_means_of_its_heartbeats() -> None:
    meter = metered(100.0)
    meter.add([rollout(0.0, {}, {}, scored=4), actor(0.0, waits=True)], 100.5)
    meter.add([rollout(0.0, {}, {}, scored=4), actor(0.5, waits=False)], 101.0)  # the rollout's was seen before
    assert meter.window(105.0) is None
    meter.step()
    newest = rollout(
        9.0, {"running": 4}, {"running": 4, "kv_running": 100}, {"serving": False, "running": 0},
        {"serving": False, "running": 1, "state": "leaving"}, held=True, waiting=6, oldest_wait_s=9.0, scored=12,
    )  # fmt: skip
    meter.add([newest, actor(9.0, waits=True), actor(9.5, waits=True)], 108.5)
    assert meter.window(110.0) == Signals(
        at=110.0, window_s=10.0, serving=2, starting=1, leaving=1, running=7.0, waiting=4.0, oldest_wait_s=9.0,
        busy=1.0, busy_in_wait=1.0, slot_use=(6 / 8 + 1) / 2, kv_use=(0.5 + 0.75) / 2,
        groups_per_s=8 / 8.0, steps=1, trainer_wait=0.75,
        staleness_wait=0.5,
    )  # fmt: skip
    meter.add([rollout(19.0, {}, scored=20)], 118.5)
    rest = meter.window(120.0)
    assert rest is not None and (rest.groups_per_s, rest.steps, rest.size) == (0.8, 0, 1)  # since the window before


def test_a_silent_role_has_no_signals() -> None:
    meter = metered(0.0)
    assert meter.window(10.0) == Signals(at=10.0, window_s=10.0, steps=0)
    meter.add([rollout(1.0, {}), actor(1.0, waits=True)], 14.0)
    meter.add([rollout(2.0, {})], 17.0)
    assert meter.window(20.0).trainer_wait is None  # its last heartbeat is 6 s old
    meter.add([rollout(3.0, {}), actor(3.0, waits=True)], 24.9)
    silent = meter.window(30.0)
    assert (silent.size, silent.use, silent.trainer_wait) == (None, None, None)


@pytest.mark.parametrize("beat", [
    Heartbeat("rollout", "failed", facts=rollout(0.0, {}).facts), Heartbeat("rollout", "busy"),
    Heartbeat("rollout", "busy", facts={"engines": {"engine-0": ENGINE}}), Heartbeat("judge", "busy"),
])  # fmt: skip
def test_a_heartbeat_without_engines_is_not_counted(beat: Heartbeat) -> None:
    meter = metered(0.0)
    meter.add([beat], 9.0)
    assert meter.window(10.0).size is None and meter.step() == {}


def test_unlimited_slots_and_uncounted_caches_have_no_use() -> None:
    meter = metered(0.0)
    meter.add([rollout(0.0, {"kv_capacity": 0}, requests_per_engine=0)], 9.0)
    signals = meter.window(10.0)
    assert (signals.slot_use, signals.kv_use, signals.use, signals.running) == (None, None, None, 3.0)


def test_engines_without_requests_are_not_busy() -> None:
    meter = metered(0.0)
    meter.add([rollout(0.0, {}, {"running": 0}, {"running": 0}, {"running": 0})], 9.0)
    meter.add([rollout(1.0, {}), actor(1.0, waits=True)], 9.5)
    meter.add([rollout(2.0, {}), actor(2.0, waits=False)], 9.7)
    busy = meter.window(10.0)
    assert (busy.busy, busy.busy_in_wait) == (0.75, 1.0)


def test_the_first_window_begins_with_the_first_heartbeat() -> None:
    meter = SignalMeter()
    assert meter.window(94.0) is None
    meter.add([Heartbeat("rollout", "starting"), Heartbeat("judge", "busy")], 94.0)
    meter.add([rollout(0.0, {})], 95.0)
    assert meter.window(104.9) is None
    assert meter.window(105.0).window_s == 10.0


def test_a_restarted_role_has_no_rate_in_its_window() -> None:
    meter = metered(0.0)
    meter.add([rollout(0.0, {}, scored=50)], 9.0)
    meter.window(10.0)
    meter.add([rollout(1.0, {}, scored=1)], 19.0)
    assert meter.window(20.0).groups_per_s is None


def test_a_step_has_metrics_of_the_heartbeats_since_the_step_before() -> None:
    meter = metered(0.0)
    meter.add([rollout(0.0, {"running": 2}, held=True)], 1.0)
    meter.add([rollout(0.5, {"running": 4}, waiting=0, oldest_wait_s=0.0)], 1.5)
    assert meter.step() == {
        "engines/serving": 1.0, "engines/running": 3.0, "engines/waiting": 1.0, "engines/oldest_wait_s": 1.5,
        "engines/busy": 1.0, "engines/slot_use": 0.75, "engines/kv_use": 0.5, "engines/staleness_wait": 0.5,
    }  # fmt: skip
    assert meter.step() == {}


def test_prefix_hits_are_those_of_the_requests_that_ended_in_the_step() -> None:
    """A role that restarts counts from 0."""
    meter = metered(0.0)
    counts = [(0, 0), (40, 10), (40, 10), (100, 55), (10, 5), (20, 5)]
    hits = []
    for at, (prompt, cached) in enumerate(counts):
        meter.add([rollout(float(at), {}, prompt_tokens=prompt, cached_tokens=cached)], at + 0.5)
        hits.append(meter.step().get("engines/prefix_hits"))
    assert hits == [None, 0.25, None, 0.75, None, 0.0]


def test_draft_acceptance_is_that_of_the_requests_that_ended_in_the_step() -> None:
    meter = metered(0.0)
    meter.add([rollout(0.0, {}, drafted_tokens=8, kept_drafts=2)], 0.5)
    meter.step()
    meter.add([rollout(1.0, {}, drafted_tokens=18, kept_drafts=7)], 1.5)
    assert meter.step()["engines/draft_acceptance"] == 0.5
    meter.add(
        [rollout(2.0, {}, drafted_tokens=20, kept_drafts=1)], 2.5
    )  # the role restarted and has drafted more since
    assert "engines/draft_acceptance" not in meter.step()


def test_plain_signals_leave_out_what_was_not_measured() -> None:
    signals = Signals(at=1.0, serving=2, kv_use=0.5)
    assert signals.plain() == {"at": 1.0, "window_s": 0.0, "serving": 2, "kv_use": 0.5}
    assert Signals.from_plain(signals.plain() | {"of_a_later_version": 1}) == signals
