# SPDX-License-Identifier: Apache-2.0
"""The router under engines that die, stall, come back, refuse and lie at any moment.

Each engine here samples the last token plus one, so that what a request got from several of them can be read off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from relax_core.api.engine import Delta, FinishReason, GenerateRequest
from relax_core.api.weights import Version
from relax_core.engines.engine_state import EngineState, EngineStatus, PrefixAffinity, response_fault
from relax_core.engines.kv_ledger import KvLedger
from relax_core.engines.requests import PendingRequest
from relax_core.engines.router import (
    MAX_ABORTS,
    AbortRequest,
    Action,
    CompleteRequest,
    Dispatch,
    Quarantine,
    RequestLimits,
    Router,
)

VOCABULARY, CONTEXT = 1000, 64
LIMITS = RequestLimits(timeout_s=50.0, per_engine=3, backlog=4, silence_s=20.0)
NAMES = ("a", "b", "c")
Lie = Callable[[Delta], Delta]
LIES: dict[str, Lie] = {
    "an id that it does not run": lambda d: Delta("nobody", d.tokens, d.log_probs, d.version, d.oldest_cache),
    "a token outside the vocabulary": lambda d: Delta(d.id, (VOCABULARY,), (-1.0,), d.version, d.oldest_cache),
    "a negative token": lambda d: Delta(d.id, (-1,), (-1.0,), d.version, d.oldest_cache),
    "a log-prob too few": lambda d: Delta(d.id, d.tokens, d.log_probs[1:], d.version, d.oldest_cache),
    "a log-prob that is no number": lambda d: Delta(d.id, (1,), (math.nan,), d.version, d.oldest_cache),
    "a probability above one": lambda d: Delta(d.id, (1,), (0.5,), d.version, d.oldest_cache),
    "weights that it never had": lambda d: Delta(d.id, d.tokens, d.log_probs, d.version + 99, d.oldest_cache),
    "weights older than it proved": lambda d: Delta(d.id, d.tokens, d.log_probs, -1, -1),
    "more kept drafts than drafts": lambda d: replace(d, drafts=(3, 2)),
    "more cached tokens than the prompt has": lambda d: replace(d, cached=(3, 2)),
    "more tokens than asked for": lambda d: Delta(d.id, (1,) * 60, (-1.0,) * 60, d.version, d.oldest_cache),
}


def request(name: str, first: int, count: int, floor: int = -1) -> GenerateRequest:
    return GenerateRequest(name, (first,), count, floor=floor)


def asks(request: GenerateRequest, **more: Any) -> PendingRequest:
    return PendingRequest(request.tokens, request.max_new_tokens, id=request.id, group_floor=request.floor, **more)


def at(step: int, incarnation: int = 0) -> Version:
    return Version("actor", incarnation, step)


def honest(pending: GenerateRequest, count: int, step: int, finish: FinishReason = "") -> Delta:
    """Answer as an engine that was asked this."""
    tokens = tuple(pending.tokens[-1] + 1 + number for number in range(count))
    return Delta(pending.id, tokens, (-0.5,) * count, step, step, finish)


class Engines(RuleBasedStateMachine):
    """Everything that may happen to a pool, in any order."""

    @initialize(whole=st.booleans(), kv=st.sampled_from([0, 3, 8, 14, 40]), reserve=st.sampled_from([0.0, 0.5, 1.0]))
    def begin(self, whole: bool, kv: int, reserve: float) -> None:
        self.kv, self.reserve = 0 if whole else kv, reserve
        self.router = Router(map(EngineState, NAMES), replace(LIMITS, kv_tokens=kv, kv_reserve=reserve), whole)
        self.router.vocab_size, self.router.max_context = VOCABULARY, CONTEXT
        self.now, self.newest, self.numbers = 0.0, at(0), 0
        self.asked: dict[str, tuple[GenerateRequest, float]] = {}
        """Awaited requests, with the router's time at which they were asked."""
        self.runs: dict[str, dict[str, tuple[GenerateRequest, tuple[PendingRequest, ...]]]] = {
            name: {} for name in NAMES
        }
        """Requests that the processes run."""
        self.version = dict.fromkeys(NAMES, at(0))
        self.sampled: dict[str, list[tuple[int, int]]] = {}
        """(incarnation, step) of the weights that sampled each token of a request."""
        self.kept: dict[str, int] = {}
        """Number of tokens that a request had at its last dispatch."""
        self.out: set[str] = set()
        self.proved = {name: {at(0)} for name in NAMES}
        """Weights that each engine has proved."""
        for name in NAMES:
            assert self.router.on_proved(name, 0, at(0), 0.0)

    def do(self, actions: Sequence[Action | Dispatch]) -> None:
        for action in actions:
            match action:
                case CompleteRequest(pending):
                    asked, _ = self.asked.pop(pending.id)  # once, and only of what is awaited
                    self.check_answer(asked, pending)
                case Dispatch():
                    self.check_given(action)
                case AbortRequest(engine, ids):
                    assert ids, engine
                case Quarantine(engine):
                    assert engine not in self.out
                    self.out.add(engine)
                    self.runs[engine].clear()
                case _:
                    self.down = True
                    self.asked.clear()

    down = False

    def check_answer(self, asked: GenerateRequest, pending: PendingRequest) -> None:
        first = asked.tokens[-1] + 1
        assert pending.tokens == list(range(first, first + len(pending.tokens))), "tokens lost or twice"
        assert len(pending.tokens) == len(pending.log_probs) == len(pending.versions)
        told = list[tuple[int, int]]()
        for (start, incarnation), stop in zip(
            pending.incarnations, [*(start for start, _ in pending.incarnations[1:]), None], strict=False
        ):
            told += [(incarnation, step) for step in pending.versions[start:stop]]
        sampled = self.sampled.get(asked.id, [])
        assert told == sampled[: len(told)], "weights that did not sample it"
        assert pending.finish == "deadline" or len(told) == len(sampled), "tokens lost"
        assert dict(pending.newest(len(pending.tokens))) == {
            incarnation: max(step for own, step in told if own == incarnation) for incarnation, _ in told
        }
        assert min(pending.versions, default=asked.floor) >= asked.floor
        if pending.finish == "length":
            assert len(pending.tokens) == asked.max_new_tokens
        assert pending.finish in ("length", "deadline", "abort") or pending.error == "refused"

    def check_given(self, given: Dispatch) -> None:
        engine = self.router.engines[given.engine]
        assert engine.status is EngineStatus.SERVING
        assert not engine.holds
        assert not self.paused
        assert engine.failures == given.failures
        if not self.router.whole_batches:
            assert len(engine.running) <= LIMITS.per_engine
        assert not self.kv or engine.kv.running <= self.kv or len(engine.running) == 1, (
            "given more than its cache holds"
        )
        for pending in given.batch:
            assert all(pending.id not in runs for runs in self.runs.values()), "on two engines"
            wanted = pending.continuation()
            assert self.version[given.engine].step >= wanted.floor
            assert self.version[given.engine].incarnation == self.newest.incarnation, "weights that were given up"
            self.kept[wanted.id] = len(pending.tokens)
            self.sampled[wanted.id] = self.sampled.get(wanted.id, [])[: len(pending.tokens)]
            self.runs[given.engine][wanted.id] = wanted, given.batch

    paused = False

    @precondition(lambda self: not self.down)
    @rule(
        first=st.integers(0, 500), counts=st.lists(st.integers(1, 6), min_size=1, max_size=4), below=st.integers(0, 2)
    )
    def ask(self, first: int, counts: list[int], below: int) -> None:
        if not self.router.has_capacity(len(counts)):
            return
        made = []
        for count in counts:
            self.numbers += 1
            made.append(request(str(self.numbers), first, count, self.newest.step - below))
            self.asked[made[-1].id] = made[-1], self.router.active_time(self.now)
        pendings = [asks(one, session=int(one.id) % 5, group=first) for one in made]
        self.do(self.router.submit(pendings, self.now))

    @rule()
    def place(self) -> None:
        self.do(self.router.dispatch(self.now))

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 6), ends=st.booleans(), loads=st.booleans())
    def sample(self, name: str, count: int, ends: bool, loads: bool = False) -> None:
        if loads:
            self.publish({name}, False)
        engine, deltas = self.router.engines[name], []
        running = list(engine.running.values())
        for key, (asked, batch) in list(self.runs[name].items()):
            tokens = min(count, asked.max_new_tokens)
            over = tokens == asked.max_new_tokens
            version = self.version[name]
            deltas.append(honest(asked, tokens, version.step, "length" if over else "abort" if ends else ""))
            self.sampled[key] += [(version.incarnation, version.step)] * tokens
            if over or ends:
                del self.runs[name][key]
            else:
                rest = GenerateRequest(key, (*asked.tokens, *deltas[-1].tokens), asked.max_new_tokens - tokens)
                self.runs[name][key] = rest, batch
        if deltas:
            self.do(self.router.on_deltas(name, engine.failures, deltas, self.now))
            assert name not in self.out, "it was honest"
        for pending in running:
            new = pending.versions[self.kept[pending.id] :]
            assert set(new) <= {version.step for version in self.proved[name]}, "tokens of weights without proof"

    @rule(name=st.sampled_from(NAMES), lie=st.sampled_from(sorted(LIES)))
    def lie(self, name: str, lie: str) -> None:
        engine = self.router.engines[name]
        awaited = [asked for asked, _ in self.runs[name].values() if asked.id in self.asked]
        if awaited:
            told = LIES[lie](honest(awaited[0], 1, self.version[name].step))
            self.do(self.router.on_deltas(name, engine.failures, [told], self.now))
            assert name in self.out or self.down

    @rule(name=st.sampled_from(NAMES))
    def end_early(self, name: str) -> None:
        if self.runs[name]:
            _, batch = next(iter(self.runs[name].values()))
            self.do(self.router.on_stream_end(name, self.router.engines[name].failures, batch))

    @rule(name=st.sampled_from(NAMES))
    def refuse(self, name: str) -> None:
        if self.runs[name]:
            _, batch = next(iter(self.runs[name].values()))
            for key in [key for key, (_, own) in self.runs[name].items() if own is batch]:
                del self.runs[name][key]
            self.do(self.router.on_refused(name, self.router.engines[name].failures, batch, "refused"))

    @rule(name=st.sampled_from(NAMES), earlier=st.booleans())
    def die(self, name: str, earlier: bool) -> None:
        self.do(self.router.on_failure(name, self.router.engines[name].failures - earlier, "it died"))

    @rule(name=st.sampled_from(NAMES), well=st.booleans())
    def come_back(self, name: str, well: bool) -> None:
        if name not in self.out or self.down:
            return
        self.out.discard(name)
        if not well:
            self.do(self.router.on_restart_failed(name, "it did not come up"))
            return
        self.version[name] = self.newest
        self.router.on_loading(name, self.newest)
        assert not self.router.on_proved(name, self.router.engines[name].failures - 1, self.newest, self.now)
        assert self.router.engines[name].status is EngineStatus.OUT
        self.proved[name].add(self.newest)
        assert self.router.on_proved(name, self.router.engines[name].failures, self.newest, self.now)

    @rule(names=st.sets(st.sampled_from(NAMES)), proves=st.booleans())
    def publish(self, names: set[str], proves: bool) -> None:
        """Load new weights, with which engines sample at once; the proof may come later, or never."""
        self.newest = self.newest.next()
        self.router.on_published(self.newest)
        for name in names - self.out:
            self.prove(name)
            if self.version[name].incarnation != self.newest.incarnation:
                self.leave(name)
            self.router.on_loading(name, self.newest)
            self.version[name] = self.newest
            if proves:
                self.prove(name)

    @rule(name=st.sampled_from(NAMES))
    def prove(self, name: str) -> None:
        if name not in self.out and self.router.engines[name].loading:
            self.proved[name].add(self.version[name])
            self.do(self.router.on_loaded(name, self.version[name], self.now))
            assert self.router.on_proved(name, self.router.engines[name].failures, self.version[name], self.now)

    def leave(self, name: str) -> None:
        """End what an engine runs: at once with what it has, or as whole batches at their ends."""
        self.prove(name)
        self.router.preempt(name)
        while self.runs[name]:
            self.sample(name, 6, not self.router.whole_batches)

    @precondition(lambda self: not self.down)
    @rule(back=st.integers(0, 2))
    def roll_back(self, back: int) -> None:
        """The trainer is restored; requests with tokens that it gave up are cancelled, all others go on under new weights."""
        step = max(0, self.newest.step - back)
        lost = [
            key for key, (asked, _) in self.asked.items()
            if asked.floor > step or any(own > step for _, own in self.sampled.get(key, ()))
        ]  # fmt: skip
        for key in lost:
            del self.asked[key]
        self.do(self.router.cancel(lost))
        self.newest = at(step, self.newest.incarnation + 1)
        self.router.on_published(self.newest)

    @rule(name=st.sampled_from(NAMES), held=st.booleans())
    def hold(self, name: str, held: bool) -> None:
        if name in self.out:
            return
        if held:
            self.router.hold(name, "updating")
            self.router.preempt(name)
        else:
            self.router.release(name, "updating", self.now)

    @rule()
    def pause(self) -> None:
        self.router.pause(self.now)
        self.paused = True

    @rule()
    def resume(self) -> None:
        self.router.resume(self.now)
        self.paused = False

    @rule(seconds=st.floats(0.0, 30.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.router.tick(self.now))
        time = self.router.active_time(self.now)
        assert all(time < since + LIMITS.timeout_s for _, since in self.asked.values()), "late"

    @rule(number=st.integers(0, 50))
    def forget(self, number: int) -> None:
        if str(number) in self.asked:
            del self.asked[str(number)]
            self.do(self.router.cancel([str(number)]))

    @invariant()
    def what_is_open_is_what_is_awaited_and_bounded(self) -> None:
        if not hasattr(self, "router") or self.down:
            return
        assert bool(self.router.num_open) == bool(self.asked)
        assert len(self.asked) <= max(4, LIMITS.backlog + LIMITS.per_engine * len(NAMES))
        for name, engine in self.router.engines.items():
            assert engine.kv.left == sum(pending.tokens_left for pending in engine.running.values()) >= 0
            self.check_ledger(engine)
            assert (engine.status is EngineStatus.OUT) == (name in self.out)
            ended = {key for key, held in engine.held.items() if held[-1].finish}
            assert set(engine.running) - ended == set(self.runs[name])
            assert set(engine.held) <= set(engine.running)

    def check_ledger(self, engine: EngineState) -> None:
        """The account is what the engine runs, no idle session is counted beyond the cache, and none outlives it."""
        kv, running = engine.kv, engine.running.values()
        assert kv.held == sum(len(pending.prompt) + len(pending.tokens) for pending in running)
        assert kv.idle_tokens == sum(kv.idle.values())
        assert set(kv._active) == ({pending.session for pending in running} if self.kv else set())
        assert not kv.idle or self.reserve < 1 or kv.running + kv.idle_tokens <= self.kv
        if engine.status is EngineStatus.OUT:
            assert not kv.idle
            assert not kv.running
        if self.kv and self.reserve == 1 and len(running) > 1:
            assert kv.running <= self.kv

    def teardown(self) -> None:
        if not hasattr(self, "router") or self.down:
            return
        self.resume()
        for name in NAMES:
            self.hold(name, False)
            self.come_back(name, True)
        self.publish(set(NAMES), True)
        for _ in range(2 * len(self.asked) + 9):
            before = len(self.asked)
            self.place()
            assert before == 0 or any(engine.running for engine in self.router.engines.values()), "a deadlock"
            for name in NAMES:
                self.sample(name, 6, False, loads=True)
                self.prove(name)
        assert not self.asked, "lost"


Engines.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestEngines = Engines.TestCase


def engine_of(name: str, work: int, step: int) -> EngineState:
    return EngineState(name, EngineStatus.SERVING, at(step), step, kv=KvLedger(left=work))


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 3)), min_size=1, max_size=5),
    st.integers(1, 40),
    st.integers(-1, 3),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 4),
)
def test_no_engine_gets_a_request_that_is_busier_than_the_least_by_more_than_its_prompt(
    loads: list[tuple[int, int]], prompt: int, floor: int, group: list[int], session: int
) -> None:
    engines = [engine_of(str(number), work, step) for number, (work, step) in enumerate(loads)]
    affinity, pending = PrefixAffinity(), asks(GenerateRequest("r", (0,) * prompt, 5), session="s", group="g")
    for number in (*group, session):
        affinity.record(pending, engines[number % len(engines)])
    able = [engine for engine in engines if engine.version.step >= floor]
    chosen = affinity.choose(engines, pending, floor)
    assert (chosen is None) == (not able)
    if chosen is not None:
        least = min(engine.kv.left for engine in able)
        assert chosen in able
        assert chosen.kv.left <= least + prompt
        home = engines[session % len(engines)]
        assert chosen is home or home not in able or home.kv.left > least + prompt


