# SPDX-License-Identifier: Apache-2.0
"""The scaling of an engine pool: a state machine from requests and events to joins and leaves. No IO, no clock.

A request names the number of engines that the pool is to have, one engine that is to leave, a machine whose engines are to
leave, or the address of an engine that was started elsewhere and is to join. The state machine chooses which engines join and
leave, and follows each of them. `engines.scaler` performs the actions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias, get_args

from relax_core.api.errors import ConfigError
from relax_core.api.run_commands import ScaleRequest

if TYPE_CHECKING:
    from relax_core.api.plan import Plan
    from relax_core.config.run_config import RunConfig

JoiningStep = Literal["pending", "creating", "health_checking", "weight_syncing", "active"]
LeavingStep = Literal["draining", "removing", "completed"]
Step: TypeAlias = JoiningStep | LeavingStep | Literal["failed"]
"""State of one engine of an operation. A join ends `active`, a leave `completed`; `failed` is a join that left nothing."""
OperationState: TypeAlias = Step | Literal["cancelled", "partial", "noop", "refused"]
"""State of an operation: the step of its engine that is furthest behind, or the end of the operation."""
JOINING: tuple[Step, ...] = get_args(JoiningStep)
LEAVING: tuple[Step, ...] = get_args(LeavingStep)
ORDER: Mapping[str, int] = {step: number for number, step in enumerate(JOINING + LEAVING)}
GOOD: tuple[OperationState, ...] = ("active", "completed", "partial", "noop")
"""States of an operation that has ended well."""
KEPT = 100
"""Operations that are remembered, and with them their keys; older ones that have ended are forgotten."""
MAX_ENGINES = 1024
"""Largest target; a larger one is taken for a typing error."""
_KEY = re.compile(r"[\x21-\x7e]{1,128}")


class Join(NamedTuple):
    """Start an engine with this name, which is new in the run, and this number."""

    engine: str
    number: int
    address: str = ""
    """Address of an engine that was started elsewhere; empty: the run starts the engine."""


class CancelJoin(NamedTuple):
    """Stop an engine that has not joined yet."""

    engine: str


class Leave(NamedTuple):
    """Drain and stop an engine that serves."""

    engine: str


Action: TypeAlias = Join | CancelJoin | Leave


@dataclass(frozen=True, slots=True)
class ScalingOperation:
    """One change of the number of a pool's engines."""

    id: str
    pool: str
    key: str
    target: int
    """Number of engines that the pool is to have after the operation."""
    before: int
    """Number of engines at the request."""
    state: OperationState
    requested_at: float
    changed_at: float
    """Wall-clock times, in seconds since 1970."""
    engine: str = ""
    """Engines that were named to leave, with commas between them; empty: the machine chose."""
    keep_partial: bool = False
    detail: str = ""
    engines: Mapping[str, Step] = field(default_factory=dict)
    undone: Literal["", "failed", "cancelled"] = ""
    """End of the operation once the engines that joined have left again; empty: the operation is not rolled back."""
    address: str = ""
    """Addresses of the engines that were to join from elsewhere, with commas; empty: the run starts the engines that join."""
    node: str = ""
    """Address of the machine whose engines were to leave; empty: no machine was named."""
    refill: bool = False
    """True: the pool gets as many engines elsewhere afterwards, so its target stays."""
    timeout_s: float = 0.0
    """Seconds after the request in which the engines that join must serve; 0: no limit."""
    times: Mapping[str, float] = field(default_factory=dict)
    """State -> wall-clock time at which the operation first had it, for operations that have engines."""

    @property
    def open(self) -> bool:
        return self.state in ORDER and any(
            step not in ("active", "completed", "failed") for step in self.engines.values()
        )


