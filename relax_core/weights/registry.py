# SPDX-License-Identifier: Apache-2.0
"""What is published, what leads there, who proved to have it: a state machine without IO or time.

`WeightBoard` (service.py) puts it behind the `WeightService` protocol of one process.

The published versions of one model that a receiver may load: from the last full one to the newest. Pure.

A full version or an adapter begins a new chain; a delta continues it. A live version is not stored: it leads somewhere
only while its sender hands it out, and whoever comes later must want it.

What receivers of one model proved, compared with what was published and with each other. Pure.

Three proofs build on each other: the bytes that arrived, the bytes that lie in the engine's memory, and (asked by the
pool, not here) what the engine makes of a canary.

Proof that a publish is what it claims: consecutive manifests compared name by name.

Transports prove that bytes arrived; this catches the right transport of the wrong thing: an update that changed
nothing, a tensor that vanished or was renamed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from relax_core.api.errors import InfrastructureError
from relax_core.api.trainer import Chosen
from relax_core.api.weights import PLAIN, Manifest, Receipt, Version

_REMEMBERED = 64
"""Versions whose fingerprints are kept, for receipts that come after the next publish."""


@dataclass(slots=True)
class _Known:
    """What a version's receipts must say."""

    whole: str
    wire: set[str] = field(default_factory=set)
    """One for each payload it was published as."""
    resident: dict[str, str] = field(default_factory=dict)
    """By layout: what the first engine of that layout has in its memory."""


class Receipts:
    """Of one model."""

    def __init__(self) -> None:
        self._known: dict[Version, _Known] = {}
        self._proved: dict[str, Version] = {}

    def expect(self, manifest: Manifest) -> None:
        """A version was published: this is what its receipts must say. An abandoned incarnation's are refused now."""
        version = manifest.version
        if any(old.incarnation != version.incarnation for old in self._known):
            self._known.clear()
        known = self._known.setdefault(version, _Known(manifest.fingerprint))
        known.wire.add(manifest.wire_fingerprint)
        if manifest.payload != "lora":
            known.resident.setdefault(PLAIN, manifest.fingerprint)
        while len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]

    def take(self, receipt: Receipt) -> None:
        """A receiver's proof; raises where it proves something else, and then it has proved nothing."""
        known = self._known.get(receipt.version)
        if known is None:
            raise InfrastructureError(f"{receipt.receiver}: proved {receipt.version}, which was never published here")
        try:
            _check_wire(receipt, known)
            _check_resident(receipt, known)
        except InfrastructureError:
            self.forget(receipt.receiver)
            raise
        self._proved[receipt.receiver] = receipt.version

    @property
    def receivers(self) -> Mapping[str, Version]:
        """What each receiver last proved."""
        return dict(self._proved)

    def forget(self, receiver: str) -> None:
        """It left, or is not to be trusted: it has proved nothing."""
        self._proved.pop(receiver, None)


def _check_wire(receipt: Receipt, known: _Known) -> None:
    if receipt.fingerprint not in known.wire:
        want = " or ".join(sorted(known.wire))
        raise InfrastructureError(
            f"{receipt.receiver}: {receipt.version} differs on arrival: have {receipt.fingerprint}, want {want}; "
            "it must load again before it serves"
        )


def _check_resident(receipt: Receipt, known: _Known) -> None:
    """The first engine of a layout sets what the others of it must have; plain layouts must have what was published."""
    if receipt.level == "wire" or (receipt.level == "behaviour" and not receipt.resident):
        return
    if not receipt.resident or not receipt.layout:
        raise InfrastructureError(
            f"{receipt.receiver}: {receipt.version}: a receipt of level {receipt.level} names neither what lies in its "
            "memory nor its layout; it must load again before it serves"
        )
    want = known.resident.setdefault(receipt.layout, receipt.resident)
    if receipt.resident != want:
        raise InfrastructureError(
            f"{receipt.receiver}: {receipt.version} differs in memory ({receipt.layout}): have {receipt.resident}, want "
            f"{want}; it must load again before it serves"
        )


