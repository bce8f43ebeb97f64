# SPDX-License-Identifier: Apache-2.0
"""The contract of the bus: admission of groups, rows, claims under row leases, and the ledger's account.

Different roles fill the columns of a row at different times. A consumer claims rows whose columns are ready, under its
own task name. The claim is a row lease; each later call with the claim checks that the lease is in force. Every call that
can wait takes `wait_s` and returns an empty result after that time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, Protocol, TypedDict

from relax_core.api.batch import AttemptId, Ragged, RowBatch, RowId
from relax_core.api.component import Configurable, OptionsT
from relax_core.api.trajectory import DropReason, Outcome
from relax_core.api.weights import Version

LateRule = Literal["wait", "mask", "drop", "regenerate"]


@dataclass(frozen=True, slots=True)
class BusSettings:
    """The settings of a run's bus."""

    group_size: int
    groups_per_step: int
    max_staleness: int | None
    """Largest allowed lag in versions (k); None: no bound."""
    late: LateRule = "wait"
    """Rule for groups that are not finished in time: wait, mask stale tokens, drop or regenerate the groups."""
    min_valid: int = 1
    """Fewest valid samples of a group; a group with fewer is dropped."""
    columns: tuple[str, ...] = ()
    """Columns that must be ready before the actor may claim a row."""
    max_rows: int = 1 << 20
    """Largest number of untrained rows on the bus; at this number, producers wait. `max_bytes`: the same in bytes."""
    max_bytes: int = 4 << 30
    lease_s: float = 600.0
    """Seconds until an unused row lease expires; each use renews the lease."""
    steps: int | None = None
    """Number of steps of the run; the bus does not admit a group that no step would train. None: no limit."""
    spare_groups: int = 0
    """Over-sampling: number of extra groups that the bus admits; groups that no step needs are dropped."""
    followers: tuple[str, ...] = ()
    """Tasks that train on the actor's rows later; rows of a trained step stay until each task has acknowledged them."""


@dataclass(frozen=True, slots=True)
class Issue:
    """One admitted group; the producer generates each of its attempts."""

    group: int
    attempts: tuple[AttemptId, ...]
    retry: int = 0
    """Number of regenerations of the group, part of the samples' seeds; an issue after a restart does not count."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """The record of one finished sample that a producer puts on the bus together with the sample's rows."""

    attempt: AttemptId
    num_rows: int
    outcome: Outcome
    reward: float = 0.0
    floor: int = 0
    """Oldest weights version (step) among the sample's trained tokens."""
    trained_tokens: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)
    newest: Mapping[int, int] = field(default_factory=dict)
    """incarnation -> newest step of the weights that sampled the tokens; several entries if a rollback happened during
    the sample. Empty: the actor's version when `put` is called."""
    baseline: bool = False
    """True: a greedy sample, without rows; its reward is the baseline for the rewards of its group."""
    sample_reward: float = 0.0
    """Part of the reward that was given for the whole sample, and not for a turn."""
    masked: bool = False
    """True: a judged sample that is not trained; its rows count only in the statistics of advantages."""


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """A consumer's request for rows of whole groups."""

    task: str
    """Task name of the consumer. A task gets each group once; a group whose lease expired is given out again."""
    columns: tuple[str, ...]
    """Columns that must be ready in every returned row."""
    max_groups: int
    min_groups: int = 1
    """Fewest groups to return; the claim waits for them. For an overdue step, fewer groups are enough for any task."""
    trains: bool = False
    """True: the actor's claim of rows to train. The staleness rule applies, and the samples become `claimed`."""
    step: int = 0
    """With `trains` or `follows`: the step that trains the rows. Step s starts at version s and ends at s + 1."""
    overdue: bool = False
    """With `trains`: the step's deadline has passed. Return the ready groups; the commit ends groups that are late."""
    follows: bool = False
    """True: return all rows that the actor trained in step `step`, after its commit, on every request. `task` must be
    in `BusSettings.followers`. Raises RelaxError if the bus no longer keeps the rows."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A row lease on whole groups; its rows are ordered by group, sample, row."""

    lease: int
    """The fencing token: a number that no other lease has."""
    task: str
    rows: tuple[RowId, ...]
    samples: Mapping[AttemptId, Sealed]
    """Every valid sample of the claimed groups, including samples without rows."""
    groups: tuple[int, ...]
    mask_before: int = 0
    """With `late = "mask"`: tokens sampled by a version below this one are too stale to train; 0: none."""
    versions: Mapping[str, Mapping[int, Version]] = field(default_factory=dict)
    """column -> group -> version of the weights that computed the column; no entry for `put` or fixed weights."""


