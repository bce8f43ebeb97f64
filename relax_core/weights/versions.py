# SPDX-License-Identifier: Apache-2.0
"""What is published, what leads there, who proved to have it: a state machine without IO or time.

`WeightBoard` (service.py) puts it behind the `WeightService` protocol of one process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from relax_core.api.errors import InfrastructureError
from relax_core.api.trainer import Chosen
from relax_core.api.version import Version
from relax_core.api.weights import Manifest, Receipt
from relax_core.weights.chain import Chain, Published, Route
from relax_core.weights.receipts import Receipts


@dataclass(frozen=True, slots=True)
class _Loan:
    """A route that was given: its versions stay until the receiver proved the last, or until the deadline."""

    receiver: str
    versions: frozenset[Version]
    last: Version
    until: float


@dataclass(slots=True)
class _Model:
    chain: Chain = field(default_factory=Chain)
    receipts: Receipts = field(default_factory=Receipts)
    loans: list[_Loan] = field(default_factory=list)
    door: dict[str, None] = field(default_factory=dict)
    """Receivers that want the newest version, in the order in which they came."""


class Versions:
    """Of every model of a run."""

    def __init__(self) -> None:
        self._models: defaultdict[str, _Model] = defaultdict(_Model)

    # -- the publisher's side -----------------------------------------------------------------------------------

    def announce(self, manifest: Manifest, transport: Chosen) -> None:
        """Take a published version; the same one again changes nothing. Who stood at the door is let in."""
        model = self._models[manifest.version.model]
        model.chain.add(manifest, transport)
        model.receipts.expect(manifest)
        model.door.clear()

    def handed_out(self, version: Version) -> None:
        """A live version's transfer is over."""
        self._models[version.model].chain.shut(version)

    def wanted(self, model: str) -> tuple[str, ...]:
        """Receivers at the door since the last announcement."""
        return tuple(self._models[model].door)

    def needed(self, model: str, now: float) -> frozenset[Version]:
        """Versions on the chain, and those of routes that a receiver may still be on; all others may be released."""
        found = self._models[model]
        found.loans = [loan for loan in found.loans if loan.until > now]
        return found.chain.versions.union(*(loan.versions for loan in found.loans))

    # -- the receivers' side ------------------------------------------------------------------------------------

    def newest(self, model: str, after: Version | None) -> Published | None:
        """The newest version where it is later than `after`."""
        newest = self._models[model].chain.newest
        if newest is None or (after is not None and newest[0].version[1:] <= after[1:]):
            return None
        return newest

    def route(self, model: str, have: Version | None, receiver: str, until: float) -> Route:
        """What leads a receiver from `have` to the newest version; it is kept for it `until` then."""
        found = self._models[model]
        if self.newest(model, have) is None:
            return ()
        route = found.chain.route(have)
        if route:
            self._settle(found, receiver)
            given = frozenset(manifest.version for manifest, _ in route)
            found.loans.append(_Loan(receiver, given, route[-1][0].version, until))
        return route

    def want(self, receiver: str, model: str) -> None:
        """Nothing leads it to the newest version: it waits for the publisher to hand that out again."""
        self._models[model].door[receiver] = None

    def receipt(self, receipt: Receipt) -> None:
        """Take a receiver's proof; raise where it proves something else."""
        version, model = receipt.version, self._models[receipt.version.model]
        newest = model.chain.newest
        if newest is not None and version.incarnation < newest[0].version.incarnation:
            raise InfrastructureError(
                f"{receipt.receiver}: proved {version} of an abandoned incarnation; it must load {newest[0].version}"
            )
        model.receipts.take(receipt)
        model.loans = [loan for loan in model.loans if (loan.receiver, loan.last) != (receipt.receiver, version)]
        if newest is not None and version == newest[0].version:
            model.door.pop(receipt.receiver, None)

    def receivers(self, model: str) -> Mapping[str, Version]:
        """What each receiver last proved."""
        return self._models[model].receipts.receivers

    def forget(self, receiver: str, model: str) -> None:
        """It left, or is not to be trusted: it has proved nothing, reads nothing and wants nothing."""
        found = self._models[model]
        found.receipts.forget(receiver)
        found.door.pop(receiver, None)
        self._settle(found, receiver)

    def _settle(self, model: _Model, receiver: str) -> None:
        """A receiver is on one route at a time; those that gave no name are nobody in particular."""
        if receiver:
            model.loans = [loan for loan in model.loans if loan.receiver != receiver]
