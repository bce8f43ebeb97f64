# SPDX-License-Identifier: Apache-2.0
"""The real queue, explored breadth first in the smallest runs: every state is checked and can still finish its step.

Samples are begun on one engine and may go on elsewhere, so that a group mixes versions; states that differ only by
version and group numbers are one.
"""

from __future__ import annotations

import pickle
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from relax_core.api.batch import AttemptId, RowId
from relax_core.api.bus import BusSettings, Claim, ClaimRequest, LateRule, Sealed
from relax_core.api.trajectory import DropReason, Outcome
from relax_core.api.weights import Version
from relax_core.bus import gate
from relax_core.bus.queue import TransferQueue


class Work(NamedTuple):
    """A sample under way."""

    engine: int | None
    """None: it was let go with the tokens it has."""
    newest: int | None = None
    """Of its tokens; None before the first."""


@dataclass(slots=True)
class Run:
    queue: TransferQueue
    engines: list[Version | None]
    published: Version
    carries: bool = False
    covered: int = 0
    held: dict[AttemptId, Work] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    overdue: bool = False

    def clone(self) -> Run:
        copy: Run = pickle.loads(pickle.dumps(self))
        copy.queue.ledger.records.clear()
        return copy

    def fingerprint(self) -> tuple[object, ...]:
        """What the future depends on, relative to the version."""
        now, k = self.queue.version.step, self.queue.rule.max_staleness
        live = Counter(
            (
                g.complete,
                g.claimed,
                g.floor - now,
                g.complete and g.newest - now,
                self._where(g),
                g.recorded and g.recorded - now,
            )
            for g in self.queue.ledger.live.values()
        )
        done = Counter(
            (g.trained_to - now, g.floor - now, g.newest - now) for g in self.queue.ledger.provisional.values()
        )
        engines = tuple(engine and max(engine.step - now, -k - 1) for engine in self.engines)
        rest = (self.published.step - now, self.covered - now, len(self.queue.ledger.pending), self.overdue)
        return frozenset(live.items()), frozenset(done.items()), engines, rest

    def _where(self, group) -> tuple[object, ...]:
        now = self.queue.version.step
        works = [self.held[attempt] for attempt in group.members if attempt in self.held]
        seals = [m.sealed for m in group.members.values() if m.sealed]
        return (
            *sorted((str(work.engine), work.newest is not None and work.newest - now) for work in works),
            *sorted((seal.floor - now, max(seal.newest.values()) - now) for seal in seals),
        )


def explore(settings: BusSettings, uncovered: int, most: int, carries: bool = False) -> int:
    start = Version("actor", 0, 0)
    first = Run(TransferQueue(settings, start), [start, start], start, carries)
    came = {first.fingerprint(): ("start",)}
    todo = deque([first])
    while todo and len(came) < most:
        run = todo.popleft()
        path = came[run.fingerprint()]
        try:
            check(run)
            for name, following in moves(run, uncovered):
                mark = following.fingerprint()
                if mark not in came:
                    came[mark] = (*path, name)
                    todo.append(following)
        except AssertionError as error:
            raise AssertionError(f"{error} after {path}") from error
    return len(came)


def check(run: Run) -> None:
    queue, k = run.queue, run.queue.rule.max_staleness
    queue.report_held("rollout", frozenset(run.held), queue.ledger.issued)
    account = queue.account()
    assert account.balanced, account.problem
    for claim in run.claims:
        assert all(0 <= queue.version.step - seal.floor <= k for seal in claim.samples.values()), "lag"
    if run.overdue:
        return
    live = queue.ledger.live.values()
    due = Counter(group.floor + k for group in live if not group.claimed)
    assert gate.overflow(queue.rule, queue.version.step, sum(g.claimed for g in live), due) <= queue.rule.spare_groups
    finish_step(run.clone())