@dataclass(frozen=True, slots=True)
class Account:
    """The ledger's balance of attempts."""

    issued: int
    trained: int
    trained_without_gradient: int
    dropped: Mapping[str, int]
    in_flight: int
    """Attempts that a producer reports as held, or that are stored and not yet trained."""
    balanced: bool
    """True if ledger, producers, stored rows and leases agree on every attempt's id, not only on counts."""
    problem: str = ""
    """The differences, with the ids of the attempts; empty if balanced."""


class BusStatistics(TypedDict):
    """Statistics of the bus. A length is the sampled tokens rounded up to a power of two, or -1 if unknown."""

    version: int
    """Step of the newest version."""
    rows: int
    bytes: int
    kept_bytes: int
    """Bytes of rows that are kept until a checkpoint contains their step."""
    groups: Mapping[str, int]
    """state -> groups."""
    oldest_group: int
    """Every group with a lower number has ended for good."""
    oldest_open: int
    """Every group with a lower number has ended or was trained."""
    next_group: int
    """Number of the next new group."""
    waited_for: Sequence[int]
    """Numbers of the groups that are not complete."""
    leases: Mapping[int, str]
    """lease -> task."""
    lag_histogram: Mapping[int, int]
    """lag -> trained samples."""
    lag_max: int
    dropped: Mapping[str, int]
    """reason -> dropped samples."""
    dropped_lengths: Mapping[str, Mapping[int, int]]
    """reason -> length -> dropped samples."""
    trained_lengths: Mapping[int, int]
    """length -> trained samples."""