def serving(*names: str, step: int = 0, limits: RequestLimits = LIMITS) -> Router:
    """Make a router of engines that serve the weights of a step."""
    router = Router(map(EngineState, names), limits)
    for name in names:
        router.on_proved(name, 0, at(step), 0.0)
    return router


def dispatched(router: Router, *asked: PendingRequest) -> Dispatch:
    """Submit requests that one engine takes together."""
    router.submit(list(asked), 0.0)
    (given,) = router.dispatch(0.0)
    return given


def test_a_group_that_one_engine_could_serve_is_spread_where_its_prompt_is_short() -> None:
    router = serving("a", "b", limits=RequestLimits())
    for start, prompt in (("short", 1), ("long", 50)):
        router.submit([asks(GenerateRequest(f"{start}{n}", (1,) * prompt, 10), group=start) for n in range(4)], 0.0)
        given = {give.engine: [one.id for one in give.batch] for give in router.dispatch(0.0)}
        assert sorted(map(len, given.values())) == ([2, 2] if start == "short" else [4])


def test_requests_of_a_silent_engine_continue_elsewhere_with_their_tokens() -> None:
    router = Router(map(EngineState, ("a", "b")), LIMITS)
    router.on_proved("a", 0, at(0), 0.0)
    router.submit([asks(request("1", 0, 5))], 0.0)
    (given,) = router.dispatch(0.0)
    router.on_deltas("a", 0, [honest(given.batch[0].continuation(), 2, 0)], 1.0)
    assert router.tick(20.0) == []
    assert [type(action) for action in router.tick(21.0)] == [Quarantine]
    router.on_proved("b", 0, at(0), 22.0)
    (again,) = router.dispatch(22.0)
    assert (again.engine, again.batch[0].continuation().tokens) == ("b", (0, 1, 2))
    late = honest(GenerateRequest("1", (2,), 3), 3, 0, "length")
    assert router.on_deltas("a", 0, [late], 23.0) == [], "its life is over"


