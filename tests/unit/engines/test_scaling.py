# SPDX-License-Identifier: Apache-2.0
"""The scaling of a pool as a state machine: what is asked is done or undone, and no protected engine ever leaves."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relax_core.api import ConfigError
from relax_core.api.run_commands import ScaleRequest
from relax_core.engines.scaling import JOINING, Action, CancelJoin, Join, Leave, PoolScaling, Step

START = ("engine-0", "engine-1")
ADDRESS, SECOND = "127.0.0.1:8701", "127.0.0.1:8702"


def ask(scaling: PoolScaling, target: int | None = None, key: str = "k", **more: object) -> list[Action]:
    return scaling.ask(ScaleRequest(key, target=target, **more), 1.0)[1]  # type: ignore[arg-type]


def join(scaling: PoolScaling, *engines: str) -> list[Action]:
    """Take engines through all steps of a join."""
    return [action for engine in engines for step in JOINING[1:] for action in scaling.on_step(engine, step, 2.0)]


def leave(scaling: PoolScaling, *engines: str) -> None:
    for engine in engines:
        scaling.on_step(engine, "removing", 3.0)
        scaling.on_step(engine, "completed", 3.0)


def grown(target: int, protected: int = 2) -> PoolScaling:
    """Return a pool that has grown from the two engines of its start."""
    scaling = PoolScaling("rollout", START, protected)
    join(scaling, *(action.engine for action in ask(scaling, target, "grown")))
    return scaling


def test_an_operation_has_the_state_of_its_slowest_engine() -> None:
    scaling = PoolScaling("rollout", START, 2)
    assert ask(scaling, 4) == [Join("engine-2", 2), Join("engine-3", 3)]
    (operation,) = scaling.operations
    seen = [scaling.operations[operation].state]
    for engine, step in (("engine-2", "weight_syncing"), ("engine-3", "creating"), ("engine-2", "active")):
        scaling.on_step(engine, step, 2.0)  # type: ignore[arg-type]
        seen.append(scaling.operations[operation].state)
    assert seen == ["pending", "pending", "creating", "creating"]
    assert scaling.engines == [*START, "engine-2"]
    join(scaling, "engine-3")
    assert scaling.operations[operation].state == "active" and scaling.target == 4
    scaling.on_step("engine-2", "creating", 9.0)
    times = scaling.operations[operation].times
    assert times == {"pending": 1.0, **dict.fromkeys(("creating", "health_checking", "weight_syncing", "active"), 2.0)}


def test_the_newest_engines_leave_first_and_their_names_are_not_used_again() -> None:
    scaling = grown(5)
    assert ask(scaling, 3) == [Leave("engine-4"), Leave("engine-3")]
    leave(scaling, "engine-3", "engine-4")
    assert [one.state for one in scaling.operations.values()] == ["active", "completed"]
    assert ask(scaling, 4, "more") == [Join("engine-5", 5)]


def test_an_engine_that_can_not_join_takes_the_others_of_its_operation_with_it() -> None:
    scaling = PoolScaling("rollout", START, 2)
    ask(scaling, 5)
    join(scaling, "engine-2")
    assert scaling.on_step("engine-3", "failed", 2.0, "engine-3: no memory") == [
        Leave("engine-2"), CancelJoin("engine-4"),
    ]  # fmt: skip
    leave(scaling, "engine-2")
    scaling.on_step("engine-4", "completed", 3.0)
    (operation,) = scaling.operations.values()
    assert (operation.state, operation.detail, scaling.engines) == ("failed", "engine-3: no memory", list(START))
    assert scaling.target == 2


def test_the_last_engine_that_can_not_join_rolls_back_those_that_have_joined() -> None:
    scaling = PoolScaling("rollout", START, 2)
    ask(scaling, 4)
    join(scaling, "engine-2")
    assert scaling.on_step("engine-3", "failed", 2.0, "why") == [Leave("engine-2")]
    assert scaling.open is not None and scaling.open.state == "draining"


def test_with_keep_partial_the_engines_that_joined_stay() -> None:
    scaling = PoolScaling("rollout", START, 2)
    ask(scaling, 4, keep_partial=True)
    assert scaling.on_step("engine-2", "failed", 2.0, "why") == []
    assert join(scaling, "engine-3") == []
    (operation,) = scaling.operations.values()
    assert (operation.state, operation.detail, scaling.target) == ("partial", "why", 3)


def test_a_cancelled_operation_takes_back_an_engine_that_joined_at_the_same_time() -> None:
    scaling = PoolScaling("rollout", START, 2)
    ask(scaling, 3)
    assert scaling.ask(ScaleRequest("", cancel="rollout-1"), 2.0)[1] == [CancelJoin("engine-2")]
    assert scaling.ask(ScaleRequest("", cancel="rollout-1"), 2.0)[1] == [], "asked again"
    assert scaling.on_step("engine-2", "active", 2.0) == [Leave("engine-2")]
    leave(scaling, "engine-2")
    assert scaling.operations["rollout-1"].state == "cancelled" and scaling.engines == list(START)


def test_a_repeated_key_gets_its_operation_and_an_equal_target_changes_nothing() -> None:
    scaling = PoolScaling("rollout", START, 2)
    first, actions = scaling.ask(ScaleRequest("a", target=3), 1.0)
    assert scaling.ask(ScaleRequest("a", target=3), 2.0) == (first, []) and len(actions) == 1
    same, _ = scaling.ask(ScaleRequest("b", target=3), 2.0)
    assert (same.state, same.detail) == ("noop", "operation rollout-1 has the same target")
    join(scaling, "engine-2")
    there, _ = scaling.ask(ScaleRequest("c", target=3), 2.0)
    assert (there.state, there.detail) == ("noop", "the pool has 3 engines")


@pytest.mark.parametrize(
    ("request_", "wrong"),
    [
        (ScaleRequest("k", target=1), "target: got 1; .* keeps its first 2 engines: give 2 to 1024"),
        (ScaleRequest("k", target=9999), "target: got 9999"),
        (ScaleRequest("k"), "target: got None"),
        (ScaleRequest("k", engine="engine-1"), "engine-1, which is protected; .* that may leave: engine-2, engine-3"),
        (ScaleRequest("k", engine="engine-9"), "engine: got engine-9; name an engine of the pool rollout: engine-0, "),
        (
            ScaleRequest("k", node="10.0.0.7"),
            "node: got 10.0.0.7; name a node with engines .* rollout: 10.0.0.1, 10.0.0.2",
        ),
        (
            ScaleRequest("k", node="10.0.0.1"),
            "10.0.0.1, which has only protected engines .*: engine-0; the first 2 .* stay",
        ),
        (ScaleRequest("two words", target=5), "key: got 'two words'"),
        (ScaleRequest("grown", target=5), "key: got the key of operation rollout-1, .*; send a new key"),
        (ScaleRequest("k", cancel="rollout-1"), "cancel: got rollout-1, which is active"),
        (ScaleRequest("k", cancel="rollout-7"), "cancel: got rollout-7; name an operation .*: rollout-1"),
    ],
)
def test_a_request_that_can_not_be_done_is_refused_with_the_field_the_value_and_the_fix(
    request_: ScaleRequest, wrong: str
) -> None:
    scaling = grown(4)
    scaling.nodes = {"engine-0": "10.0.0.1", "engine-1": "10.0.0.2", "engine-2": "10.0.0.2", "engine-9": "10.0.0.7"}
    before = json.dumps(scaling.plain())
    with pytest.raises(ConfigError, match=wrong):
        scaling.ask(request_, 9.0)
    assert json.dumps(scaling.plain()) == before


def test_a_busy_pool_refuses_another_operation_and_a_leave_is_not_cancelled() -> None:
    scaling = grown(4)
    ask(scaling, engine="engine-2")
    with pytest.raises(ConfigError, match=r"operation: got rollout-2, which is draining in the pool rollout; wait"):
        ask(scaling, 5, "other")
    with pytest.raises(ConfigError, match="an engine that leaves can't be called back"):
        scaling.ask(ScaleRequest("", cancel="rollout-2"), 2.0)


def test_a_pool_that_can_not_scale_refuses_with_its_reason() -> None:
    scaling = PoolScaling("rollout", START, 2, refusal=("deterministic", "true", "set it to false"))
    with pytest.raises(ConfigError, match="deterministic: got true; set it to false"):
        ask(scaling, 3)


@pytest.mark.parametrize(
    ("asked", "actions", "state", "detail"),
    [
        (ScaleRequest("k", target=6), ["engine-6", "engine-7", "engine-8", "engine-9"], "pending", "done again after"),
        (ScaleRequest("k", target=2), [], "completed", "restarted with 2 engines"),
        (ScaleRequest("k", engine="engine-2"), ["engine-4"], "pending", "done again after a restart"),
    ],
)
def test_an_open_operation_is_finished_after_a_restart(
    asked: ScaleRequest, actions: Sequence[str], state: str, detail: str
) -> None:
    """Every engine that had joined is gone, also one that is to stay."""
    scaling = grown(4)
    scaling.ask(asked, 5.0)
    again = PoolScaling("rollout", START, 2)
    assert [action.engine for action in again.restored(json.loads(json.dumps(scaling.plain())), 6.0)] == actions
    operation = again.operations["rollout-2"]
    assert operation.state == state and detail in operation.detail
    join(again, *actions)
    assert again.open is None and len(again.engines) == again.target == operation.target


def test_a_rolled_back_operation_is_over_after_a_restart_and_the_pool_grows_to_what_it_had() -> None:
    scaling = grown(3)
    ask(scaling, 5)
    scaling.on_step("engine-3", "failed", 2.0, "why")
    again = PoolScaling("rollout", START, 2)
    assert again.restored(json.loads(json.dumps(scaling.plain())), 6.0) == [Join("engine-5", 5)]
    failed, returning = list(again.operations.values())[1:]
    assert (failed.state, failed.detail) == ("failed", "why; rolled back by a restart of the pool")
    assert (returning.target, returning.detail) == (3, "the pool was restarted: it returns to 3 engines")


def elsewhere(**more: object) -> PoolScaling:
    """Return a pool with one engine that joined from elsewhere."""
    scaling = PoolScaling("rollout", START, 2, addresses=[ADDRESS, "127.0.0.1:8702"], **more)  # type: ignore[arg-type]
    assert ask(scaling, key="joined", address=ADDRESS) == [Join("engine-2", 2, ADDRESS)]
    join(scaling, "engine-2")
    return scaling


def test_an_engine_from_elsewhere_joins_a_pool_that_can_not_start_engines_and_leaves_it() -> None:
    scaling = elsewhere(refusal=("placement", "engines on gpu:0", "the run has no further GPU"))
    (operation,) = scaling.operations.values()
    assert (operation.state, operation.target, operation.address) == ("active", 3, ADDRESS)
    assert (scaling.engines, scaling.external, scaling.target) == ([*START, "engine-2"], {"engine-2": ADDRESS}, 2)
    with pytest.raises(ConfigError, match="the run has no further GPU"):
        ask(scaling, 4)
    assert ask(scaling, key="gone", engine="engine-2") == [Leave("engine-2")]
    leave(scaling, "engine-2")
    assert (scaling.engines, scaling.external, scaling.target) == ([*START], {}, 2)


def test_an_engine_from_elsewhere_that_is_lost_is_no_longer_in_the_pool() -> None:
    scaling = elsewhere()
    ask(scaling, 4)
    assert scaling.on_step("engine-2", "failed", 5.0, "it died") == []
    assert (scaling.engines, scaling.external) == ([*START], {})
    join(scaling, "engine-3")
    assert scaling.engines == [*START, "engine-3"] and scaling.target == 3
    assert ask(scaling, key="again", address=ADDRESS) == [Join("engine-4", 4, ADDRESS)]


@pytest.mark.parametrize(
    ("address", "wrong"),
    [
        ("127.0.0.1:1", "address: got 127.0.0.1:1; the run allows 127.0.0.1:8701, 127.0.0.1:8702: list the address in"),
        (
            ADDRESS,
            "engine: got engine-2, which is at 127.0.0.1:8701 already; wait until .*: relax scale --drain engine-2",
        ),
    ],
)
def test_an_address_that_can_not_join_is_refused(address: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        ask(elsewhere(), address=address)
    with pytest.raises(ConfigError, match="the run allows none: list the address in placement.rollout.external"):
        ask(PoolScaling("rollout", START, 2), address=address)


def test_a_busy_pool_takes_no_other_address_and_a_key_has_one_address() -> None:
    scaling = elsewhere()
    ask(scaling, key="two", address="127.0.0.1:8702")
    assert ask(scaling, key="two", address="127.0.0.1:8702") == []
    with pytest.raises(ConfigError, match="key: got the key of operation rollout-2"):
        ask(scaling, key="two", address=ADDRESS)
    with pytest.raises(ConfigError, match="operation: got rollout-2, which is pending"):
        ask(scaling, 4, "other")


def test_engines_from_elsewhere_join_and_leave_in_one_operation_or_not_at_all_within_its_time() -> None:
    scaling = PoolScaling("rollout", START, 2, addresses=[ADDRESS, SECOND])
    both = ask(scaling, address=f"{SECOND},{ADDRESS},{SECOND}", timeout_s=30.0)
    assert both == [Join("engine-2", 2, SECOND), Join("engine-3", 3, ADDRESS)]
    join(scaling, "engine-3")
    assert scaling.expire(31.0) == [] and scaling.external == {"engine-3": ADDRESS}
    assert scaling.expire(31.5) == [CancelJoin("engine-2"), Leave("engine-3")] and scaling.expire(99.0) == []
    leave(scaling, "engine-2", "engine-3")
    (late,) = scaling.operations.values()
    assert (late.state, late.detail, scaling.engines, scaling.external) == (
        "failed",
        "not done within 30 s",
        [*START],
        {},
    )
    join(
        scaling, *(action.engine for action in ask(scaling, key="again", address=f"{ADDRESS},{SECOND}", timeout_s=30.0))
    )
    assert scaling.external == {"engine-4": ADDRESS, "engine-5": SECOND} and scaling.expire(99.0) == []
    assert ask(scaling, key="go", engine="engine-5,engine-4", timeout_s=30.0) == [Leave("engine-5"), Leave("engine-4")]
    assert scaling.expire(99.0) == [], "an engine that leaves has its own deadlines"
    with pytest.raises(ConfigError, match="engine: got engine-0, which is protected"):
        ask(PoolScaling("rollout", START, 1), engine="engine-1,engine-0")


@pytest.mark.parametrize(
    ("asked", "state", "detail"),
    [
        ({"address": "127.0.0.1:8702"}, "failed", "the engine must ask again to join"),
        ({"engine": "engine-2"}, "completed", "the pool was restarted with 2 engines"),
        ({"target": 4}, "pending", "done again after a restart"),
    ],
)
def test_engines_from_elsewhere_do_not_count_after_a_restart(asked: dict[str, object], state: str, detail: str) -> None:
    scaling = elsewhere()
    ask(scaling, **asked)  # type: ignore[arg-type]
    again = PoolScaling("rollout", START, 2)
    actions = again.restored(json.loads(json.dumps(scaling.plain())), 6.0)
    assert [action.engine for action in actions] == (["engine-4"] if "target" in asked else [])
    operation = again.operations["rollout-2"]
    assert operation.state == state and detail in operation.detail
    join(again, *(action.engine for action in actions))
    assert len(again.engines) == again.target == (3 if "target" in asked else 2)


class Scaling(RuleBasedStateMachine):
    """A pool whose engines join, fail and leave in any order, while requests, cancels and restarts come at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling = PoolScaling("rollout", START, 1, addresses=[ADDRESS, SECOND])
        self.joining: set[str] = set()
        """Engines that are being started, or are stopped before they have joined."""
        self.serving, self.leaving, self.names = set(START), set[str](), set(START)
        self.keys = 0

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Join):
                assert action.engine not in self.names, "a name is used once"
                assert int(action.engine.rpartition("-")[2]) == action.number
                self.names.add(action.engine)
                self.joining.add(action.engine)
            elif isinstance(action, Leave):
                assert action.engine in self.serving and action.engine != "engine-0"
                self.serving.remove(action.engine)
                self.leaving.add(action.engine)
            else:
                assert action.engine in self.joining

    def step(self, engine: str, step: Step) -> None:
        self.perform(self.scaling.on_step(engine, step, 1.0, "why"))

    @rule(count=st.integers(0, 5), keep=st.booleans())
    def ask(self, count: int, keep: bool) -> None:
        self.keys += 1
        try:
            self.perform(ask(self.scaling, count, f"key-{self.keys}", keep_partial=keep))
        except ConfigError:
            assert count < 1 or self.scaling.open is not None

    @rule(address=st.sampled_from([ADDRESS, SECOND, f"{ADDRESS},{SECOND}"]), timeout_s=st.sampled_from([0.0, 1.0]))
    def ask_from_elsewhere(self, address: str, timeout_s: float) -> None:
        self.keys += 1
        try:
            self.perform(ask(self.scaling, None, f"key-{self.keys}", address=address, timeout_s=timeout_s))
        except ConfigError:
            assert self.scaling.open is not None or self.scaling.external

    @precondition(lambda self: self.serving.intersection(self.scaling.external))
    @rule()
    def lose(self) -> None:
        engine = min(self.serving.intersection(self.scaling.external))
        self.serving.remove(engine)
        self.step(engine, "failed")

    @rule()
    def expire(self) -> None:
        self.perform(self.scaling.expire(2.5))
        left = self.scaling.open
        assert left is None or not left.timeout_s or left.undone

    @rule(numbers=st.sets(st.integers(0, 8), min_size=1, max_size=2))
    def drain(self, numbers: set[int]) -> None:
        self.keys += 1
        engines = [f"engine-{number}" for number in numbers]
        try:
            self.perform(ask(self.scaling, None, f"key-{self.keys}", engine=",".join(engines)))
        except ConfigError:
            assert 0 in numbers or not self.serving.issuperset(engines) or self.scaling.open is not None

    @rule(numbers=st.sets(st.integers(0, 8)), refill=st.booleans())
    def end_a_machine(self, numbers: set[int], refill: bool) -> None:
        self.perform(self.scaling.vacate([f"engine-{number}" for number in sorted(numbers)], 1.0, refill=refill))

    @rule()
    def refill(self) -> None:
        self.perform(self.scaling.refill(1.0))
        assert self.scaling.open is not None or self.scaling.target == len(self.serving) - len(self.scaling.external)

    @precondition(lambda self: self.scaling.open is not None)
    @rule()
    def cancel(self) -> None:
        operation = self.scaling.open
        assert operation is not None
        try:
            self.perform(self.scaling.ask(ScaleRequest("", cancel=operation.id), 1.0)[1])
        except ConfigError:
            assert operation.undone == "failed" or operation.target < operation.before

    @precondition(lambda self: bool(self.joining))
    @rule(which=st.randoms(), step=st.sampled_from([*JOINING[1:], "active", "failed", "completed"]))
    def advance(self, which: object, step: Step) -> None:
        engine = which.choice(sorted(self.joining))  # type: ignore[attr-defined]
        operation = self.scaling.open
        assert operation is not None, "an engine joins only for an operation"
        cancelled = operation.engines[engine] in ("draining", "removing")
        if step == "completed" and not cancelled:
            return
        if step == "active":
            self.joining.remove(engine)
            self.serving.add(engine)
        elif step in ("failed", "completed"):
            self.joining.remove(engine)
        self.step(engine, step)

    @precondition(lambda self: bool(self.leaving))
    @rule(which=st.randoms(), step=st.sampled_from(["draining", "removing", "completed"]))
    def go(self, which: object, step: Step) -> None:
        engine = which.choice(sorted(self.leaving))  # type: ignore[attr-defined]
        if step == "completed":
            self.leaving.remove(engine)
        self.step(engine, step)

    @rule(number=st.integers(0, 8), step=st.sampled_from(["creating", "active", "removing", "completed", "failed"]))
    def hear_of_an_engine_that_is_not_moving(self, number: int, step: Step) -> None:
        if (engine := f"engine-{number}") not in self.joining | self.leaving | set(self.scaling.external):
            before = self.scaling.plain()
            self.step(engine, step)
            assert self.scaling.plain() == before

    @rule()
    def restart(self) -> None:
        document = json.loads(json.dumps(self.scaling.plain()))
        wanted, operation = self.scaling.target, self.scaling.open
        if operation is not None and not (operation.undone or operation.address or operation.refill):
            wanted = max(operation.target - len(self.serving.intersection(self.scaling.external)), 1)
        self.scaling = PoolScaling("rollout", START, 1, addresses=[ADDRESS, SECOND])
        self.joining, self.serving, self.leaving = set(), set(START), set()
        self.perform(self.scaling.restored(document, 1.0))
        assert len(self.serving | self.joining) == wanted

    @invariant()
    def nothing_is_forgotten_and_nothing_moves_without_an_operation(self) -> None:
        scaling, operation = self.scaling, self.scaling.open
        assert set(scaling.engines) == self.serving | self.leaving
        assert "engine-0" in scaling.engines
        assert sum(one.open for one in scaling.operations.values()) <= 1
        if operation is None:
            assert not (self.joining or self.leaving)
            assert scaling.target >= len(scaling.engines) - len(scaling.external)
        else:
            moving = {name for name, step in operation.engines.items() if step not in ("active", "completed", "failed")}
            assert moving == self.joining | self.leaving
        assert PoolScaling.of(json.loads(json.dumps(scaling.plain()))).plain() == json.loads(
            json.dumps(scaling.plain())
        )


