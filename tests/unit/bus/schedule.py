# SPDX-License-Identifier: Apache-2.0
"""The real queue and the real router of a pool under long random schedules and a virtual clock: slow engines, late
publishes, deaths, rollbacks.

Samples get token after token from whatever weights their engine has then, are let go and go on elsewhere, so that they
and their groups mix versions; of every token it is remembered which weights sampled it, and which it depends on. Which
engine may have a sample, and which version groups are admitted at, the router alone decides.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from relax_core.api.batch import AttemptId, RowId
from relax_core.api.bus import BusSettings, Claim, ClaimRequest, Sealed
from relax_core.api.engine import Delta, FinishReason
from relax_core.api.errors import StaleFence
from relax_core.api.trajectory import DropReason, Outcome
from relax_core.api.weights import Version
from relax_core.bus import gate
from relax_core.bus.journal import FinalRecord, LedgerJournal
from relax_core.bus.ledger_file import prepare_ledger
from relax_core.bus.queue import TransferQueue
from relax_core.engines.engine_state import MAX_FAILURES, EngineState
from relax_core.engines.requests import PendingRequest
from relax_core.engines.router import AbortRequest, Action, CompleteRequest, Router

SIZE = 2
ENGINES = 3
NAMES = tuple(f"engine-{number}" for number in range(ENGINES))
LONGEST = 1 << 20
"""Tokens that a sample may have: it ends when the schedule says so."""
LEASE_S = 10.0
FIRST = ("tokens",)
DERIVED = ("advantages",)
DAMAGES = ("none", "lost", "older", "torn")
"""Of the ledger, when the machine dies."""


class Schedule(RuleBasedStateMachine):
    """A run in miniature: what engines, roles and the trainer would do, in any order."""

    @initialize(
        k=st.integers(0, 3),
        groups=st.integers(1, 3),
        late=st.sampled_from(["wait", "wait", "drop", "regenerate", "mask"]),
        spare=st.sampled_from([0, 0, 1]),
        min_valid=st.integers(1, 2),
        kv=st.booleans(),
    )
    def begin(self, k, groups, late, spare, min_valid, kv=False):
        self.kv = kv and k > 0
        """Caches outlive updates: tokens are as old as the weights that began the request."""
        self.settings = BusSettings(
            SIZE, groups, k, late, min_valid, DERIVED, lease_s=LEASE_S, spare_groups=spare, max_bytes=4000
        )
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name)
        self.journal = LedgerJournal(str(self.path))
        self.unfolded = LedgerJournal(str(self.path / "unfolded"))
        """Told the same, but never that anything is final: it keeps every sample."""
        self.now = 0.0
        self.covered = 0
        self.checkpoints = [Version("actor", 0, 0)]
        """Complete ones."""
        self.lineage: dict[int, list[AttemptId]] = {}
        self.rollbacks: list[Version] = []
        """First version of each later incarnation of this process."""
        self.open(Version("actor", 0, 0))

    def open(self, version):
        """A process starts: nothing but the journal is left of an earlier one."""
        remembered = self.journal.remember(version)
        assert remembered == self.unfolded.remember(version), "what is folded is not forgotten"
        self.queue = TransferQueue(self.settings, version, remembered)
        self.published, self.rollbacks = version, []
        self.router, self.heard = Router(map(EngineState, NAMES)), version
        self.engines: list[Version] = [version] * ENGINES
        """Weights that the processes have, whatever they said of them."""
        for name in NAMES:
            self.router.on_published(version)
            assert self.router.on_proved(name, 0, version, self.now)
        self.held: dict[AttemptId, PendingRequest] = {}
        self.begun: dict[int, int] = {}
        self.tokens: dict[AttemptId, list[tuple[Version, int]]] = {}
        """Of each token the weights that sampled it, and the oldest step that it depends on."""
        self.caches: dict[AttemptId, Version] = {}
        self.given_up: dict[AttemptId, int] = {}
        self.admitted = 0
        self.overdue = False
        self.claims: list[Claim] = []

    def teardown(self):
        if hasattr(self, "journal"):
            self.finish_a_step()
            self.write()
            self.journal.close()
            self.unfolded.close()
            self.directory.cleanup()

    # -- rollout ------------------------------------------------------------------------------------------------

    @rule(limit=st.integers(1, 4))
    def admit(self, limit):
        version = self.router.newest()
        for issue in self.queue.admit("rollout", version, limit):
            self.admitted += len(issue.attempts)
            self.begun[issue.group] = version.step
            for attempt in issue.attempts:
                self.held[attempt] = PendingRequest(
                    (0,), LONGEST, group_floor=version.step, session=attempt, group=issue.group, id=str(tuple(attempt))
                )
            self.do(self.router.submit([self.held[attempt] for attempt in issue.attempts], self.now))

    def do(self, actions: Sequence[Action]) -> None:
        """Dispatch what the router decided; engines are honest, so that it never replaces one."""
        for action in actions:
            match action:
                case AbortRequest(name, ids):
                    self.say(name, [(key, 0, "abort") for key in ids])
                case CompleteRequest():
                    pass
                case _:
                    raise AssertionError(action)

    def place(self) -> None:
        for dispatch in self.router.dispatch(self.now):
            weights = self.engines[NAMES.index(dispatch.engine)]
            assert weights.incarnation == self.heard.incarnation, "dispatched to weights of an abandoned incarnation"
            for pending in dispatch.batch:
                assert weights.step >= pending.floor, "dispatched to an engine below the floor"
                self.caches[pending.session] = weights

    def survives(self, weights: Version) -> bool:
        return all(weights.incarnation >= first.incarnation or weights.step <= first.step for first in self.rollbacks)

    def say(self, name: str, told: Sequence[tuple[str, int, FinishReason]]) -> None:
        """Have an engine tell of requests that it runs: (id, number of tokens, end)."""
        engine, weights, deltas = self.router.engines[name], self.engines[NAMES.index(name)], []
        for key, count, finish in told:
            pending = engine.running.get(key)
            if pending is None:
                continue
            cache = self.caches[pending.session]
            oldest = (
                min(weights.step, cache.step) if self.kv and cache.incarnation == weights.incarnation else weights.step
            )
            if not pending.settled:
                assert not count or self.survives(weights), "what still counts goes on under abandoned weights"
                self.tokens.setdefault(pending.session, []).extend([(weights, oldest)] * count)
            deltas.append(Delta(key, (1,) * count, (-0.5,) * count, weights.step, oldest, finish))
        self.do(self.router.on_deltas(name, engine.failures, deltas, self.now))

    @rule(engine=st.integers(0, ENGINES - 1))
    def load(self, engine):
        """The pool hears of the newest version, and this engine takes it: in mid-generation unless it is of other weights."""
        self.hear()
        name = NAMES[engine]
        if self.engines[engine].incarnation != self.published.incarnation:
            self.leave_engine(engine)
        self.router.on_loading(name, self.published)
        self.engines[engine] = self.published
        assert self.router.on_proved(name, self.router.engines[name].failures, self.published, self.now)

    @rule()
    def hear(self):
        """The pool hears of the newest version: what engines run under weights that were given up is ended."""
        self.report()
        self.heard = self.published
        self.router.on_published(self.published)
        for engine, name in enumerate(NAMES):
            if self.router.abandoned(name):
                self.leave_engine(engine)

    @rule()
    def publish(self):
        self.published = self.queue.version

    @rule(many=st.integers(1, 9), which=st.randoms(use_true_random=False), sick=st.integers(0, 7))
    def generate(self, many, which, sick):
        for attempt in which.sample(sorted(self.held), min(many, len(self.held))):
            rows = which.choice([0, 1, 1, 2])
            self.seal(attempt, failed=sick == 0 and which.random() < 0.5, rows=rows)

    @rule(many=st.integers(1, 9), which=st.randoms(use_true_random=False))
    def sample(self, many, which):
        for attempt in which.sample(sorted(self.held), min(many, len(self.held))):
            self.sample_token(attempt)

    @rule(engine=st.integers(0, ENGINES - 1))
    def leave_engine(self, engine):
        """A pause, an update that drains, or weights that were given up: what it ran goes on where it may."""
        name = NAMES[engine]
        self.say(name, [(key, 0, "abort") for key in self.router.preempt(name)])

    @rule(engine=st.integers(0, ENGINES - 1))
    def engine_dies(self, engine):
        """What it ran goes on elsewhere; another process takes its place with the newest weights."""
        self.hear()
        name = NAMES[engine]
        if self.router.engines[name].restarts.spent == MAX_FAILURES:
            return  # one more failure in a row would end the run
        (action,) = self.router.on_failure(name, self.router.engines[name].failures, "killed")
        assert action.engine == name
        self.engines[engine] = self.published
        assert self.router.on_proved(name, self.router.engines[name].failures, self.published, self.now)

    def sample_token(self, attempt):
        """Whether it is on an engine, which then gave it one."""
        self.place()
        pending = self.held[attempt]
        if pending.engine:
            self.say(pending.engine, [(pending.id, 1, "")])
        return bool(pending.engine)

    def give_up(self, attempts):
        """Await the samples no more."""
        ids = [self.held.pop(attempt).id for attempt in attempts if attempt in self.held]
        self.do(self.router.cancel(ids))

    @rule(slow=st.integers(0, ENGINES), turns=st.integers(1, 4))
    def smooth(self, slow, turns):
        """All goes well for a while, but for one slow engine; weights land in mid-generation."""
        for _ in range(turns):
            self.admit(4)
            self.report()
            for attempt in self.held:
                self.sample_token(attempt)
            self.publish()
            for engine in range(ENGINES):
                self.load(engine)
            for attempt in [attempt for attempt, own in self.held.items() if own.engine != f"engine-{slow}"]:
                self.seal(attempt)
            self.credit(4, dies=False)
            self.claim(3, overdue=False)
            self.train(short=False)

    def seal(self, attempt, failed=False, rows=1):
        """Its last token, then its rows; it goes on being held where no engine may give it one, or no credit is left."""
        if not self.sample_token(attempt):
            return
        told, pending = self.tokens[attempt], self.held[attempt]
        assert pending.versions == [weights.step for weights, _ in told]
        floor, newest = min(oldest for _, oldest in told), dict(pending.newest(len(told)))
        for weights, _ in told:
            assert newest[weights.incarnation] >= weights.step, "tokens whose weights nobody tells of"
        outcome = Outcome.ENGINE_ERROR if failed else Outcome.FINISHED
        count = 0 if failed else rows
        ids = [RowId(*attempt, row) for row in range(count)]
        sealed = [Sealed(attempt, count, outcome, 1.0, floor, len(told) if count else 0, newest=newest)]
        key = self.queue.reserve([attempt], count, 100)
        if key is not None:
            self.queue.put(key, ids, FIRST, 100, sealed)
            self.give_up([attempt])

    @rule(which=st.randoms(use_true_random=False), regenerate=st.booleans())
    def abort(self, which, regenerate):
        if not self.held:
            return
        attempt = which.choice(sorted(self.held))
        self.queue.drop([attempt], DropReason.FILTERED, regenerate)
        self.give_up([attempt])

    @rule(sure=st.integers(0, 3))
    def rollout_dies(self, sure):
        if sure:
            return
        self.queue.register("rollout", self.now)
        self.give_up(list(self.held))
        self.admitted = 0

    @rule()
    def report(self):
        told, self.given_up = self.given_up, {}
        for attempt in self.queue.report_held("rollout", frozenset(self.held), self.admitted, told):
            self.give_up([attempt])
            self.given_up[attempt] = len(self.tokens.get(attempt, ()))

    # -- the roles after it -------------------------------------------------------------------------------------

    @rule(many=st.integers(1, 4), dies=st.sampled_from([False, False, True]))
    def credit(self, many, dies):
        claim = self.queue.claim(ClaimRequest("advantages", FIRST, many), self.now)
        if claim is None or dies:
            return
        self.queue.write(claim, self.queue.new_key(), DERIVED, 10, self.queue.version, self.now)
        self.queue.acknowledge(claim, self.now)

    @rule(many=st.integers(1, 3), overdue=st.sampled_from([False, False, True]))
    def claim(self, many, overdue):
        request = ClaimRequest("actor", FIRST, many, 1, True, self.queue.version.step, overdue)
        claim = self.queue.claim(request, self.now)
        if claim is not None:
            self.overdue |= overdue
            self.claims.append(claim)
            self.check_lag(claim)

    def check_lag(self, claim):
        """Of every token that this step will train."""
        step = self.queue.version.step
        for attempt, seal in claim.samples.items():
            for weights, oldest in self.tokens[attempt] if seal.trained_tokens else ():
                assert weights.step <= step
                assert self.survives(weights), "a token of abandoned weights is trained"
                assert oldest < claim.mask_before or 0 <= step - oldest <= self.settings.max_staleness

    @rule()
    def end_awaited(self):
        """The step waited in vain: what it waited for makes room."""
        step, live = self.queue.version.step, len(self.queue.ledger.live)
        ended = self.queue.end_awaited(step)
        assert len(ended) <= self.settings.groups_per_step
        assert len(self.queue.ledger.live) == live - len(ended) and not any(
            number in self.queue.ledger.live for number in ended
        )

    @rule()
    def release(self):
        if not self.claims:
            return
        self.queue.release(self.claims.pop())

    @rule(seconds=st.sampled_from([1.0, LEASE_S]))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(short=st.sampled_from([False, False, True]))
    def train(self, short):
        count = sum(len(claim.groups) for claim in self.claims)
        bounded = self.queue.version.step - self.published.step <= self.settings.max_staleness
        if self.claims and (short or count == self.settings.groups_per_step) and bounded:
            self.commit()

    def commit(self):
        claims, self.claims, self.overdue = self.claims, [], False
        step = self.queue.version.step
        try:
            version = self.queue.trained(claims, step, [], self.now)
        except StaleFence:
            for claim in claims:
                self.queue.release(claim)
            return
        assert self.queue.trained(claims, step, [], self.now) == version, "repeating it changes nothing"
        self.lineage[version.step] = [attempt for claim in claims for attempt in claim.samples]

    # -- lineage ------------------------------------------------------------------------------------------------

    @rule(whole=st.sampled_from([True, True, False]))
    def checkpoint(self, whole=True):
        """One that is not whole never got its name: the ledger knows of it, and nobody continues from it."""
        version, place = self.queue.version, self.path / "checkpoints" / f"step-{self.queue.version.step}"
        self.queue.cover(version.step)
        self.write()
        if whole:
            self.journal.copy(str(place))
            self.unfolded.copy(str(place / "unfolded"))
            self.covered = version.step
            self.checkpoints = [old for old in self.checkpoints if old.step < version.step] + [version]
            self.queue.finalize(version.step)

    def write(self):
        records = self.queue.take_records()
        for journal in (self.journal, self.unfolded):
            journal.add(r for r in records if journal is self.journal or not isinstance(r, FinalRecord))
            journal.commit()
        self.check_size()

    def check_size(self):
        """What lies in the file is what may still change, whatever the run has trained before the last two checkpoints."""
        ask = self.journal._db.execute
        rows = ask("SELECT number, step, pending FROM groups").fetchall()
        final, folded = (dict(ask("SELECT * FROM meta").fetchall()).get(key, 0) for key in ("final", "folded"))
        assert final in [version.step for version in self.checkpoints] and folded <= final
        assert not [number for number, step, _ in rows if step is not None and step <= folded]
        ranges = ask("SELECT first, last FROM folded_groups").fetchall()
        over = [number for first, last in ranges for number in range(first, last + 1)]
        assert sorted([*over, *(number for number, _, _ in rows)]) == list(range(self.queue.ledger.next_group))
        assert len(ranges) <= len(rows) + 1

    @rule(damage=st.sampled_from(DAMAGES), back=st.integers(0, 1))
    def ledger_is_lost(self, damage, back):
        """The machine dies, with it the ledger or the newest checkpoint: the run goes on from the one that is left."""
        if len(self.checkpoints) < 2 + back:
            return
        self.write()
        for _ in range(back):
            self.checkpoints.pop()
        version, incarnation = self.checkpoints[-1], self.queue.version.incarnation
        self.journal.close()
        self.unfolded.close()
        ledger, copies = self.path / "ledger.db", self.path / "checkpoints"
        older = copies / f"step-{self.checkpoints[-2].step}" / "ledger.db"
        if damage == "torn":
            ledger.write_bytes(ledger.read_bytes()[:5000])
        elif damage == "older" and older.exists():
            shutil.copy(older, ledger)
        elif damage != "none":
            ledger.unlink()
        own = copies / f"step-{version.step}"
        notice = prepare_ledger(self.path, own, version.step, version.incarnation).notice
        assert notice or damage == "none"
        if notice:
            shutil.copy(own / "unfolded" / "ledger.db", self.path / "unfolded" / "ledger.db")
        self.journal, self.unfolded = LedgerJournal(str(self.path)), LedgerJournal(str(self.path / "unfolded"))
        self.covered = version.step
        self.forget_steps()
        self.open(Version("actor", incarnation + 1, self.covered))
        self.check_size()

    @rule()
    def trainer_dies(self):
        self.forget_steps()
        self.queue.register("actor", self.now)
        self.published = self.queue.rollback(self.covered, self.queue.version.incarnation + 1)
        self.rollbacks.append(self.published)
        self.claims, self.overdue = [], False

    @rule(replays=st.booleans(), written=st.booleans(), sure=st.integers(0, 3))
    def machine_dies(self, replays, written, sure):
        if sure:
            return
        if written:
            self.write()
        self.forget_steps()
        incarnation = self.queue.version.incarnation
        self.open(Version("actor", incarnation if replays else incarnation + 1, self.covered))
        account = self.queue.account()
        assert account.in_flight == 0 and account.trained == sum(map(len, self.lineage.values()))

    def forget_steps(self):
        self.lineage = {step: trained for step, trained in self.lineage.items() if step <= self.covered}

    # -- what must always hold ----------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "queue"):
            self.report()
            account = self.queue.account()
            assert account.balanced, account.problem
            assert account.issued == account.trained + sum(account.dropped.values()) + account.in_flight

    @invariant()
    def each_sample_is_trained_once(self):
        if hasattr(self, "lineage"):
            trained = [attempt for step in self.lineage.values() for attempt in step]
            assert len(trained) == len({(a.group, a.sample) for a in trained})
            assert self.queue.account().trained == len(trained)

    @invariant()
    def all_in_flight_still_fits(self):
        if not hasattr(self, "queue") or self.settings.late == "mask" or self.overdue:
            return
        live = self.queue.ledger.live.values()
        due: dict[int, int] = {}
        for group in live:
            if not group.claimed:
                due[group.floor + self.settings.max_staleness] = (
                    due.get(group.floor + self.settings.max_staleness, 0) + 1
                )
        claimed = sum(group.claimed for group in live)
        over = gate.overflow(self.queue.rule, self.queue.version.step, claimed, due)
        assert over <= self.settings.spare_groups

    @invariant()
    def nothing_grows(self):
        if hasattr(self, "queue"):
            k, groups = self.settings.max_staleness, self.settings.groups_per_step
            assert len(self.queue.ledger.live) <= (k + 1) * groups + self.settings.spare_groups
            known = {key for places in self.queue.table.rows.values() for key, _ in places}
            assert known == self.queue.table.blocks.keys()
            assert self.queue.credits.bytes >= 0 and self.queue.credits.kept_bytes >= 0
            assert self.queue.credits.rows == sum(len(group.rows) for group in self.queue.ledger.live.values())

    def finish_a_step(self):
        """Nobody is slow any more: then the step ends without a deadline."""
        for claim in self.claims:
            self.queue.release(claim)
        self.claims, self.now = [], self.now + LEASE_S
        self.published = self.queue.version
        for engine in range(ENGINES):
            self.load(engine)
        goal = self.queue.version.step + 1
        for _ in range(2 * (self.settings.max_staleness + 2) * self.settings.groups_per_step + 4):
            self.admit(4)
            self.report()
            for attempt in sorted(self.held):
                self.seal(attempt)
            self.credit(4, dies=False)
            self.claim(3, overdue=False)
            if sum(len(claim.groups) for claim in self.claims) == self.settings.groups_per_step:
                break
        self.commit()
        assert self.queue.version.step == goal