def test_a_failure_that_is_known_already_spends_no_second_restart() -> None:
    router = serving("a", "b")
    assert [type(action) for action in router.on_failure("a", 0, "it died")] == [Quarantine]
    assert router.on_failure("a", 0, "its stream broke off") == []
    assert router.on_failure("a", 1, "it does not answer") == [], "it is out of service already"
    assert (router.engines["a"].failures, router.engines["b"].failures) == (1, 0)


def test_a_request_that_was_given_up_is_not_sent_again_when_its_batch_is_refused() -> None:
    router = serving("a")
    given = dispatched(router, asks(request("1", 0, 5)), asks(request("2", 0, 5)))
    first, second = given.batch
    router.cancel([first.id])
    assert router.on_refused("a", 0, given.batch, "a token is outside the vocabulary") == []
    assert [one.id for again in router.dispatch(1.0) for one in again.batch] == [second.id]
    assert router.on_refused("a", 5, given.batch, "of an earlier life") == []


def test_a_loading_engine_does_not_count_as_silent() -> None:
    router = serving("a", step=3)
    given = dispatched(router, asks(request("1", 0, 5)))
    router.on_loading("a", at(5))
    assert router.tick(40.0) == []
    assert router.on_deltas("a", 0, [honest(given.batch[0].continuation(), 2, 5)], 41.0) == []