Scaling.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestScaling = Scaling.TestCase


def test_all_engines_of_a_node_leave_in_one_operation_except_protected_ones() -> None:
    scaling = grown(5)
    scaling.nodes = dict.fromkeys(("engine-1", "engine-2", "engine-4"), "10.0.0.2") | {"engine-0": "10.0.0.1"}
    copy = PoolScaling.of(json.loads(json.dumps(scaling.plain())))
    request = ScaleRequest("node", node="10.0.0.2")
    operation, actions = scaling.ask(request, 2.0)
    assert copy.ask(request, 2.0)[1] == actions == [Leave("engine-2"), Leave("engine-4")]
    assert (operation.target, operation.node) == (3, "10.0.0.2")
    assert scaling.ask(request, 3.0) == (operation, []), "a repeated key"
    assert ask(scaling, node="10.0.0.2", key="twice") == [], "asked by somebody else too"
    with pytest.raises(ConfigError, match="rollout-2, which is draining"):
        ask(scaling, 3, "busy")
    with pytest.raises(ConfigError, match="key of operation rollout-2, which asks for something else"):
        ask(scaling, node="10.0.0.1", key="node")
    leave(scaling, "engine-2", "engine-4")
    assert scaling.operations[operation.id].state == "completed" and scaling.engines == [*START, "engine-3"]


