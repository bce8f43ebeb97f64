# SPDX-License-Identifier: Apache-2.0
"""The bus as a role sees it: admission, rows, claims under leases, and the ledger's account.

Columns of a row are filled by different roles at different times. A consumer claims rows whose columns are ready,
for its own task name, under a lease whose fencing token is checked on every write.
Every call that can wait takes `wait_s` and returns empty-handed after it; nothing here waits for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, Protocol

from relax_core.api.batch import AttemptId, Cut, Ragged, RowBatch, RowId
from relax_core.api.component import Configurable, OptionsT
from relax_core.api.trajectory import DropReason, Outcome
from relax_core.api.weights import Version

LateRule = Literal["wait", "mask", "drop", "regenerate"]


@dataclass(frozen=True, slots=True)
class BusSettings:
    """The facts of a run that the bus needs."""

    group_size: int
    groups_per_step: int
    max_staleness: int | None
    """k; None is unbounded and must have been asked for by name."""
    late: LateRule = "wait"
    min_valid: int = 1
    """Groups with fewer valid members are dropped."""
    columns: tuple[str, ...] = ()
    """Columns that must be ready before the actor may claim a row."""
    max_rows: int = 1 << 20
    max_bytes: int = 4 << 30
    lease_s: float = 600.0
    steps: int | None = None
    """Of the run: nothing is admitted that no step is left for."""
    spare_groups: int = 0
    """Over-sampling: groups admitted beyond the grant, dropped when not needed."""
    followers: tuple[str, ...] = ()
    """Tasks that train on the actor's rows after it: rows of a trained step stay until each has acknowledged them."""


@dataclass(frozen=True, slots=True)
class Issue:
    """One group admitted: generate each attempt."""

    group: int
    attempts: tuple[AttemptId, ...]
    retry: int = 0
    """Goes into the seeds: counts regenerations, and is 0 again where a resume re-issues the same work."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """The facts about one finished sample that its producer hands in; `num_rows` closes it."""

    attempt: AttemptId
    num_rows: int
    outcome: Outcome
    reward: float = 0.0
    floor: int = 0
    """Oldest step among its trained tokens."""
    trained_tokens: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)
    newest: Mapping[int, int] = field(default_factory=dict)
    """By incarnation of the weights that sampled its tokens, their newest step: a sample that went on over a rollback has
    several. Empty: as new as the actor's version when it was put."""
    baseline: bool = False
    """A greedy sample: it has no rows, and its reward is what its group is compared with."""


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """Rows wanted by one consumer."""

    task: str
    """The consumer's task name: each task sees every row once."""
    columns: tuple[str, ...]
    """Must be ready."""
    max_groups: int
    min_groups: int = 1
    """Fewer than this: keep waiting, then nothing; once the step is overdue, what is ready is enough for any task."""
    trains: bool = False
    """The actor's own claim: the staleness claim rule holds and the samples become `claimed`."""
    step: int = 0
    """trains: the step that will train them. Step s starts at version s and completes version s + 1."""
    overdue: bool = False
    """trains: the step's deadline has passed; take what is ready, and end what no longer fits when it is committed."""
    follows: bool = False
    """All rows that the actor's step `step` trained, once it is committed and however often: for the task of a follower.
    Raises RelaxError where they are no longer kept."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A lease on rows of whole groups, ordered by group, sample, row."""

    lease: int
    fence: int
    task: str
    rows: tuple[RowId, ...]
    samples: Mapping[AttemptId, Sealed]
    """Every valid member of the claimed groups, those without rows too."""
    groups: tuple[int, ...]
    mask_before: int = 0
    """`late = "mask"`: tokens sampled by a step before this one are too stale to train; 0: none."""
    versions: Mapping[str, Mapping[int, Version]] = field(default_factory=dict)
    """By claimed column, then group: the weights that computed it; fixed weights and sampled columns have none."""


@dataclass(frozen=True, slots=True)
class Account:
    """The ledger's balance by id sets. `balanced` compares sets, not sums."""

    issued: int
    trained: int
    trained_without_gradient: int
    dropped: Mapping[str, int]
    in_flight: int
    """Counted from the holders."""
    balanced: bool
    problem: str = ""
    """Names the ids that are missing or twice."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A role's new incarnation; leases of the former one are revoked."""

    incarnation: int
    reissued: int = 0
    """Groups the former incarnation held, which admission will issue again."""