@pytest.mark.parametrize("proves", [True, False])
def test_tokens_of_loading_weights_are_added_after_their_proof_and_dropped_with_their_engine(proves: bool) -> None:
    router = serving("a", step=3)
    given = dispatched(router, *(asks(request(name, 0, 5), seed=9) for name in ("1", "2", "3")))
    first, second, third = given.batch
    one, two, three = (pending.continuation() for pending in given.batch)
    router.on_loading("a", at(4))
    assert router.on_deltas("a", 0, [honest(one, 1, 3), honest(one, 0, 3), honest(two, 5, 4, "length")], 1.0) == []
    rest, end = replace(one, tokens=(0, 1)), Delta("1", (4, 5), (-0.5,) * 2, 4, 4, "length")
    assert router.on_deltas("a", 0, [honest(rest, 2, 4), honest(three, 1, 4), end], 2.0) == []
    assert [pending.tokens for pending in given.batch] == [[1], [], []]
    router.cancel(["3"])
    router.on_deltas("a", 0, [honest(three, 0, 4, "abort")], 3.0)
    assert list(router.engines["a"].running) == ["1", "2"], "a settled request leaves without the proof"
    assert router.on_stream_end("a", 0, given.batch) == [], "all have ended, though two wait for the proof"
    assert router.on_deltas("a", 5, [honest(two, 1, 4)], 3.0) == []
    if proves:
        completed = router.on_loaded("a", at(4), 4.0)
        assert completed == [CompleteRequest(second), CompleteRequest(first)]
        assert (first.tokens, first.versions) == ([1, 2, 3, 4, 5], [3, 4, 4, 4, 4])
        assert not router.engines["a"].kv.left
        assert not router.num_open
        return
    assert [type(action) for action in router.on_failure("a", 0, "a wrong receipt")] == [Quarantine]
    assert router.on_proved("a", 1, at(4), 5.0)
    assert router.on_loaded("a", at(4), 5.0) == []
    (again,) = router.dispatch(5.0)
    assert [pending.continuation().tokens for pending in again.batch] == [(0, 1), (0,)]


