# SPDX-License-Identifier: Apache-2.0
"""The registry of published weights: versions, routes to the newest version, and receivers' proofs.

Transports move the bytes; the registry only records versions. A proof has one of three levels, the weakest first: the
received bytes are correct; so are the bytes in the engine's memory; so are the engine's log-probs of a canary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from relax_core.api.component import Chosen
from relax_core.api.errors import InfrastructureError
from relax_core.api.role import Clock
from relax_core.api.weights import PLAIN, Manifest, Receipt, Version
from relax_core.rpc.waiting import TimedCondition
from relax_core.tensor_files.delta import unchanged_names

Published: TypeAlias = tuple[Manifest, Chosen]
Route: TypeAlias = tuple[Published, ...]
_REMEMBERED = 64
"""Number of versions for which fingerprints are kept, to check receipts that arrive after later publishes."""


@dataclass(slots=True)
class _Expected:
    """The fingerprints that receipts of one version must have."""

    wire: set[str] = field(default_factory=set)
    """Valid fingerprints of the received tensors, one for each published payload."""
    resident: dict[str, str] = field(default_factory=dict)
    """layout -> fingerprint of the memory of the first engine with that layout."""


@dataclass(frozen=True, slots=True)
class _RouteLease:
    """A receiver's lease on the versions of its route; ends when the receiver proves `last`, or at time `until`."""

    receiver: str
    versions: frozenset[Version]
    last: Version
    until: float


@dataclass(slots=True)
class _Model:
    """The registered versions of one model."""

    chain: list[Published] = field(default_factory=list)
    """Versions in the order to load: the last full version or adapters, then deltas up to the newest version."""
    handed_out: bool = False
    """True: the newest version is live and its transfer is over, so receivers can't load it now."""
    expected: dict[Version, _Expected] = field(default_factory=dict)
    proved: dict[str, Version] = field(default_factory=dict)
    """receiver -> version that it last proved."""
    leases: list[_RouteLease] = field(default_factory=list)
    wanting: dict[str, None] = field(default_factory=dict)
    """Receivers that called `want` since the last announcement, in order of time; the values are unused."""

    def newest_after(self, version: Version | None) -> Published | None:
        """Return the newest version if it is later than `version`."""
        if not self.chain or (version is not None and self.chain[-1][0].version[1:] <= version[1:]):
            return None
        return self.chain[-1]

    def end_leases(self, receiver: str) -> None:
        """End the leases of a receiver, which can have one route at a time; ignore an empty name."""
        if receiver:
            self.leases = [lease for lease in self.leases if lease.receiver != receiver]


