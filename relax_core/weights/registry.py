# SPDX-License-Identifier: Apache-2.0
"""The registry of published weights: versions, the routes that lead to them, and receivers' proofs of having them.

A state machine without IO or waiting (service.py waits around it). It moves no bytes: transports do. Three proofs build on each
other: the bytes that arrived, the bytes that lie in an engine's memory, and (asked by the engine pool) what the engine makes of
a canary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from relax_core.api.component import Chosen
from relax_core.api.errors import InfrastructureError
from relax_core.api.weights import PLAIN, Manifest, Receipt, Version
from relax_core.tensor_files.delta import unchanged_names

Published: TypeAlias = tuple[Manifest, Chosen]
Route: TypeAlias = tuple[Published, ...]
_REMEMBERED = 64
"""Versions whose fingerprints are kept, for receipts that come after the next publish."""


@dataclass(slots=True)
class _Expected:
    """The values that receipts of one version must have."""

    wire: set[str] = field(default_factory=set)
    """Fingerprints of what arrives, one for each payload it was published as."""
    resident: dict[str, str] = field(default_factory=dict)
    """By layout: what the first engine of that layout has in its memory."""


@dataclass(frozen=True, slots=True)
class _RouteLease:
    """A route that was given: its versions stay until the receiver proved the last, or until the deadline."""

    receiver: str
    versions: frozenset[Version]
    last: Version
    until: float


@dataclass(slots=True)
class _Model:
    """All that is known of one model's versions."""

    chain: list[Published] = field(default_factory=list)
    """From the last full version or adapter to the newest, in the order in which they are loaded."""
    handed_out: bool = False
    """The newest version is live and its transfer is over, so that it leads nowhere any more."""
    expected: dict[Version, _Expected] = field(default_factory=dict)
    proved: dict[str, Version] = field(default_factory=dict)
    leases: list[_RouteLease] = field(default_factory=list)
    wanting: dict[str, None] = field(default_factory=dict)
    """Receivers that want the newest version, in the order in which they came."""

    @property
    def newest(self) -> Manifest | None:
        return self.chain[-1][0] if self.chain else None

    def end_leases(self, receiver: str) -> None:
        """End a receiver's route: it is on one at a time. Receivers without a name are nobody in particular."""
        if receiver:
            self.leases = [lease for lease in self.leases if lease.receiver != receiver]


