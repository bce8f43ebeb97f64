# SPDX-License-Identifier: Apache-2.0
"""Turns of pools on the same devices: one is awake, everything asked is answered, and nothing waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import given, strategies as st

from relax_core.api import SystemClock
from relax_core.devices.turns import POLICY, EngineTurns, SharedEngines, TurnRule

MIN_S, MAX_S, SETTLE_S, WAIT_S = 5.0, 60.0, 0.25, 30.0
NAMES = (POLICY, "judge", "big")


def turns(**rules: int) -> EngineTurns:
    """Pools by how many requests are enough; 0: none are."""
    made = {name: TurnRule(requests, WAIT_S) for name, requests in rules.items()}
    return EngineTurns(made, settle_s=SETTLE_S, min_turn_s=MIN_S, max_turn_s=MAX_S)


def test_a_deferred_pool_waits_for_the_end_of_the_wave() -> None:
    state = turns(judge=0)
    state.update({POLICY: 4}, 0.0)
    assert state.update({POLICY: 4, "judge": 1000}, 20.0) == POLICY
    assert state.update({"judge": 1000}, 21.0) == POLICY, "the policy may go on in a moment"
    assert state.update({POLICY: 1, "judge": 1000}, 21.1) == POLICY
    state.update({"judge": 1000}, 22.0)
    assert state.next_at() == 22.25 and state.update({"judge": 1000}, 22.25) == "judge"
    assert state.update({POLICY: 1, "judge": 1}, 23.0) == "judge", "it ends what it has begun"
    state.update({POLICY: 1}, 24.0)
    assert state.update({POLICY: 1}, 24.25) == POLICY


def test_a_shared_pool_takes_its_turn_as_soon_as_enough_requests_wait() -> None:
    state = turns(judge=8)
    state.update({POLICY: 4}, 0.0)
    assert state.update({POLICY: 4, "judge": 7}, 20.0) == POLICY
    assert state.update({POLICY: 4, "judge": 8}, 20.1) == "judge"


def test_no_request_waits_longer_for_its_turn_than_it_may() -> None:
    state = turns(judge=0)
    state.update({POLICY: 4, "judge": 1}, 10.0)
    assert state.next_at() == 10.0 + WAIT_S
    assert state.update({POLICY: 4, "judge": 1}, 10.0 + WAIT_S) == "judge"


def test_a_turn_lasts_a_while_so_that_it_does_something() -> None:
    state = turns(judge=1)
    state.update({POLICY: 4, "judge": 9}, 1.0)
    assert state.update({POLICY: 4, "judge": 9}, MIN_S - 0.1) == POLICY
    assert state.update({POLICY: 4, "judge": 9}, MIN_S) == "judge"
    assert state.update({POLICY: 4, "judge": 9}, MIN_S + MAX_S - 0.1) == "judge"
    assert state.update({POLICY: 4, "judge": 9}, MIN_S + MAX_S) == POLICY
    assert state.update({POLICY: 4, "judge": 9}, MIN_S + MAX_S + 0.1) == POLICY


ARRIVALS = st.lists(st.tuples(st.floats(0.0, 40.0), st.sampled_from(NAMES), st.integers(1, 20)), max_size=25)


@given(ARRIVALS, st.integers(0, 12), st.integers(0, 12), st.floats(0.05, 20.0))
def test_every_request_is_answered_and_time_always_advances(
    arrivals: Sequence[tuple[float, str, int]], enough: int, enough_big: int, each_s: float
) -> None:
    """Requests come after the given pauses; only who is awake answers them, one after another."""
    state, now, work = turns(judge=enough, big=enough_big), 0.0, dict.fromkeys(NAMES, 0)
    coming, at = [], 0.0
    for pause_s, name, count in arrivals:
        at += pause_s
        coming.append((at, name, count))
    waited_since: dict[str, float] = {}
    changes = 0
    holder, answers_at = state.update(work, now), float("inf")
    while any(work.values()) or coming:
        times = [answers_at, *(one[0] for one in coming[:1]), *([due] if (due := state.next_at()) is not None else [])]
        assert min(times) < float("inf"), f"{work} wait for ever"
        assert now <= min(times), "the past would come again and again"
        now = min(times)
        while coming and coming[0][0] <= now:
            work[coming[0][1]] += coming.pop(0)[2]
        if answers_at <= now:
            work[holder] -= 1
            answers_at = float("inf")
        before, holder = holder, state.update(work, now)
        assert holder in NAMES and (holder == before or work[holder] > 0), "nobody is woken for nothing"
        changes += holder != before
        if holder != before or answers_at == float("inf"):
            answers_at = now + each_s if work[holder] else float("inf")
        for name in NAMES:
            if name == holder or not work[name]:
                waited_since.pop(name, None)
            waited = now - waited_since.setdefault(name, now) if name != holder and work[name] else 0.0
            assert waited <= 2 * (MAX_S + WAIT_S + MIN_S), f"{name} waited {waited} s"
        assert now < 1e5 and changes < 1000
    assert state.next_at() is None


class Member:
    """A pool that answers one request a moment, while it is awake."""

    def __init__(self, told: list[str], name: str, requests: int) -> None:
        self.told, self.name, self.requests, self.awake = told, name, requests, False

    def work(self) -> int:
        return self.requests

    async def pause(self) -> None:
        self.awake = False
        self.told.append(f"{self.name} pauses")

    async def resume(self) -> None:
        self.awake = True
        self.told.append(f"{self.name} resumes")


class Lease:
    """A lease that notes who is loaded in it."""

    freed_bytes = 0

    def __init__(self, told: list[str]) -> None:
        self.told = told

    async def change_phase(self, phase: str, holders: Mapping[str, Any], deadline_s: float) -> None:
        self.told.append(f"{phase}: {', '.join(holders)}")

    async def wanted(self) -> None: ...


async def test_a_pool_is_offloaded_before_the_next_one_is_loaded() -> None:
    told: list[str] = []
    policy, judge = Member(told, "policy", 1), Member(told, "judge", 0)
    state = EngineTurns({"judge": TurnRule(0, WAIT_S)}, SystemClock().now(), settle_s=0.02)
    shared = SharedEngines({POLICY: policy, "judge": judge}, state, SystemClock())
    async with asyncio.timeout(20):
        await shared.wanted()
        assert set(shared.holders()) == {POLICY}
        until = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(shared.run(Lease(told), until, 10.0))
        while not policy.awake:
            await asyncio.sleep(0.001)
        policy.requests, judge.requests = 0, 2
        shared.on_change()
        while not judge.awake:
            await asyncio.sleep(0.001)
        assert not policy.awake
        until.set_result(None)
        await running
    assert told == [
        "generate: rollout", "policy resumes", "policy pauses", "answer: judge", "judge resumes", "judge pauses",
    ]  # fmt: skip