def test_a_pool_of_a_fixed_size_drains_only_the_external_engines_of_a_node() -> None:
    scaling = PoolScaling(
        "rollout", START, 1, refusal=("placement", "engines on gpu:0", "use CPUs"), addresses=[ADDRESS]
    )
    scaling.nodes = dict.fromkeys((*START, "engine-2"), "127.0.0.1")
    ask(scaling, address=ADDRESS)
    join(scaling, "engine-2")
    with pytest.raises(ConfigError, match="placement: got engines on gpu:0"):
        ask(scaling, node="127.0.0.1", key="all")
    scaling.nodes["engine-1"] = "10.0.0.1"
    assert ask(scaling, node="127.0.0.1", key="external") == [Leave("engine-2")]


@pytest.mark.parametrize("refill", [True, False])
def test_the_engines_of_a_machine_that_ends_leave_together_when_no_operation_is_open(refill: bool) -> None:
    scaling = grown(5)
    ask(scaling, 6, "more")
    there = ["engine-1", "engine-2", "engine-4", "elsewhere"]
    assert scaling.vacate(there, 4.0, refill=refill) == scaling.refill(4.0) == [], "an operation is open"
    join(scaling, "engine-5")
    left = scaling.vacate(there, 4.0, refill=refill)
    assert left == [Leave("engine-2"), Leave("engine-4")], "engine-1 is protected"
    assert scaling.vacate(there, 5.0, refill=refill) == scaling.refill(5.0) == []
    leave(scaling, "engine-2", "engine-4")
    (*_, operation) = scaling.operations.values()
    assert (operation.state, operation.target, operation.detail) == ("completed", 4, "a machine is about to end")
    assert scaling.engines == [*START, "engine-3", "engine-5"] and scaling.target == (6 if refill else 4)
    assert scaling.vacate(there, 6.0, refill=refill) == [] and scaling.open is None
    assert scaling.refill(6.0) == ([Join("engine-6", 6), Join("engine-7", 7)] if refill else [])