def finish_step(run: Run) -> None:
    """Nobody is slow any more."""
    version = run.published = run.queue.version
    run.engines = [version, version]
    for _ in range(4 * (run.queue.rule.max_staleness + 2) * run.queue.rule.groups_per_step):
        admit(run, 0)
        for attempt, work in list(run.held.items()):
            run.held[attempt] = work._replace(engine=0)
            finish(run, attempt)
        claim(run, False)
        if len(run.claims) == run.queue.rule.groups_per_step:
            return
    raise AssertionError("the step can't finish")


def moves(run: Run, uncovered: int) -> Iterator[tuple[str, Run]]:
    queue, version = run.queue, run.queue.version
    acts = [("publish", lambda r: setattr(r, "published", version))] if run.published != version else []
    for engine, held in enumerate(run.engines):
        acts.append((f"admit {engine}", lambda r, e=engine: admit(r, e)))
        if held != run.published:
            acts.append((f"load {engine}", lambda r, e=engine: r.engines.__setitem__(e, r.published)))
    for attempt, work in run.held.items():
        acts.append((f"drop {attempt}", lambda r, a=attempt: drop(r, a)))
        if work.engine is not None:
            acts.append((f"finish {attempt}", lambda r, a=attempt: finish(r, a)))
        if run.carries and work.engine is None:
            for engine in range(len(run.engines)):
                acts.append((f"{attempt} goes on at {engine}", lambda r, a=attempt, e=engine: go_on(r, a, e)))
        elif run.carries:
            acts.append((f"finish {attempt}, begun late", lambda r, a=attempt: finish(r, a, begun_late=True)))
            acts.append((f"let go of {attempt}", lambda r, a=attempt: let_go(r, a)))
    acts.append(("claim", lambda r: claim(r, False)))
    timely = version.step - run.published.step <= queue.rule.max_staleness
    full = len(run.claims) == queue.rule.groups_per_step
    if timely and not full:
        acts.append(("claim overdue", lambda r: claim(r, True)))
    if not run.claims:
        acts.append(("let go", lambda r: r.queue.end_awaited(version.step)))
    if timely and run.claims and (full or run.overdue) and version.step - run.covered < uncovered:
        acts.append(("train", train))
    if not run.claims and run.covered < version.step:
        acts.append(("checkpoint", checkpoint))
    acts.append(("rollback", rollback))
    for name, act in acts:
        following = run.clone()
        act(following)
        yield name, following


def admit(run: Run, engine: int) -> None:
    version = run.engines[engine]
    for issue in run.queue.admit("rollout", version, 1) if version else ():
        run.held.update(dict.fromkeys(issue.attempts, Work(engine)))


def sampled(run: Run, attempt: AttemptId) -> int | None:
    """The newest version of its tokens, those of the engine it is on included."""
    work, group = run.held[attempt], run.queue.ledger.live.get(attempt.group)
    version = None if work.engine is None else run.engines[work.engine]
    told = [step for step in (work.newest, version and version.step, group and group.granted) if step is not None]
    return max(told, default=None)


def let_go(run: Run, attempt: AttemptId) -> None:
    """A pause, an update or its engine's death: the tokens stay."""
    run.held[attempt] = Work(None, sampled(run, attempt))


def go_on(run: Run, attempt: AttemptId, engine: int) -> None:
    version, group = run.engines[engine], run.queue.ledger.live.get(attempt.group)
    if version is not None and group is not None and version.step >= group.floor:
        run.held[attempt] = run.held[attempt]._replace(engine=engine)


def finish(run: Run, attempt: AttemptId, begun_late: bool = False) -> None:
    """Its tokens are as old as the grant, or as the engine where it begins only now."""
    group, newest = run.queue.ledger.live.get(attempt.group), sampled(run, attempt)
    begun = run.held.pop(attempt).newest
    if group is None or attempt not in group.members or newest is None:
        return
    floor = newest if begun_late and begun is None else group.granted
    sealed = Sealed(attempt, 1, Outcome.FINISHED, 1.0, floor, 1, newest={run.queue.version.incarnation: newest})
    run.queue.put(run.queue.new_key(), [RowId(*attempt, 0)], ("tokens",), 1, [sealed])


