# SPDX-License-Identifier: Apache-2.0
"""Changes that callers ask of a live run: an operation is `requested`, then `done` or `failed`.

A state machine without IO: `Book.ask` and `Book.settle` take what the run's files say, and the time. The caller sends the
requests to the run and keeps the book.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields as dataclass_fields, replace
from typing import Any, Literal, TypeAlias, cast, get_args

from relax_core.api.errors import ConfigError
from relax_core.api.run_commands import NAMES, Command, Profile, ScaleRequest, named_command
from relax_core.engines import scaling
from relax_core.engines.scaling import GOOD, PoolScaling
from relax_core.views.answers import try_draining, try_scaling

PlainAction = Literal["pause", "continue", "stop", "checkpoint", "evaluate"]
Action: TypeAlias = PlainAction | Literal["profile", "scale"]
ACTIONS: tuple[PlainAction, ...] = get_args(PlainAction)
"""Changes without fields."""
OperationState = Literal["requested", "done", "failed"]
MOST_PROFILED = 100
"""Most steps of one request for profiles."""
KEPT = 1000
"""Operations that a book keeps; older ones that are not `requested` are forgotten, and with them their keys."""
_KEY = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class Facts:
    """The state of a run at one time, read from its files."""

    state: str
    """State of the run as in `relax status`."""
    ended: bool
    """True if no process of the run will act on a request: the run has ended or is lost."""
    step: int = 0
    checkpoint: int = 0
    """Step of the newest complete checkpoint; 0: none."""
    pause: str = ""
    """Reason of the run's pause; empty: it is not paused."""
    pid: int = 0
    """Process of the run. A new process has not seen the requests to the former one."""
    sets: int = 0
    """Number of evaluation sets; 0: the run has none."""
    evaluations: int = 0
    """Number of evaluations of a set that have finished so far."""
    profiles: int = 0
    """Number of steps that were profiled so far."""
    pools: Mapping[str, PoolScaling] = field(default_factory=dict)
    """The machine of each engine pool that can be asked to scale."""


@dataclass(frozen=True, slots=True)
class ControlOperation:
    """One change that was asked of the run."""

    id: str
    action: Action
    key: str
    """The caller's idempotency key."""
    state: OperationState
    requested_at: float
    changed_at: float
    """Wall-clock times, in seconds since 1970."""
    step: int
    """Step of the run at the request."""
    pid: int
    detail: str = ""
    evaluations: int = 0
    """Evaluations of a set that had finished at the request."""
    profiles: int = 0
    """Steps that had been profiled at the request."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the command that differ from their defaults, and the pool of a request to scale; without its key."""
    pools: tuple[str, ...] = ()
    """Pools that the action `scale` changes, of which each gets the request."""

    @property
    def command(self) -> Command:
        """The command that was asked of the run."""
        key = {"key": self.key} if self.action == "scale" else {}
        return named_command(self.action, **key, **self.fields)


class Refused(ConfigError):
    """A change that cannot be asked now. `status` is HTTP's: 400 for a wrong request, 409 for a conflict."""

    def __init__(self, status: int, field: str, got: str, fix: str) -> None:
        super().__init__(field, got, fix)
        self.status = status