def test_an_engine_that_names_more_tokens_than_asked_before_its_proof_is_replaced() -> None:
    router = serving("a")
    asked = dispatched(router, asks(request("1", 0, 5))).batch[0].continuation()
    router.on_loading("a", at(1))
    assert router.on_deltas("a", 0, [honest(asked, 3, 1)], 0.0) == []
    assert [type(action) for action in router.on_deltas("a", 0, [honest(asked, 3, 1)], 0.0)] == [Quarantine]


def ended(given: Dispatch, step: int) -> list[Delta]:
    return [honest(pending.continuation(), 0, step, "abort") for pending in given.batch]


def test_after_a_rollback_its_older_step_is_valid_and_abandoned_steps_are_not() -> None:
    router = serving("a", step=5)
    given = dispatched(router, asks(request("1", 0, 5)))
    router.preempt("a")
    router.on_deltas("a", 0, ended(given, 5), 0.0)
    router.on_loading("a", at(3, 1))
    router.on_proved("a", 0, at(3, 1), 0.0)
    (given,) = router.dispatch(0.0)
    asked = given.batch[0].continuation()
    assert router.on_deltas("a", 0, [honest(asked, 1, 3)], 0.0) == []
    assert [type(action) for action in router.on_deltas("a", 0, [honest(asked, 1, 5)], 0.0)] == [Quarantine]