def vacated() -> PoolScaling:
    """Return a pool of two engines that is to have four again, because a machine ended."""
    scaling = grown(4)
    scaling.vacate(["engine-2", "engine-3"], 4.0, refill=True)
    leave(scaling, "engine-2", "engine-3")
    return scaling


def test_a_pool_that_finds_no_room_elsewhere_stays_smaller() -> None:
    scaling = vacated()
    assert scaling.refill(5.0) == [Join("engine-4", 4), Join("engine-5", 5)]
    join(scaling, "engine-4")
    assert scaling.on_step("engine-5", "failed", 6.0, "no room") == []
    (*_, operation) = scaling.operations.values()
    assert (operation.state, scaling.target) == ("partial", 3)
    assert operation.detail == "in place of engines whose machine ends; no room"
    assert scaling.refill(7.0) == []


@pytest.mark.parametrize("target", [2, 3])
def test_a_person_who_scales_before_the_refill_decides(target: int) -> None:
    scaling = vacated()
    join(scaling, *(action.engine for action in ask(scaling, target, "person")))
    assert scaling.refill(6.0) == [] and scaling.target == target


def test_a_pool_whose_machine_ends_is_busy_for_a_person() -> None:
    scaling = grown(4)
    scaling.vacate(["engine-2"], 4.0, refill=True)
    with pytest.raises(ConfigError, match="operation: got rollout-2, which is draining"):
        ask(scaling, 3, "person")


@pytest.mark.parametrize("done", [True, False])
def test_a_pool_that_restarts_while_its_machine_ends_has_all_engines_again(done: bool) -> None:
    scaling = grown(4)
    scaling.vacate(["engine-2", "engine-3"], 4.0, refill=True)
    if done:
        leave(scaling, "engine-2", "engine-3")
    document = json.loads(json.dumps(scaling.plain()))
    again = PoolScaling("rollout", START, 2)
    assert again.restored(document, 5.0) == [Join("engine-4", 4), Join("engine-5", 5)]
    *_, ended, operation = again.operations.values()
    assert (ended.state, operation.target) == ("completed", 4)