class WeightRegistry:
    """Versions of every model of a run, and who proved to have which.

    Invariants:
    - Versions of a model only go up; a version that is published again has the same bytes.
    - A full version or an adapter begins a new chain; a delta continues it on top of its newest version.
    - A receiver has proved a version only by a receipt that agrees with the manifest and with engines of the same layout.
    - Bytes of versions on the chain or on a leased route are needed; all others may be released.

    A version: `announced -> (live: handed out) -> superseded -> released once no lease needs it`.
    A receiver: `routed (leased) -> loading -> proved`, or `wanting` where nothing leads it to the newest version.
    """

    def __init__(self) -> None:
        self._models: defaultdict[str, _Model] = defaultdict(_Model)

    # -- the publisher's side -----------------------------------------------------------------------------------

    def announce(self, manifest: Manifest, transport: Chosen) -> None:
        """Take a published version; the same one again changes nothing but hands a live one out again."""
        model, version, published = self._models[manifest.version.model], manifest.version, (manifest, transport)
        newest = model.newest
        if not manifest.fingerprint:
            raise InfrastructureError(f"{version}: published without a fingerprint; nothing could prove it")
        if newest is not None:
            _refuse_old(newest, manifest)
            prove_successor(newest, manifest, applied=False)
        if newest is not None and newest.version == version and newest.payload == manifest.payload:
            model.chain[-1] = published
        elif manifest.payload != "delta":
            model.chain = [published]
        elif newest is None or newest.payload == "lora" or manifest.base != str(newest.version):
            have = "nothing" if newest is None else f"{newest.version} ({newest.payload})"
            raise InfrastructureError(
                f"{version}: a delta on top of {manifest.base or 'nothing'}, but the newest is {have}; "
                "publish a full version"
            )
        else:
            model.chain.append(published)
        model.handed_out = False
        model.wanting.clear()
        self._expect(model, manifest)

    def _expect(self, model: _Model, manifest: Manifest) -> None:
        """Remember what the version's receipts must say; those of an abandoned incarnation are refused from now on."""
        version = manifest.version
        if any(old.incarnation != version.incarnation for old in model.expected):
            model.expected.clear()
        expected = model.expected.setdefault(version, _Expected())
        expected.wire.add(manifest.wire_fingerprint)
        if manifest.payload != "lora":
            expected.resident.setdefault(PLAIN, manifest.fingerprint)
        while len(model.expected) > _REMEMBERED:
            del model.expected[next(iter(model.expected))]

    def handed_out(self, version: Version) -> None:
        """A live version's transfer is over: it leads nowhere any more."""
        model = self._models[version.model]
        if model.newest is not None and model.newest.version == version:
            model.handed_out = True

    def wanted(self, model: str) -> tuple[str, ...]:
        """Receivers that want the newest version since the last announcement."""
        return tuple(self._models[model].wanting)

    def needed(self, model: str, now: float) -> frozenset[Version]:
        """Versions on the chain, and those of routes that a receiver may still be on; all others may be released."""
        found = self._models[model]
        found.leases = [lease for lease in found.leases if lease.until > now]
        chain = frozenset(manifest.version for manifest, _ in found.chain)
        return chain.union(*(lease.versions for lease in found.leases))

    # -- the receivers' side ------------------------------------------------------------------------------------

    def newest(self, model: str, after: Version | None) -> Published | None:
        """The newest version where it is later than `after`."""
        chain = self._models[model].chain
        if not chain or (after is not None and chain[-1][0].version[1:] <= after[1:]):
            return None
        return chain[-1]

    def route(self, model: str, have: Version | None, receiver: str, until: float) -> Route:
        """Versions that lead a receiver from `have` to the newest, leased `until` then; empty where nothing leads there."""
        found = self._models[model]
        if self.newest(model, have) is None:
            return ()
        versions = [manifest.version for manifest, _ in found.chain]
        route = tuple(found.chain[versions.index(have) + 1 :] if have in versions else found.chain)
        # A live version is not stored: it leads somewhere only while it is the newest and its sender hands it out.
        passable = (not link[0].live or (link is found.chain[-1] and not found.handed_out) for link in route)
        if not route or not all(passable):
            return ()
        found.end_leases(receiver)
        given = frozenset(manifest.version for manifest, _ in route)
        found.leases.append(_RouteLease(receiver, given, route[-1][0].version, until))
        return route

    def want(self, receiver: str, model: str) -> None:
        """Note a receiver that nothing leads to the newest version: it waits for the publisher to hand that out again."""
        self._models[model].wanting[receiver] = None

    def receipt(self, receipt: Receipt) -> None:
        """Take a receiver's proof; raise where it proves something else, and then it has proved nothing."""
        version, model = receipt.version, self._models[receipt.version.model]
        newest = model.newest
        if newest is not None and version.incarnation < newest.version.incarnation:
            raise InfrastructureError(
                f"{receipt.receiver}: proved {version} of an abandoned incarnation; it must load {newest.version}"
            )
        expected = model.expected.get(version)
        if expected is None:
            raise InfrastructureError(f"{receipt.receiver}: proved {version}, which was never published here")
        try:
            _check_receipt(receipt, expected)
        except InfrastructureError:
            model.proved.pop(receipt.receiver, None)
            raise
        model.proved[receipt.receiver] = version
        model.leases = [lease for lease in model.leases if (lease.receiver, lease.last) != (receipt.receiver, version)]
        if newest is not None and version == newest.version:
            model.wanting.pop(receipt.receiver, None)

    def receivers(self, model: str) -> Mapping[str, Version]:
        """The version that each receiver last proved."""
        return dict(self._models[model].proved)

    def forget(self, receiver: str, model: str) -> None:
        """Drop a receiver that left or is not to be trusted: it has proved nothing, reads nothing and wants nothing."""
        found = self._models[model]
        found.proved.pop(receiver, None)
        found.wanting.pop(receiver, None)
        found.end_leases(receiver)


def _check_receipt(receipt: Receipt, expected: _Expected) -> None:
    """Refuse a proof of other bytes. The first engine of a layout sets what the others of it must have in their memory;
    plain layouts must have what was published."""
    if receipt.fingerprint not in expected.wire:
        want = " or ".join(sorted(expected.wire))
        raise InfrastructureError(
            f"{receipt.receiver}: {receipt.version} differs on arrival: have {receipt.fingerprint}, want {want}; "
            "it must load again before it serves"
        )
    if receipt.level == "wire" or (receipt.level == "behaviour" and not receipt.resident):
        return
    if not receipt.resident or not receipt.layout:
        raise InfrastructureError(
            f"{receipt.receiver}: {receipt.version}: a receipt of level {receipt.level} names neither what lies in its "
            "memory nor its layout; it must load again before it serves"
        )
    want = expected.resident.setdefault(receipt.layout, receipt.resident)
    if receipt.resident != want:
        raise InfrastructureError(
            f"{receipt.receiver}: {receipt.version} differs in memory ({receipt.layout}): have {receipt.resident}, want "
            f"{want}; it must load again before it serves"
        )


def _refuse_old(newest: Manifest, manifest: Manifest) -> None:
    have, got = newest.version, manifest.version
    if got.incarnation < have.incarnation:
        raise InfrastructureError(f"{got}: incarnation {got.incarnation} was abandoned; the newest is {have}")
    if not got.supersedes(have):
        raise InfrastructureError(f"{got}: older than {have}, which is published; versions only go up")
    if got == have and manifest.fingerprint != newest.fingerprint:
        raise InfrastructureError(f"{got}: published twice with different bytes; start a new incarnation")


def prove_successor(before: Manifest | None, after: Manifest, *, applied: bool) -> None:
    """Refuse a manifest that can't follow `before`; `applied`: an update with a non-zero learning rate lies between.

    Raises InfrastructureError, since only a new publish or a restart of the trainer helps.
    """
    if before is None or (after.payload == "lora") != (before.payload == "lora"):
        return
    if after.version == before.version:
        return  # the same one again, whole instead of as a delta
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