def test_an_engine_of_an_abandoned_incarnation_is_given_nothing_however_far_its_step_is() -> None:
    router = serving("slow", "quick", step=15)
    given = dispatched(router, asks(request("1", 0, 50), session="s", group="g"))
    assert given.engine == "slow"
    assert router.newest() == at(15)
    router.on_published(at(10, 1))
    assert [router.abandoned(name) for name in ("slow", "quick")] == [True, True]
    router.preempt("slow")
    router.on_deltas("slow", 0, ended(given, 15), 0.0)
    router.submit([asks(request("2", 0, 5, floor=10), session="s", group="g")], 0.0)
    assert router.dispatch(0.0) == [], "floors are of the new incarnation, and no engine has its weights"
    router.on_loading("quick", at(10, 1))
    router.on_proved("quick", 0, at(10, 1), 0.0)
    assert router.newest() == at(10, 1), "the newest incarnation, not the largest step"
    (given,) = router.dispatch(0.0)
    assert (given.engine, len(given.batch)) == ("quick", 2), "not where the cache of its session is"
    assert [engine.name for engine in router.available()] == ["quick"], "nor is anything scored there"


def test_a_request_continued_over_a_rollback_records_the_weights_of_each_token() -> None:
    router = serving("a", step=4)
    given = dispatched(router, asks(request("1", 0, 6)))
    router.on_deltas("a", 0, [honest(given.batch[0].continuation(), 2, 4)], 0.0)
    router.on_published(at(4, 1))
    router.preempt("a")
    router.on_deltas("a", 0, ended(given, 4), 0.0)
    router.on_loading("a", at(4, 1))
    router.on_proved("a", 0, at(4, 1), 0.0)
    (given,) = router.dispatch(0.0)
    router.on_deltas("a", 0, [honest(given.batch[0].continuation(), 1, 4)], 0.0)
    router.on_loading("a", at(5, 1))
    assert router.on_deltas("a", 0, [honest(given.batch[0].continuation(), 3, 5, "length")], 0.0) == []
    (answer,) = router.on_loaded("a", at(5, 1), 0.0)
    assert isinstance(answer, CompleteRequest)
    assert answer.request.versions == [4, 4, 4, 5, 5, 5]
    assert answer.request.incarnations == [(0, 0), (2, 1)]
    assert answer.request.newest(6) == [(0, 4), (1, 5)]


def test_weights_of_another_incarnation_never_land_under_a_request() -> None:
    router = serving("a", step=4)
    dispatched(router, asks(request("1", 0, 6)))
    with pytest.raises(RuntimeError, match=r"loads actor@1\.4 over actor@0\.4 while it runs \['1'\]"):
        router.on_loading("a", at(4, 1))


def test_a_request_waits_for_an_engine_at_least_as_new_as_its_tokens() -> None:
    router = Router(map(EngineState, ("old", "new")), LIMITS)
    router.on_proved("old", 0, at(3), 0.0)
    router.submit([asks(request("1", 0, 5, floor=4))], 0.0)
    assert router.dispatch(0.0) == []
    router.on_proved("new", 0, at(4), 1.0)
    assert [given.engine for given in router.dispatch(1.0)] == ["new"]