class Bus(Protocol):
    """The bus of a run. Every method is safe to repeat after a lost answer unless its docstring says otherwise."""

    async def register(self, role: str) -> int:
        """Register a role anew and return the number of its registration.

        The role's leases are revoked, and `admit` issues its unfinished groups again.
        """
        ...

    async def admit(self, holder: str, version: Version, limit: int, wait_s: float) -> tuple[Issue, ...]:
        """Return up to `limit` groups that an engine at `version` may start.

        Return () if none may start within `wait_s`. Not safe to repeat: after a lost answer, the role must register.
        """

    async def serves(self, holder: str, version: Version) -> None:
        """Set the version of the holder's oldest engine; a waiting `admit` of the holder uses the new version."""

    async def put(self, batch: RowBatch, sealed: Sequence[Sealed], wait_s: float) -> bool:
        """Store the rows of finished samples with their first columns.

        Return False, and store nothing, if no credit becomes free within `wait_s`. A group with tokens of abandoned
        weights is not stored: it ends as `abandoned` and is issued again.
        """

    async def drop(self, attempts: Sequence[AttemptId], reason: DropReason, regenerate: bool = False) -> None:
        """End attempts. With `regenerate`, end the rest of their groups too, and issue the groups again."""

    async def claim(self, request: ClaimRequest, wait_s: float) -> Claim | None:
        """Lease rows of whole groups; return None if too few groups are ready within `wait_s`."""
        ...

    async def end_awaited(self, step: int) -> tuple[int, ...]:
        """End the unfinished groups that a step waits for; return their numbers. Called after the step's deadline.

        The step waits for the next `groups_per_step` groups in claim order. A group is dropped; with the rule
        `regenerate`, it is issued again unless it was regenerated before.
        """

    async def read(self, claim: Claim, columns: Sequence[str]) -> RowBatch:
        """Return columns of the claimed rows, in claim order. Raises StaleFence."""

    async def write(self, claim: Claim, columns: Mapping[str, Ragged], version: Version | None = None) -> None:
        """Fill derived columns of the claimed rows; raise StaleFence and write nothing if the lease is over.

        `version`: the weights that computed the columns; None for fixed weights.
        """

    async def verify(self, claim: Claim) -> None:
        """Raise StaleFence if the lease is over; the actor calls this before each optimizer step."""

    async def acknowledge(self, claim: Claim) -> None:
        """End a lease whose rows the consumer has finished; not for claims that train."""

    async def release(self, claim: Claim) -> None:
        """End a lease and return its groups, so that the task's next claim can get them."""

    async def trained(self, claims: Sequence[Claim], step: int, without_gradient: Sequence[RowId] = ()) -> Version:
        """Commit the samples of a step whose optimizer update was applied; return the new version, step + 1."""

    async def version(self) -> Version:
        """Return the actor's current version: the number of completed steps."""

    async def report_held(
        self,
        holder: str,
        attempts: frozenset[AttemptId],
        admitted: int,
        given_up: Mapping[AttemptId, int] | None = None,
    ) -> frozenset[AttemptId]:
        """Report the attempts that the holder works on; return those that have ended on the bus.

        `attempts`: every admitted attempt whose put or drop has not returned. `admitted`: number of attempts admitted
        to the holder so far, as the holder counts them. The holder aborts the returned attempts; in a later report,
        `given_up` gives the number of sampled tokens of each aborted attempt.
        """

    async def rollback(self, step: int) -> Version:
        """Undo all training after version `step`, to which the trainer went back; return it in a new incarnation."""

    async def abandoned(self, version: Version) -> bool:
        """Return True if a rollback abandoned these weights: the actor's current weights do not descend from them."""

    async def account(self) -> Account: ...

    async def checkpoint(self, step: int, directory: str, final: bool = True) -> None:
        """Copy the ledger into a checkpoint of version `step`; with `final`, also `finalize` the version."""

    async def finalize(self, step: int) -> None:
        """Free the rows trained up to version `step`; its checkpoint is complete, so no rollback needs the rows."""

    async def keep(self, name: str, value: Mapping[str, Any]) -> None:
        """Store a producer's state (JSON) in the ledger for the current version; replace the last value of `name`."""

    async def kept(self, name: str) -> Mapping[str, Any] | None:
        """Return the last value stored by `keep`, or None.

        In a resumed run, that is the last value stored before the version where the run continues.
        """

    async def statistics(self) -> BusStatistics:
        """Return rows, bytes, groups by state and histograms, for metrics and `relax why`."""

    async def close(self) -> None: ...


class PayloadStore(Protocol):
    """A store of blocks of columns by key. Neither the store nor its caller changes an array after `put`."""

    shared: bool
    """True: a pickled copy in another process reaches the same blocks. False: blocks go through the bus's process."""

    async def put(self, key: int, columns: Mapping[str, Ragged]) -> None:
        """Store a block under a key that was never used before."""

    async def get(self, keys: Sequence[int], columns: Sequence[str]) -> Mapping[int, Mapping[str, Ragged]]:
        """Return the requested columns that each block has."""

    async def free(self, keys: Sequence[int]) -> None:
        """Delete blocks. Unknown keys are ignored."""

    async def close(self) -> None:
        """Delete all blocks; called by the process that opened the store."""


class BusComponent(Configurable[OptionsT], Generic[OptionsT]):
    """A component that opens the store of a run's rows; the bus's rules do not depend on the store."""

    kind: ClassVar[str] = "bus"

    async def open_store(self) -> PayloadStore:
        """Open the store; called once, in the process that hosts the bus."""
        raise NotImplementedError
