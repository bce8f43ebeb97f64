# SPDX-License-Identifier: Apache-2.0
"""The arbiter of devices: who has them, who sleeps, who is refused. Random members, deaths and slow sleepers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from relax_core.api.devices import OffloadPart
from relax_core.devices.scheduler import PARTS, DeviceCommand, DeviceRequest, DeviceScheduler

BOTH = frozenset({"gpu:0", "gpu:1"})
ENGINE: tuple[OffloadPart, ...] = ("weights", "kv")
TRAINER: tuple[OffloadPart, ...] = ("weights", "optimizer", "gradients")


class Stage:
    """An arbiter, and owners who do at once what they are told."""

    def __init__(self, **lives: frozenset[str]) -> None:
        self.arbiter, self.now = DeviceScheduler(), 0.0
        self.awake: dict[str, set[OffloadPart]] = {name: set(PARTS) for name in lives}
        self.told: list[DeviceCommand] = []
        for name, devices in lives.items():
            self.arbiter.join(name, name, devices, 0.0)

    def ask(
        self,
        turn: str,
        owner: str,
        devices: frozenset[str],
        holders: Mapping[str, tuple[OffloadPart, ...]],
        by: float = 9.0,
    ) -> str:
        in_the_way = self.arbiter.ask(DeviceRequest(turn, owner, devices, "train", holders, by), self.now)
        self.obey()
        return in_the_way

    def obey(self, but: Sequence[str] = ()) -> None:
        while orders := [order for order in self.arbiter.orders if order.name not in but]:
            self.arbiter.orders = [order for order in self.arbiter.orders if order.name in but]
            self.told += orders
            for order in orders:
                if order.what == "sleep":
                    self.awake[order.name] -= set(order.parts)
                elif order.what == "wake":
                    self.awake[order.name] |= set(order.parts)
                else:
                    continue
                self.arbiter.done(order.owner, order.number, 7, self.now)

    def news(self, turn: str) -> list[str]:
        return [order.what for order in self.told if order.name == turn]

    def orders_to(self, *names: str) -> list[tuple[str, str]]:
        return [(order.what, order.name) for order in self.told if order.name in names]


def test_a_turn_puts_others_to_sleep_before_it_wakes_its_holders() -> None:
    stage = Stage(rollout=BOTH, actor=BOTH)
    stage.ask("g", "rollout", BOTH, {"rollout": ENGINE})
    stage.arbiter.let_go("rollout", "g", 1.0)
    stage.told.clear()
    stage.ask("t", "actor", BOTH, {"actor": TRAINER})
    assert stage.orders_to("rollout", "actor") == [("sleep", "rollout"), ("wake", "actor")]
    assert stage.news("t") == ["granted"]
    assert (stage.awake["rollout"], stage.awake["actor"]) == (set(), set(TRAINER))
    assert stage.told[-1].freed_bytes == 7


def test_nobody_wakes_before_the_others_sleep() -> None:
    stage = Stage(rollout=BOTH, actor=BOTH)
    stage.ask("g", "rollout", BOTH, {"rollout": ENGINE})
    stage.arbiter.let_go("rollout", "g", 1.0)
    stage.arbiter.ask(DeviceRequest("t", "actor", BOTH, "train", {"actor": TRAINER}, 9.0), 1.0)
    assert [(order.what, order.name) for order in stage.arbiter.orders] == [("sleep", "rollout")]
    stage.obey()
    assert stage.news("t") == ["granted"]


def test_the_same_holder_again_costs_nothing() -> None:
    stage = Stage(rollout=BOTH, actor=BOTH)
    stage.ask("one", "rollout", BOTH, {"rollout": ENGINE})
    stage.arbiter.let_go("rollout", "one", 1.0)
    stage.told.clear()
    stage.ask("two", "rollout", BOTH, {"rollout": ENGINE})
    assert [order.what for order in stage.told] == ["granted"]


def test_who_holds_the_devices_is_told_once_that_they_are_wanted() -> None:
    stage = Stage(rollout=BOTH, actor=BOTH)
    stage.ask("g", "rollout", BOTH, {"rollout": ENGINE})
    assert stage.ask("t", "actor", BOTH, {"actor": TRAINER}) == "rollout (train)"
    stage.ask("f", "actor", frozenset({"gpu:0"}), {"actor": TRAINER})
    assert stage.news("g") == ["granted", "wanted"] and stage.news("t") == stage.news("f") == []
    stage.arbiter.let_go("rollout", "g", 1.0)
    stage.obey()
    assert stage.news("t") == ["granted", "wanted"] and stage.news("f") == []


def test_turns_on_other_devices_go_side_by_side_and_nobody_overtakes() -> None:
    stage = Stage(rollout=frozenset({"gpu:0"}), actor=BOTH, reference=frozenset({"gpu:1"}))
    stage.ask("g", "rollout", frozenset({"gpu:0"}), {"rollout": ENGINE})
    stage.ask("t", "actor", BOTH, {"actor": TRAINER})
    stage.ask("f", "reference", frozenset({"gpu:1"}), {"reference": ("weights",)})
    assert (stage.news("t"), stage.news("f")) == ([], [])  # gpu:1 is free, but the actor asked first
    stage.arbiter.gone(["actor"], 1.0)
    stage.obey()
    assert stage.news("f") == ["granted"]


def test_a_publish_goes_on_from_training_with_both_sides_awake() -> None:
    stage = Stage(rollout=BOTH, actor=BOTH)
    stage.ask("t", "actor", BOTH, {"actor": TRAINER})
    stage.ask("g", "rollout", BOTH, {"rollout": ENGINE})
    both: dict[str, tuple[OffloadPart, ...]] = {"actor": ("weights",), "rollout": ("weights",)}
    owing = stage.arbiter.become(DeviceRequest("t", "actor", BOTH, "publish", both, 9.0), 1.0)
    assert owing == "actor (has yet to sleep)"
    stage.obey()
    assert stage.awake == {"rollout": {"weights"}, "actor": {"weights"}}
    assert stage.news("t") == ["granted", "wanted", "granted"] and stage.news("g") == []


def test_a_request_ends_at_its_deadline_and_says_who_has_the_devices() -> None:
    stage = Stage(rollout=BOTH, actor=BOTH)
    stage.ask("t", "actor", BOTH, {"actor": TRAINER})
    stage.ask("g", "rollout", BOTH, {"rollout": ENGINE}, by=2.0)
    assert stage.arbiter.next_at() == 2.0
    stage.arbiter.heard("rollout", 2.0)
    stage.obey()
    assert (stage.told[-1].what, stage.told[-1].name, stage.told[-1].reason) == ("refused", "g", "actor (train)")


def test_a_slow_sleeper_is_named_and_its_end_frees_the_devices() -> None:
    stage = Stage(rollout=BOTH, actor=BOTH)
    stage.arbiter.ask(DeviceRequest("t", "actor", BOTH, "train", {"actor": TRAINER}, 2.0), 0.0)
    stage.obey(but=["rollout"])
    stage.arbiter.heard("actor", 2.0)
    assert stage.arbiter.orders[-1].reason == "rollout (has yet to sleep)"
    stage.arbiter.let_go("actor", "t", 2.0)
    stage.arbiter.gone(["rollout"], 3.0)
    stage.now = 3.0
    stage.ask("again", "actor", BOTH, {"actor": TRAINER})
    assert stage.news("again") == ["granted"]


def test_an_owner_that_is_silent_for_its_lease_loses_what_it_had() -> None:
    stage = Stage(rollout=BOTH, actor=BOTH)
    stage.ask("t", "actor", BOTH, {"actor": TRAINER})
    stage.arbiter.heard("rollout", 50.0)
    stage.now = 50.0
    stage.ask("g", "rollout", BOTH, {"rollout": ENGINE}, by=100.0)
    assert stage.news("g") == [] and stage.arbiter.next_at() == 60.0
    stage.arbiter.heard("rollout", 60.0)
    stage.obey()
    assert stage.news("g") == ["granted"] and stage.arbiter.owners == ("rollout",)


DEVICES = [f"gpu:{number}" for number in range(3)]
NAMES = st.sampled_from([f"m{number}" for number in range(4)])
SETS = st.frozensets(st.sampled_from(DEVICES), min_size=1)
HOLDING = st.dictionaries(NAMES, st.lists(st.sampled_from(sorted(PARTS)), unique=True).map(tuple), max_size=3)


class Devices(RuleBasedStateMachine):
    """Every owner has one member of its own name; who is told to sleep or wake does so some time later, or dies."""

    @initialize()
    def begin(self) -> None:
        self.arbiter, self.now = DeviceScheduler(lease_s=1e9), 0.0
        self.awake: dict[str, set[OffloadPart]] = {}
        self.lives: dict[str, frozenset[str]] = {}
        self.open: list[DeviceCommand] = []
        self.requests: dict[str, DeviceRequest] = {}
        self.until: dict[str, float] = {}
        """Of requests without an answer."""
        self.held: dict[str, frozenset[str]] = {}
        self.wanted: set[str] = set()
        self.late: set[str] = set()
        """Members that joined while somebody had their devices, and have yet to sleep."""

    def take(self) -> None:
        orders, self.arbiter.orders = self.arbiter.orders, []
        for order in orders:
            if order.what in ("sleep", "wake"):
                if order.what == "wake":  # from now on it may be awake
                    around = [other for other in self.open if self.lives[other.name] & self.lives[order.name]]
                    assert all(other.what == "wake" for other in around)
                    self.awake[order.name] |= set(order.parts)
                self.open.append(order)
            elif order.what == "wanted":
                assert order.name in self.held and order.name not in self.wanted
                self.wanted.add(order.name)
            else:
                self.until.pop(order.name)
                if order.what == "granted":
                    request = self.requests[order.name]
                    living = (self.lives[name] for name in request.holders if name in self.lives)
                    self.held[order.name] = request.devices.union(*living)

    @rule(name=NAMES, devices=SETS)
    def join(self, name: str, devices: frozenset[str]) -> None:
        if name in self.lives:
            return
        self.lives[name], self.awake[name] = devices, set(PARTS)
        self.late.add(name)
        self.arbiter.join(name, name, devices, self.now)
        self.take()

    @rule(name=NAMES, devices=SETS, holders=HOLDING, seconds=st.integers(1, 50), data=st.data())
    def ask(
        self,
        name: str,
        devices: frozenset[str],
        holders: dict[str, tuple[OffloadPart, ...]],
        seconds: int,
        data: st.DataObject,
    ) -> None:
        if name not in self.lives or any(turn.startswith(name) for turn in (*self.until, *self.held)):
            return
        turn = f"{name}/{len(self.requests)}"
        self.requests[turn] = DeviceRequest(turn, name, devices, "train", holders, float(seconds))
        self.until[turn] = self.now + seconds
        self.arbiter.ask(self.requests[turn], self.now)
        self.take()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def obey(self, data: st.DataObject) -> None:
        order = data.draw(st.sampled_from(self.open))
        self.open.remove(order)
        if order.what == "sleep":
            self.awake[order.name] -= set(order.parts)
            self.late.discard(order.name)
        for _ in range(data.draw(st.integers(1, 2))):  # its answer may be told twice
            self.arbiter.done(order.owner, order.number, 1, self.now)
        self.take()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[turn]
        self.arbiter.let_go(self.requests[turn].owner, turn, self.now)
        self.take()

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.lives)))
        del self.lives[name], self.awake[name]
        self.late.discard(name)
        self.open = [order for order in self.open if order.owner != name]
        for turns in (self.held, self.until):
            for turn in [turn for turn in turns if turn.startswith(f"{name}/")]:
                del turns[turn]
        self.arbiter.gone([name], self.now)
        self.take()

    @rule(seconds=st.integers(1, 30))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        for name in self.lives:
            self.arbiter.heard(name, self.now)
        refused = [order.name for order in self.arbiter.orders if order.what == "refused"]
        self.take()
        for turn in refused:
            self.arbiter.let_go(self.requests[turn].owner, turn, self.now)
        self.take()

    @invariant()
    def turns_never_overlap(self) -> None:
        held = list(self.held.values())
        assert sum(map(len, held)) == len(frozenset().union(*held))

    @invariant()
    def in_a_turn_only_its_holders_parts_are_awake(self) -> None:
        for turn, devices in self.held.items():
            holders = self.requests[turn].holders
            for name in self.lives.keys() - self.late:
                if self.lives[name] & devices:
                    assert self.awake[name] <= set(holders.get(name, ())), (turn, name)
                if self.lives[name] <= devices:
                    assert self.awake[name] >= set(holders.get(name, ())), (turn, name)

    @invariant()
    def every_request_is_answered_by_its_deadline(self) -> None:
        if self.lives:
            assert all(deadline > self.now for deadline in self.until.values())

    @invariant()
    def whoever_keeps_others_waiting_is_told(self) -> None:
        for turn in self.until:
            keepers = {name for name, devices in self.held.items() if devices & self.requests[turn].devices}
            assert keepers <= self.wanted

    @invariant()
    def nobody_waits_for_free_devices(self) -> None:
        if not self.open and not self.held:
            assert not self.until


TestDevices = Devices.TestCase
TestDevices.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