def test_engines_end_a_request_unasked_so_often_and_preempted_ones_do_not_count() -> None:
    router = serving("a")
    router.submit([asks(request("1", 0, 5))], 0.0)
    for number in range(2 * MAX_ABORTS):
        (given,) = router.dispatch(0.0)
        if preempted := number % 2 == 0:
            assert router.preempt("a") == ["1"]
        ended = router.on_deltas("a", 0, [honest(given.batch[0].continuation(), 0, 0, "abort")], 0.0)
        assert ended == [], (number, preempted)
    (given,) = router.dispatch(0.0)
    (answer,) = router.on_deltas("a", 0, [honest(given.batch[0].continuation(), 0, 0, "abort")], 0.0)
    assert isinstance(answer, CompleteRequest)
    assert answer.request.finish == "abort"
    assert not router.num_open


@pytest.mark.parametrize(
    ("asked", "said"),
    [(request("1", VOCABULARY, 2), "outside the vocabulary"), (request("1", 0, CONTEXT), "exceed the context")],
)
def test_a_request_that_no_engine_can_run_fails_at_once(asked: GenerateRequest, said: str) -> None:
    router = Router(map(EngineState, ("a",)), LIMITS)
    router.vocab_size, router.max_context = VOCABULARY, CONTEXT
    (answer,) = router.submit([asks(asked)], 0.0)
    assert isinstance(answer, CompleteRequest)
    assert answer.request.finish == "error"
    assert said in answer.request.error
    assert not router.num_open


def session_turn(name: str, prompt: int, count: int, session: str) -> PendingRequest:
    return asks(GenerateRequest(name, (1,) * prompt, count), session=session)


def counting(names: Sequence[str], kv: int, per_engine: int = 9, backlog: int = 9, reserve: float = 1.0) -> Router:
    """A router of engines that serve, with caches of so many tokens."""
    limits = RequestLimits(per_engine=per_engine, backlog=backlog, kv_tokens=kv, kv_reserve=reserve)
    return serving(*names, limits=limits)


def end(router: Router, given: Dispatch) -> None:
    for pending in given.batch:
        left = pending.tokens_left
        router.on_deltas(given.engine, given.failures, [honest(pending.continuation(), left, 0, "length")], 0.0)


def test_a_request_that_is_larger_than_the_cache_runs_alone_and_none_passes_it_there() -> None:
    router = counting(("a",), 20)
    first = dispatched(router, session_turn("first", 5, 5, "s"))
    router.submit([session_turn("large", 20, 9, "t"), session_turn("small", 1, 1, "u")], 0.0)
    assert router.dispatch(0.0) == [], "the small one would starve the large one"
    end(router, first)
    (large,) = router.dispatch(0.0)
    assert [pending.id for pending in large.batch] == ["large"]
    end(router, large)
    assert [given.batch[0].id for given in router.dispatch(0.0)] == ["small"]


def test_one_engine_is_drained_for_a_large_request_while_others_run_later_requests() -> None:
    router = counting(("a", "b", "c"), 20)
    router.submit([session_turn(name, 5, 5, name) for name in ("1", "2", "3", "4")], 0.0)
    router.dispatch(0.0)
    large = session_turn("large", 10, 10, "large")
    router.submit([large], 0.0)
    for number in range(9):
        router.submit([session_turn(f"more {number}", 5, 5, f"more {number}")], 0.0)
    emptiest = min(router.engines.values(), key=lambda engine: engine.kv.running).name
    assert {dispatch.engine for dispatch in router.dispatch(0.0)} == {"b", "c"} - {emptiest}
    for pending in list(router.engines[emptiest].running.values()):
        end(router, Dispatch(emptiest, 0, (pending,)))
    assert any(large in dispatch.batch for dispatch in router.dispatch(0.0))


def test_a_session_keeps_its_engine_over_turns_until_others_need_the_room_longest_idle_first() -> None:
    router = counting(("a",), 30)
    for name in ("old", "new"):
        end(router, dispatched(router, session_turn(name, 8, 2, name)))
    ledger = router.engines["a"].kv
    assert dict(ledger.idle) == {"old": 10, "new": 10}
    other = dispatched(router, session_turn("other", 12, 3, "other"))
    assert dict(ledger.idle) == {"new": 10}
    assert not ledger.holds("old")
    router.submit([session_turn("new again", 10, 4, "new")], 0.0)
    router.dispatch(0.0)
    assert not ledger.idle
    assert ledger.running == 15 + 14
    end(router, other)
    router.forget_sessions(["other"])
    assert not ledger.holds("other")