class PoolScaling:
    """The engines of one pool and its operations, in the order of their requests.

    An operation that grows the pool: `pending -> creating -> health_checking -> weight_syncing -> active`, or if an
    engine fails or a person cancels, `-> draining -> removing -> failed | cancelled`; with `keep_partial`, `partial`.
    One that shrinks the pool: `draining -> removing -> completed`. A request that changes nothing: `noop`.

    Invariants:
    - At most one operation is open. It has an action for each of its engines.
    - `engines` holds the engines that have joined and have not left, the oldest first. Protected engines never leave.
    - `external` holds those of them that were started elsewhere. Only engines at `addresses` may join from elsewhere.
    - The newest engines leave first. A name is used once in a run.
    - After an operation the pool has `target` engines, or `before` if the operation was rolled back; fewer if external
      engines were lost meanwhile.
    - Without an open operation `self.target` is the number of the run's own engines, or larger until `refill`.
    - One key belongs to one operation; a repeated request gets the operation of its key.
    """

    def __init__(
        self, pool: str, engines: Sequence[str], protected: int, prefix: str = "engine",
        refusal: tuple[str, str, str] | None = None, addresses: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Begin with these engines.

        `protected`: number of the oldest engines that never leave. `refusal`: (field, got, fix) if the run can't start
        and end engines. `addresses`: the allowed addresses of engines that were started elsewhere.
        """
        self.pool, self.engines, self.prefix, self.refusal = pool, list(engines), prefix, refusal
        self.addresses: tuple[str, ...] = tuple(addresses)
        self.external: dict[str, str] = {}
        """Address of each engine that was started elsewhere, by the engine's name."""
        self.nodes: dict[str, str] = {}
        """Address of the machine of each engine that has a process, by the engine's name; the pool's owner keeps it."""
        self.protected: tuple[str, ...] = tuple(engines[:protected])
        self.operations: dict[str, ScalingOperation] = {}
        self.target = len(engines)
        """Number of own engines that the run is to have; a restart and the end of a machine bring the pool back to it."""
        self._next_engine, self._last_operation = len(engines), 0

    @property
    def open(self) -> ScalingOperation | None:
        """The operation that has not ended yet."""
        return next((one for one in reversed(self.operations.values()) if one.open), None)

    def find(self, key: str) -> ScalingOperation | None:
        """Return the operation of a key; None if no request with the key was accepted, or it is forgotten."""
        return next((one for one in self.operations.values() if one.key == key), None)

    # -- requests -----------------------------------------------------------------------------------------------------

    def ask(self, request: ScaleRequest, now: float) -> tuple[ScalingOperation, list[Action]]:
        """Accept a request; return its operation, and the actions to perform. Raises ConfigError if it is refused."""
        if request.cancel:
            return self._cancel(request.cancel, now)
        if not _KEY.fullmatch(request.key):
            raise ConfigError("key", repr(request.key[:128]), "give 1 to 128 printable characters without spaces")
        known = self.find(request.key)
        if known is not None:
            same = (known.engine, known.address, known.node) == (request.engine, request.address, request.node)
            if not same or request.target not in (None, known.target):
                got = f"the key of operation {known.id}, which asks for something else"
                raise ConfigError("key", got, "send a new key with each change")
            return known, []
        leaving = self._leaving(request)
        if self.refusal is not None and not request.address and not (leaving and self.external.keys() >= set(leaving)):
            raise ConfigError(*self.refusal)
        target = len(self.engines) - len(leaving) if request.node else self._target_of(request)
        if (busy := self.open) is not None:
            asked = (target, request.engine, request.address, request.node)
            if busy.refill or asked != (busy.target, busy.engine, busy.address, busy.node):
                fix = f"wait for its end, or cancel it: relax scale --cancel {busy.id}"
                raise ConfigError("operation", f"{busy.id}, which is {busy.state} in the pool {self.pool}", fix)
            return self._made(request, target, "noop", now, f"operation {busy.id} has the same target"), []
        if not leaving and target == len(self.engines):
            self.target = target - len(self.external)
            return self._made(request, target, "noop", now, f"the pool has {target} engines"), []
        return self._begin(self._made(request, target, "pending", now), leaving)

    def on_node(self, node: str) -> list[str]:
        """Return the engines of the pool on a machine, protected ones too, the oldest first."""
        return [name for name in self.engines if self.nodes.get(name) == node]

    def vacate(self, engines: Iterable[str], now: float, *, refill: bool) -> list[Action]:
        """Let engines leave whose machine is about to end; protected engines stay. Wait for the end of an open operation.

        `refill`: the pool is to have as many engines again. Return the actions to perform; call this again until no
        engine is left.
        """
        leaving = [name for name in engines if name in self.engines and name not in self.protected]
        if not leaving or self.open is not None:
            return []
        request = ScaleRequest(f"machine-{self._last_operation + 1}", self.pool)
        made = self._made(request, len(self.engines) - len(leaving), "pending", now, "a machine is about to end")
        return self._begin(replace(made, refill=refill), leaving)[1]

    def refill(self, now: float) -> list[Action]:
        """Let new engines replace those that `vacate` removed; return the actions to perform, none while an operation is open.

        It is tried once: if no engine can join, the pool stays smaller.
        """
        missing = self.target - (len(self.engines) - len(self.external))
        if missing <= 0 or self.open is not None or self.refusal is not None:
            return []
        target = len(self.engines) + missing
        request = ScaleRequest(f"refill-{self._last_operation + 1}", self.pool, target, keep_partial=True)
        return self._begin(self._made(request, target, "pending", now, "in place of engines whose machine ends"))[1]

    def expire(self, now: float) -> list[Action]:
        """Undo the open operation if its engines do not serve within its `timeout_s`; return the actions to perform."""
        late = self.open
        if (
            late is None
            or late.undone
            or late.target <= late.before
            or not 0 < late.timeout_s < now - late.requested_at
        ):
            return []
        return self._undo(late, "failed", now, f"not done within {late.timeout_s:g} s")[1]

    def refused(self, request: ScaleRequest, why: str, now: float) -> ScalingOperation:
        """Record a request that `ask` refused, so that its sender learns the reason."""
        return self._made(request, request.target or 0, "refused", now, why)

    def _leaving(self, request: ScaleRequest) -> list[str]:
        """Return the engines that a request names to leave. Raises ConfigError if none of a machine can."""
        if not request.node:
            return _listed(request.engine)
        there = self.on_node(request.node)
        if not there:
            known = ", ".join(sorted({self.nodes[name] for name in self.engines if name in self.nodes})) or "none"
            raise ConfigError("node", request.node, f"name a node with engines of the pool {self.pool}: {known}")
        leaving = [name for name in there if name not in self.protected]
        if not leaving:
            got = f"{request.node}, which has only protected engines of the pool {self.pool}: {', '.join(there)}"
            raise ConfigError("node", got, f"the first {len(self.protected)} engines stay, as long as their node does")
        return leaving

    def _target_of(self, request: ScaleRequest) -> int:
        """Return the number of engines after a request. Raises ConfigError if it can't be reached."""
        least = len(self.protected)
        for address in _listed(request.address):
            if address not in self.addresses:
                allowed = f"the run allows {', '.join(self.addresses)}" if self.addresses else "the run allows none"
                fix = f"{allowed}: list the address in placement.rollout.external.addresses when you start a run"
                raise ConfigError("address", address, fix)
            if there := next((name for name, other in self.external.items() if address == other), ""):
                fix = f"wait until the run has noticed its loss, or let it leave: relax scale --drain {there}"
                raise ConfigError("engine", f"{there}, which is at {address} already", fix)
        for engine in _listed(request.engine):
            if engine not in self.engines:
                known = ", ".join(self.engines)
                raise ConfigError("engine", engine, f"name an engine of the pool {self.pool}: {known}")
            if engine in self.protected:
                free = ", ".join(name for name in self.engines if name not in self.protected) or "none"
                fix = f"the first {least} engines stay; engines that may leave: {free}"
                raise ConfigError("engine", f"{engine}, which is protected", fix)
        if request.address or request.engine:
            return len(self.engines) + len(_listed(request.address)) - len(_listed(request.engine))
        if request.target is None or not least <= request.target <= MAX_ENGINES:
            fix = f"the pool {self.pool} keeps its first {least} engines: give {least} to {MAX_ENGINES}"
            raise ConfigError("target", request.target, fix)
        return request.target

    def _made(
        self, request: ScaleRequest, target: int, state: OperationState, now: float, detail: str = ""
    ) -> ScalingOperation:
        self._last_operation += 1
        made = ScalingOperation(
            f"{self.pool}-{self._last_operation}", self.pool, request.key, target, len(self.engines), state, now, now,
            request.engine, request.keep_partial, detail, address=request.address, node=request.node,
            timeout_s=request.timeout_s,
        )  # fmt: skip
        self.operations[made.id] = made
        ended = [one for one in self.operations.values() if not one.open and one.id != made.id]
        for old in ended[: max(len(self.operations) - KEPT, 0)]:
            del self.operations[old.id]
        return made

    def _begin(self, made: ScalingOperation, leaving: Sequence[str] = ()) -> tuple[ScalingOperation, list[Action]]:
        """Start an operation. `leaving`: the engines that leave; empty: chosen here, as the target asks."""
        actions: list[Action] = []
        steps: dict[str, Step] = {}
        if not leaving:
            free = [name for name in reversed(self.engines) if name not in self.protected]
            leaving = free[: max(len(self.engines) - made.target, 0)]
        for name in leaving:
            steps[name] = "draining"
            actions.append(Leave(name))
        for address in _listed(made.address) or [""] * (made.target - len(self.engines)):
            name = f"{self.prefix}-{self._next_engine}"
            steps[name] = "pending"
            actions.append(Join(name, self._next_engine, address))
            self._next_engine += 1
        state: OperationState = "draining" if leaving else "pending"
        begun = replace(made, engines=steps, state=state, times={state: made.changed_at})
        self.operations[made.id] = begun
        return begun, actions

    def _cancel(self, name: str, now: float) -> tuple[ScalingOperation, list[Action]]:
        operation = self.operations.get(name)
        if operation is None:
            known = ", ".join(list(self.operations)[-5:]) or "none"
            raise ConfigError("cancel", name, f"name an operation of the pool {self.pool}: {known}")
        if operation.undone == "cancelled":
            return operation, []
        if not operation.open:
            raise ConfigError(
                "cancel", f"{name}, which is {operation.state}", "only an open operation can be cancelled"
            )
        if operation.undone or operation.target < operation.before:
            fix = "an engine that leaves can't be called back: scale out when the operation has ended"
            raise ConfigError("cancel", f"{name}, which is {operation.state}", fix)
        return self._undo(operation, "cancelled", now, "cancelled by a person")

    # -- events -------------------------------------------------------------------------------------------------------

    def on_step(self, engine: str, step: Step, now: float, detail: str = "") -> list[Action]:
        """Follow an engine of the open operation; return the actions to perform. Late events are ignored.

        The step `failed` of an external engine without an open operation means that the engine was lost.
        """
        operation = self.open
        if step == "failed" and engine in self.external and (operation is None or engine not in operation.engines):
            self._leave(engine)
            return []
        have = operation.engines.get(engine) if operation is not None else None
        if operation is None or have is None or have in ("completed", "failed"):
            return []
        if have in LEAVING and step in JOINING:
            if step != "active" or engine in self.engines:
                return []
            # The engine joined while its cancellation was on its way.
            self._join(engine, operation)
            self._settle(replace(operation, engines={**operation.engines, engine: "draining"}, changed_at=now))
            return [Leave(engine)]
        if have in LEAVING and step == "failed":
            step = "completed"
        if have == "active" or (step != "failed" and ORDER[step] <= ORDER[have]):
            return []
        if step == "active":
            self._join(engine, operation)
        elif step == "completed" and engine in self.engines:
            self._leave(engine)
        operation = replace(operation, engines={**operation.engines, engine: step}, changed_at=now)
        operation = _noted(operation, detail if step == "failed" else "")
        if step == "failed" and not operation.keep_partial:
            return self._undo(operation, "failed", now, "")[1]
        self._settle(operation)
        return []

    def _join(self, engine: str, operation: ScalingOperation) -> None:
        self.engines.append(engine)
        if operation.address:
            self.external[engine] = dict(zip(operation.engines, _listed(operation.address), strict=True))[engine]

    def _leave(self, engine: str) -> None:
        self.engines.remove(engine)
        self.external.pop(engine, None)

    def _settle(self, operation: ScalingOperation) -> ScalingOperation:
        """Give an operation the state that follows from its engines."""
        steps = operation.engines.values()
        if operation.open:
            state: OperationState = min(
                (step for step in steps if step not in ("active", "completed", "failed")), key=lambda step: ORDER[step]
            )
        elif operation.undone:
            state = operation.undone
        elif "failed" not in steps:
            state = "completed" if "completed" in steps else "active"
        else:
            state = "partial" if "active" in steps else "failed"
        times = {state: operation.changed_at, **operation.times}
        settled = self.operations[operation.id] = replace(operation, state=state, times=times)
        if not settled.open and not settled.refill:
            self.target = len(self.engines) - len(self.external)
        return settled

    def _undo(
        self, operation: ScalingOperation, end: Literal["failed", "cancelled"], now: float, detail: str
    ) -> tuple[ScalingOperation, list[Action]]:
        """Let all engines that an operation added leave again."""
        actions: list[Action] = []
        steps = dict(operation.engines)
        for name, step in operation.engines.items():
            if step == "active":
                steps[name] = "draining"
                actions.append(Leave(name))
            elif step in JOINING:
                steps[name] = "removing"
                actions.append(CancelJoin(name))
        undone = replace(_noted(operation, detail), engines=steps, undone=end, changed_at=now)
        return self._settle(undone), actions

    # -- restarts -----------------------------------------------------------------------------------------------------

    def plain(self, last: int = KEPT) -> dict[str, Any]:
        """Return the state with the last operations as JSON data, for `restored` and `of`."""
        return {
            "pool": self.pool, "engines": list(self.engines), "protected": list(self.protected), "prefix": self.prefix,
            "target": self.target, "next_engine": self._next_engine, "last_operation": self._last_operation,
            "refusal": list(self.refusal) if self.refusal else None,
            "addresses": list(self.addresses), "external": dict(self.external), "nodes": dict(self.nodes),
            "operations": [asdict(one) for one in list(self.operations.values())[-last:]],
        }  # fmt: skip

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Return a copy of a machine, to try requests without an effect."""
        refusal = document["refusal"]
        made = cls(document["pool"], document["engines"], 0, document["prefix"], tuple(refusal) if refusal else None)
        made.protected = tuple(document["protected"])
        made.addresses, made.external = tuple(document["addresses"]), dict(document["external"])
        made.nodes = dict(document.get("nodes", {}))
        made._restore(document)
        return made

    def _restore(self, document: Mapping[str, Any]) -> None:
        found: Iterable[ScalingOperation] = (ScalingOperation(**one) for one in document["operations"])
        self.operations = {one.id: one for one in found}
        self.target, self._last_operation = int(document["target"]), int(document["last_operation"])
        self._next_engine = max(self._next_engine, int(document["next_engine"]))

    def restored(self, document: Mapping[str, Any], now: float) -> list[Action]:
        """Take over the operations of the pool's former process; return the actions that finish the open one.

        All engines of the former process are gone, and the pool has the engines of its start. An operation that was
        rolled back is over. An open one is done again, to its target. Without an open one, the pool returns to the
        number of engines that it had. External engines don't count: each of them must ask again to join.
        """
        self._restore(document)
        wanted, least, now_has = self.target, len(self.protected), len(self.engines)
        left, self.target = self.open, now_has
        if left is not None and left.undone:
            self._end_at_restart(left, left.undone, "rolled back by a restart of the pool", now)
        elif left is not None and left.refill:
            self._end_at_restart(left, "completed", "the pool was restarted", now)
        elif left is not None and left.address:
            self._end_at_restart(left, "failed", "the pool was restarted: the engine must ask again to join", now)
        elif left is not None:
            external = [name for name in document.get("external", ()) if left.engines.get(name) not in LEAVING]
            wanted = left.target - len(external)
            if self.refusal is not None or wanted < least:
                self._end_at_restart(left, "failed", "the pool was restarted and can't be scaled any more", now)
            elif wanted == now_has:
                done: OperationState = "active" if left.target > left.before else "completed"
                self._end_at_restart(left, done, f"the pool was restarted with {wanted} engines", now)
            else:
                again = _noted(left, "done again after a restart of the pool")
                return self._begin(replace(again, target=wanted, engines={}, changed_at=now))[1]
        wanted = max(wanted, least)
        if self.refusal is not None or wanted == now_has:
            return []
        request = ScaleRequest(f"restart-{self._last_operation + 1}", self.pool, wanted, keep_partial=True)
        detail = f"the pool was restarted: it returns to {wanted} engines"
        return self._begin(self._made(request, wanted, "pending", now, detail))[1]

    def _end_at_restart(self, operation: ScalingOperation, state: OperationState, detail: str, now: float) -> None:
        """End an operation whose engines are gone with the pool's former process."""
        gone: Mapping[str, Step] = dict.fromkeys(operation.engines, "completed")
        self.operations[operation.id] = replace(_noted(operation, detail), engines=gone, state=state, changed_at=now)


def fixed_size(config: RunConfig, plan: Plan, group: str) -> tuple[str, str, str] | None:
    """Return (field, got, fix) if the run can't start or end engines of a worker group; None if the run can."""
    if (fixed := closed(config, plan, group)) is not None:
        return fixed
    own = sorted(plan.groups[group].devices)
    if any(name.startswith("gpu:") for name in own) and config.run.runner != "ray":
        got = f"engines on {', '.join(own)}"
        fix = 'the run has no further GPU for one more engine: set run.runner = "ray", or scale engines on CPUs'
        return "placement", got, fix
    return None


def closed(config: RunConfig, plan: Plan, group: str) -> tuple[str, str, str] | None:
    """Return (field, got, fix) if no engine, not even an external one, can join a worker group; else None."""
    if config.deterministic:
        return "deterministic", "true", "results depend on the number of engines: scale a run without it"
    if config.run.runner == "inline":
        return "run.runner", "'inline'", "the inline runner has one process for all engines: use 'local' or 'ray'"
    if neighbours := plan.neighbours(group):
        got = f"engines that take turns on their devices with {', '.join(neighbours)}"
        return "placement", got, 'give them devices of their own, as placement = "hybrid" or "async" does'
    return None


def _listed(names: str) -> list[str]:
    """Return the names of a text with commas between them, each once."""
    return list(dict.fromkeys(filter(None, names.split(","))))


def _noted(operation: ScalingOperation, detail: str) -> ScalingOperation:
    """Append a sentence to the detail of an operation."""
    said = "; ".join(part for part in (operation.detail, detail) if part)
    return replace(operation, detail=said)