def drop(run: Run, attempt: AttemptId) -> None:
    del run.held[attempt]
    run.queue.drop([attempt], DropReason.FILTERED)


def claim(run: Run, overdue: bool) -> None:
    request = ClaimRequest("actor", ("tokens",), 1, 1, True, run.queue.version.step, overdue)
    if (found := run.queue.claim(request, 0.0)) is not None:
        run.claims.append(found)
        run.overdue |= overdue


def train(run: Run) -> None:
    run.queue.trained(run.claims, run.queue.version.step, [], 0.0)
    run.claims, run.overdue = [], False
    gone = run.queue.report_held("rollout", frozenset(run.held), run.queue.ledger.issued)
    run.held = {attempt: work for attempt, work in run.held.items() if attempt not in gone}


def checkpoint(run: Run) -> None:
    run.covered = run.queue.version.step
    run.queue.cover(run.covered)
    run.queue.finalize(run.covered)


def rollback(run: Run) -> None:
    run.published = run.queue.rollback(run.covered, run.queue.version.incarnation + 1)
    run.engines, run.claims, run.overdue = [None, None], [], False
    gone = run.queue.report_held("rollout", frozenset(run.held), run.queue.ledger.issued)
    run.held = {attempt: work for attempt, work in run.held.items() if attempt not in gone}


def settings(k: int, groups: int, late: LateRule, spare: int = 0, size: int = 1) -> BusSettings:
    return BusSettings(size, groups, k, late, spare_groups=spare)


@pytest.mark.parametrize(
    ("bus", "uncovered", "most"),
    [(settings(0, 1, "wait"), 1, 1000), (settings(0, 2, "drop"), 1, 1000), (settings(1, 1, "wait"), 1, 500)],
)
def test_queue_is_right_in_every_small_state(bus, uncovered, most):
    assert explore(bus, uncovered, most) > 30


@pytest.mark.parametrize(
    "bus",
    [
        settings(0, 1, "wait"),
        pytest.param(settings(1, 1, "wait"), marks=pytest.mark.faults),
        pytest.param(settings(1, 1, "drop", size=2), marks=pytest.mark.faults),
    ],
)
def test_queue_is_right_where_samples_go_on_at_newer_engines(bus):
    assert explore(bus, 1, 1000, carries=True) > 100


def test_a_claim_rule_that_forgets_what_else_must_be_trained_is_found_out(monkeypatch):
    monkeypatch.setattr(
        gate, "may_claim", lambda rule, version, claimed, due, floor: gate.may_train(rule, version, claimed, floor)
    )
    with pytest.raises(AssertionError):
        explore(settings(1, 1, "wait"), 1, 2000)


def test_a_grant_too_many_is_found_out(monkeypatch):
    real = gate.may_grant
    monkeypatch.setattr(gate, "may_grant", lambda rule, version, engine, live: real(rule, version, engine, live - 1))
    with pytest.raises(AssertionError):
        explore(settings(1, 1, "wait"), 1, 2000, carries=True)


@pytest.mark.faults
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("bus", "uncovered"),
    [
        (settings(1, 1, "wait"), 1),
        (settings(1, 1, "regenerate", size=2), 1),
        (settings(1, 2, "drop"), 1),
        (settings(2, 1, "wait"), 1),
        (settings(2, 2, "wait"), 1),
        (settings(3, 1, "wait", size=2), 1),
    ],
)
def test_queue_is_right_in_larger_states_of_carried_samples(bus, uncovered):
    assert explore(bus, uncovered, most=20_000, carries=True) > 300


@pytest.mark.faults
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("bus", "uncovered"),
    [
        (settings(1, 1, "wait"), 2),
        (settings(1, 1, "regenerate"), 1),
        (settings(1, 1, "wait", spare=1), 1),
        (settings(1, 2, "wait"), 1),
        (settings(2, 1, "wait"), 1),
        (settings(3, 1, "wait"), 1),
    ],
)
def test_queue_is_right_in_larger_states(bus, uncovered):
    assert explore(bus, uncovered, most=20_000) > 300