def test_new_samples_go_where_no_idle_session_must_be_evicted_and_its_next_turn_back_to_its_own_engine() -> None:
    router = counting(("a", "b"), 30)
    given = dispatched(router, session_turn("1", 20, 2, "s"))
    assert given.engine == "a"
    end(router, given)
    other = dispatched(router, session_turn("2", 12, 3, "t"))
    assert other.engine == "b"
    router.engines["a"].kv.left += 9  # busier, yet by less than the prefix is worth
    router.submit([session_turn("3", 24, 2, "s")], 0.0)
    assert [given.engine for given in router.dispatch(0.0)] == ["a"]


def test_a_session_is_not_idle_while_another_of_its_requests_runs() -> None:
    router = counting(("a",), 60)
    given = dispatched(router, session_turn("short", 10, 2, "s"), session_turn("long", 10, 9, "s"))
    ledger = router.engines["a"].kv
    end(router, Dispatch("a", 0, given.batch[:1]))
    assert (dict(ledger.idle), ledger.idle_tokens) == ({}, 0)
    assert ledger.holds("s")
    end(router, Dispatch("a", 0, given.batch[1:]))
    assert dict(ledger.idle) == {"s": 19}


@pytest.mark.parametrize("gone", ["dead", "new weights"])
def test_a_dropped_cache_is_not_counted_and_attracts_no_request(gone: str) -> None:
    router = counting(("a", "b"), 200)
    given = dispatched(router, session_turn("1", 50, 9, "s"))
    assert given.engine == "a"
    end(router, given)
    assert router.engines["a"].kv.idle_tokens == 59
    if gone == "dead":
        router.on_failure("a", 0, "killed")
        router.on_proved("a", 1, at(0), 0.0)
    else:
        router.on_proved("a", 0, at(1), 0.0)
    assert router.engines["a"].kv.idle_tokens == 0
    router.engines["a"].kv.left = 20
    router.submit([session_turn("2", 60, 9, "s")], 0.0)
    assert [given.engine for given in router.dispatch(0.0)] == ["b"]


def test_tokens_still_to_be_sampled_count_by_the_configured_share() -> None:
    router = counting(("a",), 30, reserve=0.25)
    given = dispatched(router, *(session_turn(str(number), 2, 16, str(number)) for number in range(9)))
    assert len(given.batch) == 5


def test_free_places_are_those_of_engines_and_of_a_queue_as_long_as_the_running_requests() -> None:
    router = counting(("a", "b"), 40, per_engine=3, backlog=9)
    assert router.room(expected_tokens=20) == 4
    router.submit([session_turn(str(number), 5, 5, str(number)) for number in range(8)], 0.0)
    router.dispatch(0.0)
    assert router.room(0) == 0 + 6 - 2
    for engine in router.engines.values():
        while engine.running:
            end(router, Dispatch(engine.name, 0, (next(iter(engine.running.values())),)))
    router.dispatch(0.0)
    assert router.room(0) == 4 + 2, "what waits for a tool is no work"
    whole = Router(map(EngineState, ("a",)), RequestLimits(), whole_batches=True)
    assert whole.room(9) > 1 << 20, "deterministic runs begin what is granted"


def test_in_a_deterministic_run_the_members_of_a_batch_do_not_depend_on_what_else_waits() -> None:
    router = Router(map(EngineState, ("a", "b")), RequestLimits(), whole_batches=True)
    for name in router.engines:
        assert router.on_proved(name, 0, at(0), 0.0)
    for calls in (("1", "2", "3"), ("4",), ("5", "6")):
        router.submit([session_turn(call, 5, 5, call) for call in calls], 0.0)
    dispatched = router.dispatch(0.0)
    assert sorted(tuple(pending.id for pending in each.batch) for each in dispatched) == [
        ("1", "2", "3"), ("4",), ("5", "6"),
    ]  # fmt: skip


def test_the_reported_cache_size_counts_unless_configured() -> None:
    told = Router(map(EngineState, ("a",)), RequestLimits(kv_tokens=None))
    told.set_kv_tokens("a", 77)
    assert told.engines["a"].kv.capacity == 77
    for limit in (0, 50):
        router = Router(map(EngineState, ("a",)), RequestLimits(kv_tokens=limit))
        router.set_kv_tokens("a", 77)
        assert router.engines["a"].kv.capacity == limit


@pytest.mark.parametrize("lie", [lie for lie in LIES if lie != "an id that it does not run"])
def test_every_lie_is_a_fault_and_the_truth_is_none(lie: str) -> None:
    asked = request("r", 5, 4)
    told = honest(asked, 2, 3)
    pending = asks(asked, min_step=0)
    assert response_fault(told, pending, 3, VOCABULARY) == ""
    assert response_fault(LIES[lie](told), pending, 3, VOCABULARY)