class Book:
    """The operations of one run, in the order of their requests.

    Invariants:
    - One key belongs to one operation; asking again with the key returns that operation.
    - At most one operation of each action is `requested`; the pools themselves refuse a second `scale`.
    - An operation that is `done` or `failed` never changes.
    """

    def __init__(self, operations: Mapping[str, ControlOperation] | None = None, number: int = 0) -> None:
        """Continue a book; `number` is the number of the last operation ever asked."""
        self.operations, self.number = dict(operations or {}), number

    def ask(self, command: Command, key: str, facts: Facts, now: float) -> tuple[ControlOperation, bool]:
        """Return the operation of a key, and True if the run must now get the command. Raises Refused.

        `key`: that of the command itself, if the command has one. A change that needs nothing of the run is done at
        once: its newest step has a checkpoint, or it has ended.
        """
        action = cast(Action, NAMES[type(command)])
        if not _KEY.fullmatch(key):
            fix = "send a header Idempotency-Key with 1 to 128 printable characters without spaces, new for each change"
            raise Refused(400, "Idempotency-Key", repr(key[:128]), fix)
        known = next((one for one in self.operations.values() if one.key == key), None)
        if known is not None:
            if known.command != command:
                got = f"the key of operation {known.id}, which is another {known.action}"
                raise Refused(409, "Idempotency-Key", got, f"send another key for a {action}")
            return known, False
        self.settle(facts, now)
        if action == "continue" and not facts.pause:
            raise Refused(409, "run", f"a run that is {facts.state}", "only a paused run can be continued")
        if action == "evaluate" and not facts.sets:
            raise Refused(409, "eval.every", "0, so the run has no evaluation sets", "set it when you start a run")
        if isinstance(command, Profile) and not 1 <= command.steps <= MOST_PROFILED:
            raise Refused(400, "steps", f"{command.steps}", f"give a number from 1 to {MOST_PROFILED}")
        pools: tuple[str, ...] = ()
        if isinstance(command, ScaleRequest):
            pools = tuple(operation.pool for operation, _ in expected(command, facts, now))
        elif same := next((one for one in self._open() if one.action == action), None):
            raise Refused(409, "operation", f"{same.id}, which is still requested", f"wait for /operations/{same.id}")
        given = {field.name: (getattr(command, field.name), field.default) for field in dataclass_fields(command)}
        given.pop("key", None)
        fields = {name: value for name, (value, default) in given.items() if value != default or name == "pool"}
        made = ControlOperation(
            f"{self.number + 1}", action, key, "requested", now, now, facts.step, facts.pid, evaluations=facts.evaluations,
            profiles=facts.profiles, fields=fields, pools=pools,
        )  # fmt: skip
        state, detail = _outcome(made, facts)
        if state == "failed":
            raise Refused(409, "run", f"a run that is {facts.state}", "only a live run can be changed")
        made = replace(made, state=state, detail=detail)
        self.number += 1
        self.operations[made.id] = made
        settled = [one for one in self.operations.values() if one.state != "requested"]
        for old in settled[: max(len(self.operations) - KEPT, 0)]:
            del self.operations[old.id]
        return made, state == "requested"

    def settle(self, facts: Facts, now: float) -> list[ControlOperation]:
        """Update the open operations; return those to request again, because the run has a new process."""
        again = []
        for one in self._open():
            state, detail = _outcome(one, facts)
            changed = replace(
                one, state=state, detail=detail, changed_at=now if state != "requested" else one.changed_at
            )
            if state == "requested" and facts.pid not in (0, one.pid):
                changed = replace(changed, pid=facts.pid)
                again.append(changed)
            self.operations[one.id] = changed
        return again

    def plain(self) -> dict[str, object]:
        """Return the book as JSON data, for `Book.of`."""
        return {"number": self.number, "operations": [asdict(one) for one in self.operations.values()]}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Book:
        found = (
            ControlOperation(**{**one, "pools": tuple(one.get("pools", ()))}) for one in document.get("operations", ())
        )
        return cls({one.id: one for one in found}, int(document.get("number", 0)))

    def _open(self) -> list[ControlOperation]:
        return [one for one in self.operations.values() if one.state == "requested"]


def expected(
    request: ScaleRequest, facts: Facts, now: float
) -> list[tuple[scaling.ScalingOperation, list[scaling.Action]]]:
    """Return the operation and the actions that a request to scale would lead to now, for each pool. Raises Refused.

    Only a request without a pool, which drains a node, may change several pools.
    """
    if facts.ended:
        raise Refused(409, "run", f"a run that is {facts.state}", "only a live run can be scaled")
    try:
        if request.node and not request.pool:
            return try_draining(facts.pools, request, now)
        return [try_scaling(facts.pools, request, now)]
    except ConfigError as error:
        unknown = error.field == "pool" and facts.pools
        raise Refused(404 if unknown else 409, error.field, str(error.got), error.fix) from error


def _scaled(one: ControlOperation, facts: Facts) -> tuple[OperationState, str]:
    cancelled = one.fields.get("cancel", "")
    pools = [facts.pools[name] for name in one.pools if name in facts.pools]
    found = [begun for pool in pools if (begun := pool.operations.get(cancelled) or pool.find(one.key)) is not None]
    said = "; ".join(part for begun in found for part in (f"{begun.id} is {begun.state}", begun.detail) if part)
    if len(found) == len(one.pools) and not any(begun.open for begun in found):
        good = ("cancelled",) if cancelled else GOOD
        return ("done" if all(begun.state in good for begun in found) else "failed"), said
    return ("failed", f"the run is {facts.state}") if facts.ended else ("requested", said)


def _outcome(one: ControlOperation, facts: Facts) -> tuple[OperationState, str]:
    """Return the present state of an open operation, and a sentence about it for the caller."""
    if one.action == "scale":
        return _scaled(one, facts)
    if one.action == "stop":
        if facts.ended:
            return ("failed" if facts.state == "lost" else "done"), f"the run is {facts.state}"
        return "requested", "the run saves a checkpoint and ends"
    if one.action == "checkpoint" and facts.checkpoint >= max(one.step, 1):
        return "done", f"checkpoint of step {facts.checkpoint}"
    if one.action == "evaluate" and facts.evaluations >= one.evaluations + facts.sets:
        return "done", f"{facts.evaluations - one.evaluations} evaluations of a set"
    if one.action == "continue" and not (facts.pause and facts.step == one.step):  # a guard may pause it again
        return "done", ""
    if one.action == "profile" and (count := facts.profiles - one.profiles) >= one.fields["steps"]:
        return "done", f"{count} profiled steps, in the run's folder profile/"
    if facts.ended:
        return "failed", f"the run is {facts.state}"
    if one.action == "pause" and facts.pause:
        return "done", facts.pause
    return "requested", "" if one.action == "continue" else "after the current step"