class WeightRegistry:
    """The versions of every model of a run, and the proofs of each receiver; implements `api.role.WeightService`.

    Invariants:
    - Versions of a model only increase; a version that is published again has the same bytes.
    - A full version or adapters begin a new chain; a delta extends the chain, on top of its newest version.
    - Only a receipt that matches the manifest and the engines of the same layout proves a version.
    - Versions on the chain or on a leased route are needed; all remaining versions may be released.

    A version: `announced -> (live: handed out) -> superseded -> released once no lease needs it`.
    A receiver: `routed (leased) -> loading -> proved`, or `wanting` if no route leads to the newest version.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changes = TimedCondition(clock)
        self._models: defaultdict[str, _Model] = defaultdict(_Model)

    # -- the publisher's side -----------------------------------------------------------------------------------

    async def announce(self, manifest: Manifest, transport: Chosen) -> None:
        """Add a published version; announcing it again only lets a live version be transferred again."""
        model, version, published = self._models[manifest.version.model], manifest.version, (manifest, transport)
        newest = model.chain[-1][0] if model.chain else None
        if not manifest.fingerprint:
            raise InfrastructureError(f"{version}: published without a fingerprint, so receipts can't be checked")
        if newest is not None:
            have = newest.version
            if version.incarnation < have.incarnation:
                raise InfrastructureError(
                    f"{version}: incarnation {version.incarnation} was abandoned; the newest is {have}"
                )
            if not version.supersedes(have):
                raise InfrastructureError(f"{version}: older than the published {have}; versions only go up")
            if version == have and manifest.fingerprint != newest.fingerprint:
                raise InfrastructureError(f"{version}: published twice with different bytes; start a new incarnation")
            prove_successor(newest, manifest, applied=False)
        if newest is not None and newest.version == version and newest.payload == manifest.payload:
            model.chain[-1] = published
        elif manifest.payload != "delta":
            model.chain = [published]
        elif newest is None or newest.payload == "lora" or manifest.base != str(newest.version):
            shown = "nothing" if newest is None else f"{newest.version} ({newest.payload})"
            raise InfrastructureError(
                f"{version}: a delta on top of {manifest.base or 'nothing'}, but the newest is {shown}; "
                "publish a full version"
            )
        else:
            model.chain.append(published)
        model.handed_out = False
        model.wanting.clear()
        if any(old.incarnation != version.incarnation for old in model.expected):
            model.expected.clear()  # receipts of an abandoned incarnation are no longer valid
        expected = model.expected.setdefault(version, _Expected())
        expected.wire.add(manifest.wire_fingerprint)
        if manifest.payload != "lora":
            expected.resident.setdefault(PLAIN, manifest.fingerprint)
        while len(model.expected) > _REMEMBERED:
            del model.expected[next(iter(model.expected))]
        self._changes.notify()

    async def handed_out(self, version: Version) -> None:
        """Record that a live version's transfer has ended, so that receivers can't load the version now."""
        model = self._models[version.model]
        if model.chain and model.chain[-1][0].version == version:
            model.handed_out = True

    async def wanted(self, model: str) -> tuple[str, ...]:
        """Return the receivers that called `want` since the last announcement."""
        return tuple(self._models[model].wanting)

    async def needed(self, model: str) -> frozenset[Version]:
        """Return the versions that must be kept: the chain, and the routes with a valid lease."""
        found, now = self._models[model], self._clock.now()
        found.leases = [lease for lease in found.leases if lease.until > now]
        chain = frozenset(manifest.version for manifest, _ in found.chain)
        return chain.union(*(lease.versions for lease in found.leases))

    # -- the receivers' side ------------------------------------------------------------------------------------

    async def newest(self, model: str, after: Version | None, wait_s: float) -> Published | None:
        """Return the newest version later than `after`; None after `wait_s`."""
        return await self._changes.wait_for(lambda now: self._models[model].newest_after(after), wait_s)

    async def route(
        self, model: str, have: Version | None, wait_s: float, after: Version | None = None, receiver: str = "",
        within_s: float = 300.0,
    ) -> Route:  # fmt: skip
        """Return and lease the versions to load, from `have` to the newest; () if no route appears within `wait_s`."""
        found = self._models[model]

        def leased(now: float) -> Route | None:
            if found.newest_after(after) is None or found.newest_after(have) is None:
                return None
            versions = [manifest.version for manifest, _ in found.chain]
            route = tuple(found.chain[versions.index(have) + 1 :] if have in versions else found.chain)
            # A live version is not stored: receivers can load it only while it is the newest and being transferred.
            passable = (not link[0].live or (link is found.chain[-1] and not found.handed_out) for link in route)
            if not route or not all(passable):
                return None
            found.end_leases(receiver)
            given = frozenset(manifest.version for manifest, _ in route)
            found.leases.append(_RouteLease(receiver, given, route[-1][0].version, now + within_s))
            return route

        return await self._changes.wait_for(leased, wait_s) or ()

    async def want(self, receiver: str, model: str) -> None:
        """Record that a receiver waits for another transfer, because it has no route to the newest version."""
        self._models[model].wanting[receiver] = None

    async def receipt(self, receipt: Receipt) -> bool:
        """Record a receiver's proof; return False if a rollback has abandoned the version.

        Raises InfrastructureError, and forgets the receiver's earlier proof, if the receipt does not match.
        """
        version, model = receipt.version, self._models[receipt.version.model]
        newest = model.chain[-1][0].version if model.chain else None
        if newest is not None and version.incarnation < newest.incarnation:
            return False
        expected = model.expected.get(version)
        if expected is None:
            raise InfrastructureError(f"{receipt.receiver}: a receipt of {version}, which was never published here")
        try:
            _check_receipt(receipt, expected)
        except InfrastructureError:
            model.proved.pop(receipt.receiver, None)
            raise
        model.proved[receipt.receiver] = version
        model.leases = [lease for lease in model.leases if (lease.receiver, lease.last) != (receipt.receiver, version)]
        if version == newest:
            model.wanting.pop(receipt.receiver, None)
        return True

    async def receivers(self, model: str) -> Mapping[str, Version]:
        """Return the version that each receiver last proved."""
        return dict(self._models[model].proved)

    async def forget(self, receiver: str, model: str) -> None:
        """Remove a receiver that left or failed a check, with its proof, its leases and its `want`."""
        found = self._models[model]
        found.proved.pop(receiver, None)
        found.wanting.pop(receiver, None)
        found.end_leases(receiver)


def _check_receipt(receipt: Receipt, expected: _Expected) -> None:
    """Raise InfrastructureError if a receipt does not match.

    The first engine of a layout sets the layout's expected fingerprint; the plain layout must have the published bytes.
    """
    if receipt.fingerprint not in expected.wire:
        want = " or ".join(sorted(expected.wire))
        raise InfrastructureError(
            f"{receipt.receiver}: {receipt.version} differs on arrival: have {receipt.fingerprint}, want {want}; "
            "the receiver must load again before it serves"
        )
    if receipt.level == "wire" or (receipt.level == "behaviour" and not receipt.resident):
        return
    if not receipt.resident or not receipt.layout:
        raise InfrastructureError(
            f"{receipt.receiver}: {receipt.version}: a receipt of level {receipt.level} lacks `resident` or `layout`; "
            "the receiver must load again before it serves"
        )
    want = expected.resident.setdefault(receipt.layout, receipt.resident)
    if receipt.resident != want:
        raise InfrastructureError(
            f"{receipt.receiver}: {receipt.version} differs in memory ({receipt.layout}): have {receipt.resident}, "
            f"want {want}; the receiver must load again before it serves"
        )


def prove_successor(before: Manifest | None, after: Manifest, *, applied: bool) -> None:
    """Raise InfrastructureError for a manifest that can't follow `before`.

    `applied`: an update with a non-zero learning rate came between the two. Publish again, or restart the trainer.
    """
    if before is None or (after.payload == "lora") != (before.payload == "lora"):
        return
    if after.version == before.version:
        return  # the same version again, as a full version instead of a delta
    old = {info.name: (info.shape, info.dtype) for info in before.tensors}
    new = {info.name: (info.shape, info.dtype) for info in after.tensors}
    if old.keys() != new.keys():
        lacking, extra = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
        raise InfrastructureError(
            f"{after.version}: lacks {lacking} and has {extra} beyond {before.version}; publish the whole model"
        )
    for name, have in new.items():
        if have != old[name]:
            raise InfrastructureError(f"{after.version} {name}: have {have}, want {old[name]} as in {before.version}")
    if applied and len(unchanged_names(before, after.tensors)) == len(after.tensors):
        raise InfrastructureError(
            f"{after.version}: all {len(after.tensors)} tensors equal {before.version} although an update was applied; "
            "the publish sent stale bytes or the optimizer updates another copy"
        )