def prove_successor(before: Manifest | None, after: Manifest, *, applied: bool) -> None:
    """Refuse a manifest that can't follow `before`; `applied`: an update with a non-zero learning rate lies between.

    Raises InfrastructureError, since only a new publish or a restart of the trainer helps.
    """
    if before is None or (after.payload == "lora") != (before.payload == "lora"):
        return
    if after.version == before.version:
        return  # the same one again, whole instead of as a delta
    _prove_names(before, after)
    if applied and unchanged_names(before, after) == frozenset(info.name for info in after.tensors):
        raise InfrastructureError(
            f"{after.version}: all {len(after.tensors)} tensors equal {before.version} although an update was applied; "
            "the publish sent stale bytes or the optimizer updates another copy"
        )


def unchanged_names(before: Manifest, after: Manifest) -> frozenset[str]:
    """Names whose bytes are the same in both."""
    old = {info.name: info.fingerprint for info in before.tensors}
    return frozenset(info.name for info in after.tensors if old.get(info.name) == info.fingerprint)


def _prove_names(before: Manifest, after: Manifest) -> None:
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


Published: TypeAlias = tuple[Manifest, Chosen]
Route: TypeAlias = tuple[Published, ...]


class VersionChain:
    """Manifests in the order in which they are loaded; the last is the newest."""

    def __init__(self) -> None:
        self._links: list[Published] = []
        self._shut = False

    @property
    def newest(self) -> Published | None:
        return self._links[-1] if self._links else None

    @property
    def versions(self) -> frozenset[Version]:
        """Of all links: their bytes must stay where they are."""
        return frozenset(manifest.version for manifest, _ in self._links)

    def add(self, manifest: Manifest, transport: Chosen) -> None:
        """Take a published version; the same one again changes nothing but opens a live one's door."""
        if not manifest.fingerprint:
            raise InfrastructureError(f"{manifest.version}: published without a fingerprint; nothing could prove it")
        if self._links:
            _refuse_old(self._links[-1][0], manifest)
            prove_successor(self._links[-1][0], manifest, applied=False)
        again = bool(self._links) and self._links[-1][0].version == manifest.version
        if again and manifest.payload == self._links[-1][0].payload:
            self._links[-1] = (manifest, transport)
        elif manifest.payload == "delta":
            self._follow(manifest, transport)
        else:
            self._links = [(manifest, transport)]
        self._shut = False

    def _follow(self, manifest: Manifest, transport: Chosen) -> None:
        newest = self._links[-1][0] if self._links else None
        if newest is None or newest.payload == "lora" or manifest.base != str(newest.version):
            have = "nothing" if newest is None else f"{newest.version} ({newest.payload})"
            raise InfrastructureError(
                f"{manifest.version}: a delta on top of {manifest.base or 'nothing'}, but the newest is {have}; "
                "publish a full version"
            )
        self._links.append((manifest, transport))

    def shut(self, version: Version) -> None:
        """The live version was handed out: it leads nowhere any more."""
        if self._links and self._links[-1][0].version == version:
            self._shut = True

    def route(self, have: Version | None) -> Route:
        """What leads from `have` to the newest; empty where it is there already, or where nothing leads."""
        places = [manifest.version for manifest, _ in self._links]
        route = self._links[places.index(have) + 1 :] if have in places else self._links
        return tuple(route) if route and all(map(self._leads, route)) else ()

    def _leads(self, link: Published) -> bool:
        return not link[0].live or (link is self._links[-1] and not self._shut)


def _refuse_old(newest: Manifest, manifest: Manifest) -> None:
    have, got = newest.version, manifest.version
    if got.incarnation < have.incarnation:
        raise InfrastructureError(f"{got}: incarnation {got.incarnation} was abandoned; the newest is {have}")
    if not got.supersedes(have):
        raise InfrastructureError(f"{got}: older than {have}, which is published; versions only go up")
    if got == have and manifest.fingerprint != newest.fingerprint:
        raise InfrastructureError(f"{got}: published twice with different bytes; start a new incarnation")


@dataclass(frozen=True, slots=True)
class _RouteLease:
    """A route that was given: its versions stay until the receiver proved the last, or until the deadline."""

    receiver: str
    versions: frozenset[Version]
    last: Version
    until: float


@dataclass(slots=True)
class _Model:
    chain: VersionChain = field(default_factory=VersionChain)
    receipts: Receipts = field(default_factory=Receipts)
    loans: list[_RouteLease] = field(default_factory=list)
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
            found.loans.append(_RouteLease(receiver, given, route[-1][0].version, until))
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
