# SPDX-License-Identifier: Apache-2.0
"""What receivers of one model proved, compared with what was published and with each other. Pure.

Three proofs build on each other: the bytes that arrived, the bytes that lie in the engine's memory, and (asked by the
pool, not here) what the engine makes of a canary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from relax_core.api.errors import InfrastructureError
from relax_core.api.version import Version
from relax_core.api.weights import PLAIN, Manifest, Receipt

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
