# SPDX-License-Identifier: Apache-2.0
"""What decides over devices: turns of colocated roles, and a scaling policy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from relax_core.api import DeadlineExceeded, Load, Options, ScalingPolicy, Sleeper, Turns
from relax_core.api.turn import Part, Phase

PARTS: tuple[Part, ...] = ("weights", "kv", "optimizer", "gradients")


class Body:
    """Something with memory: which of its parts are awake."""

    def __init__(self, *parts: Part) -> None:
        self.parts, self.awake = frozenset(parts), set(parts)

    async def sleep(self, parts: Sequence[Part]) -> int:
        freed = len(self.awake & set(parts))
        self.awake -= set(parts)
        return freed

    async def wake(self, parts: Sequence[Part]) -> None:
        self.awake |= self.parts & set(parts)


class Arbiter:
    """One turn at a time on each set of devices."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._living: dict[str, tuple[frozenset[str], Sleeper]] = {}

    def join(self, name: str, devices: frozenset[str], sleeper: Sleeper) -> None:
        self._living[name] = (devices, sleeper)

    def acquire(
        self, devices: frozenset[str], phase: Phase, holders: Mapping[str, Sequence[Part]], deadline_s: float
    ) -> AbstractAsyncContextManager[None]:
        return self._turn(devices, phase, holders, deadline_s)

    @asynccontextmanager
    async def _turn(
        self, devices: frozenset[str], phase: Phase, holders: Mapping[str, Sequence[Part]], deadline_s: float
    ) -> AsyncIterator[None]:
        shared = [(name, sleeper) for name, (on, sleeper) in self._living.items() if on & devices]
        if len(shared) == 1:
            yield  # alone on its devices: a turn at once
            return
        try:
            await asyncio.wait_for(self._lock.acquire(), deadline_s)
        except TimeoutError as error:
            raise DeadlineExceeded(phase, "a turn on shared devices", deadline_s) from error
        try:
            for name, sleeper in shared:
                await sleeper.sleep([part for part in PARTS if part not in holders.get(name, ())])
            for name, sleeper in shared:
                await sleeper.wake(holders.get(name, ()))
            yield
        finally:
            self._lock.release()


DEVICES = frozenset({"gpu:0", "gpu:1"})


def colocated() -> tuple[Turns, Body, Body]:
    turns: Turns = Arbiter()
    engine, trainer = Body("weights", "kv"), Body("weights", "optimizer", "gradients")
    turns.join("engine", DEVICES, engine)
    turns.join("trainer", DEVICES, trainer)
    return turns, engine, trainer


async def test_colocated_roles_take_turns_and_a_publish_has_both_sides_weights() -> None:
    turns, engine, trainer = colocated()
    async with turns.acquire(DEVICES, "generate", {"engine": ("weights", "kv")}, 5.0):
        assert (engine.awake, trainer.awake) == ({"weights", "kv"}, set())
    async with turns.acquire(DEVICES, "train", {"trainer": ("weights", "optimizer", "gradients")}, 5.0):
        assert (engine.awake, trainer.awake) == (set(), {"weights", "optimizer", "gradients"})
    async with turns.acquire(DEVICES, "publish", {"engine": ("weights",), "trainer": ("weights",)}, 5.0):
        assert engine.awake == trainer.awake == {"weights"}


async def test_a_turn_that_does_not_come_is_an_error_at_its_deadline() -> None:
    turns, _, _ = colocated()
    async with turns.acquire(DEVICES, "train", {"trainer": ("weights",)}, 5.0):
        with pytest.raises(DeadlineExceeded, match="generate waited"):
            async with turns.acquire(DEVICES, "generate", {"engine": ("weights", "kv")}, 0.01):
                raise AssertionError("two had the devices")


async def test_who_shares_nothing_has_a_turn_at_once() -> None:
    turns, engine, _ = colocated()
    alone = Body("weights")
    turns.join("reference", frozenset({"gpu:7"}), alone)
    held = turns.acquire(DEVICES, "train", {"trainer": ("weights",)}, 5.0)
    async with held, turns.acquire(frozenset({"gpu:7"}), "forward", {"reference": ("weights",)}, 0.01):
        assert alone.awake == {"weights"} and not engine.awake


class BandOptions(Options):
    low: float = 0.1
    high: float = 0.4
    patience: int = 2


class Band(ScalingPolicy[BandOptions]):
    """One more engine while training waits for rows, one fewer while rollout is held; never for a single window."""

    def engines(self, history: tuple[Load, ...]) -> int:
        now, recent = history[-1], history[-self.options.patience :]
        if len(recent) < self.options.patience:
            return now.engines
        if now.free_devices and all(load.waiting_for_rows > self.options.high for load in recent):
            return now.engines + 1
        if now.engines > 1 and all(load.waiting_for_credit > self.options.high for load in recent):
            return now.engines - 1
        return now.engines


def load(rows: float, credit: float, free: int = 1, engines: int = 2) -> Load:
    return Load(engines, 1.0, rows, credit, free, 0.0)


@pytest.mark.parametrize(
    ("history", "wanted"),
    [
        ((load(0.9, 0.0),), 2),
        ((load(0.9, 0.0), load(0.9, 0.0)), 3),
        ((load(0.9, 0.0, free=0), load(0.9, 0.0, free=0)), 2),
        ((load(0.0, 0.9), load(0.0, 0.9)), 1),
        ((load(0.0, 0.9, engines=1), load(0.0, 0.9, engines=1)), 1),
        ((load(0.9, 0.0), load(0.0, 0.9)), 2),
    ],
)
def test_a_policy_is_a_function_of_what_was_measured(history: tuple[Load, ...], wanted: int) -> None:
    assert Band().engines(history) == wanted