class Bus(Protocol):
    """One a run. Every method is safe to repeat after a lost answer unless said."""

    async def register(self, role: str) -> Registration: ...

    async def admit(self, holder: str, version: Version, limit: int, wait_s: float) -> tuple[Issue, ...]:
        """Groups that an engine at `version` may start now, at most `limit`; empty where the gate holds it.

        Not safe to repeat: a holder that lost the answer registers again.
        """

    async def serves(self, holder: str, version: Version) -> None:
        """The holder's oldest engine is at `version` now; an admission that waits is decided by it."""

    async def put(self, batch: RowBatch, sealed: Sequence[Sealed], wait_s: float) -> bool:
        """Rows of finished samples with their first columns. False after `wait_s` without credit: nothing was stored.

        A group with a sample of abandoned weights is not taken: it ends as abandoned and is issued again.
        """

    async def drop(self, attempts: Sequence[AttemptId], reason: DropReason, regenerate: bool = False) -> None:
        """End attempts; `regenerate` issues their groups again."""

    async def claim(self, request: ClaimRequest, wait_s: float) -> Claim | None: ...

    async def let_go(self, step: int) -> tuple[int, ...]:
        """End the groups that a step was waiting for when its deadline passed without any group to claim.

        Among the groups that come first those that are not finished are ended whole, as the `late` rule says; others
        take their places. Returns their numbers; empty where it is not they who are late.
        """

    async def read(self, claim: Claim, columns: Sequence[str]) -> RowBatch:
        """Columns of the claimed rows, in claim order. Raises StaleFence."""

    async def read_slice(self, claim: Claim, columns: Sequence[str], part: Cut) -> RowBatch:
        """`read`, of each row only this part: what is left out is not sent. For columns that are large."""

    async def write(self, claim: Claim, columns: Mapping[str, Ragged], version: Version | None = None) -> None:
        """Fill derived columns of the claimed rows. Raises StaleFence; nothing is written then."""

    async def verify(self, claim: Claim) -> None:
        """Raise StaleFence unless the lease is still this holder's: the actor's check before the optimizer step."""

    async def acknowledge(self, claim: Claim) -> None:
        """The consumer is done with the rows (not for claims that train)."""

    async def release(self, claim: Claim) -> None:
        """Give the rows back; another claim gets them."""

    async def trained(self, claims: Sequence[Claim], step: int, without_gradient: Sequence[RowId] = ()) -> Version:
        """The step's optimizer update was applied: commit its samples; returns the new version, step + 1."""

    async def version(self) -> Version:
        """The actor's current version: completed steps."""

    async def report_held(
        self,
        holder: str,
        attempts: frozenset[AttemptId],
        admitted: int,
        given_up: Mapping[AttemptId, int] | None = None,
    ) -> frozenset[AttemptId]:
        """The holder's own count of what it works on; `admitted`: attempts admitted to it so far, as it saw them.

        An attempt stays in the count until its put or drop has returned. Returns those of them that have ended
        meanwhile: abort them, and tell in `given_up` of a later report how many tokens each had.
        """

    async def rollback(self, step: int) -> Version:
        """The trainer was restored at version `step`: what came later is undone, under a new incarnation."""

    async def abandoned(self, version: Version) -> bool:
        """Tell whether a rollback gave these weights up: the actor's present ones do not descend from them."""

    async def account(self) -> Account: ...

    async def checkpoint(self, step: int, directory: str, final: bool = True) -> None:
        """Copy the ledger into a checkpoint of version `step`. Where it is `final`, what was trained to get there is, too, and
        its payloads go; else `finalize` says so later."""

    async def finalize(self, step: int) -> None:
        """The checkpoint of version `step` is whole: nothing brings back what was trained to get there."""

    async def keep(self, name: str, value: Mapping[str, Any]) -> None:
        """A producer's own state, JSON, kept with the ledger as of the current version instead of what it kept before."""

    async def kept(self, name: str) -> Mapping[str, Any] | None:
        """Return the value kept last under this name; in a run that continues at a version, the one kept before that
        version."""

    async def statistics(self) -> Mapping[str, Any]:
        """Rows, bytes, groups by state, lag histogram, drops by reason and length: for metrics and `relax why`.

        `oldest_group`: groups below this number have ended for good. `next_group`: the number of the next new one.
        `lag_histogram`: trained samples by lag. `dropped_lengths`: by reason, ended samples by the power of two at or
        above their sampled tokens; -1: nobody told. `trained_lengths`: the same of trained samples.
        """

    async def close(self) -> None: ...


class PayloadStore(Protocol):
    """Keeps blocks of columns by key. Arrays are not changed by either side once they are put."""

    shared: bool
    """Whether a pickled copy in another process reaches the same blocks; otherwise they go through the bus's process."""

    async def put(self, key: int, columns: Mapping[str, Ragged]) -> None:
        """Once a key."""

    async def get(
        self, keys: Sequence[int], columns: Sequence[str], part: Cut | None = None
    ) -> Mapping[int, Mapping[str, Ragged]]:
        """Return, for each block, those of the columns that it has, cut to a part of every row where `part` is
        given."""

    async def free(self, keys: Sequence[int]) -> None:
        """Forget blocks; unknown keys are none."""

    async def close(self) -> None:
        """By the process that opened it: its payloads are gone."""


class BusComponent(Configurable[OptionsT], Generic[OptionsT]):
    """Says where a run's payloads are kept. Admission, claims, leases, credits and the ledger are the same on every bus."""

    kind: ClassVar[str] = "bus"

    async def open_store(self) -> PayloadStore:
        """Called once, in the process that hosts the bus."""
        raise NotImplementedError
