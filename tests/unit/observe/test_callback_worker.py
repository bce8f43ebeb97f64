# SPDX-License-Identifier: Apache-2.0
"""Calls to a sink that fails: pauses that grow, a bound, and a new try after each pause, on a virtual clock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from relax_core.observe.observers import MAX_PAUSES, CallbackWorker, close_all
from tests.clocks import HandClock

WAIT_S = 30.0


class Service:
    """A worker whose calls reach a service that may be down."""

    def __init__(self, clock: HandClock) -> None:
        self.down = False
        self.made: list[str] = []
        self.told: list[str] = []
        self._done = threading.Semaphore(0)
        self.worker = CallbackWorker("sink", clock, self._report, deadline_s=1e9)

    def give(self, *names: str) -> None:
        """Give calls one after another, and wait for each until it was made or its failure was reported."""
        for name in names:
            self.worker.give(partial(self._call, name))
            assert self._done.acquire(timeout=WAIT_S)

    def give_in_a_pause(self, *names: str) -> None:
        for name in names:
            self.worker.give(partial(self._call, name))

    def _call(self, name: str) -> None:
        self.made.append(name)
        if self.down:
            raise ConnectionError("refused")
        self._done.release()

    def _report(self, name: str, why: str, frames: str) -> None:
        self.told.append(why)
        self._done.release()


@pytest.fixture
def service(clock: HandClock) -> Iterator[Service]:
    service = Service(clock)
    yield service
    close_all([(service.worker, None)], WAIT_S)


def test_a_service_that_comes_back_gets_calls_again_after_the_pause(service: Service, clock: HandClock) -> None:
    service.give("1")
    service.down = True
    service.give("2", "3", "4")
    assert service.told[-1] == "is paused for 60 s: it raised 3 times, last ConnectionError: refused"
    clock.at += 59.9
    service.give_in_a_pause("5", "6")
    service.down = False
    clock.at += 0.1
    service.give("7")
    assert service.made == ["1", "2", "3", "4", "7"] and service.worker.on
    assert service.worker.failures == 5, "three that raised and two in the pause"


def test_pauses_grow_and_after_the_last_the_sink_is_off(service: Service, clock: HandClock) -> None:
    service.down = True
    for _ in range(MAX_PAUSES + 1):
        service.give("a", "b", "c")
        clock.at += 600
    pauses = [told.partition(":")[0] for told in service.told if "paused" in told]
    assert pauses == [f"is paused for {seconds} s" for seconds in (60, 120, 240, 480, 600, 600)]
    assert service.told[-1].startswith(f"is off: it raised 3 times after {MAX_PAUSES} pauses")
    assert not service.worker.on and service.worker.failures == 3 * (MAX_PAUSES + 1)


def test_a_call_that_succeeds_makes_the_next_pause_short_again(service: Service, clock: HandClock) -> None:
    for down in (True, True, False, True):
        service.down = down
        service.give("a", "b", "c")
        clock.at += 600
    assert [told.partition(":")[0] for told in service.told if "paused" in told] == [
        "is paused for 60 s", "is paused for 120 s", "is paused for 60 s",
    ]  # fmt: skip


def test_the_last_call_is_made_also_in_a_pause(service: Service) -> None:
    service.down = True
    service.give("a", "b", "c")
    service.give_in_a_pause("d")
    close_all([(service.worker, lambda: service.made.append("close"))], WAIT_S)
    assert service.made == ["a", "b", "c", "close"] and service.worker.failures == 4
