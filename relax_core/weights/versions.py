# SPDX-License-Identifier: Apache-2.0
"""What is published and who proved to have it: a state machine without IO or time.

`WeightBoard` (service.py) puts it behind the `WeightService` protocol of one process.
"""

from __future__ import annotations

from collections.abc import Mapping

from relax_core.api.errors import InfrastructureError
from relax_core.api.trainer import Chosen
from relax_core.api.version import Version
from relax_core.api.weights import Manifest, Receipt
from relax_core.weights.prove import prove_successor

_REMEMBERED = 64
"""Versions whose fingerprints are kept, for receipts that come after the next publish."""


class Versions:
    """Newest manifest by model, fingerprints of recent ones, and each receiver's last proof."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[Manifest, Chosen]] = {}
        self._fingerprints: dict[str, dict[Version, str]] = {}
        self._received: dict[str, dict[str, Version]] = {}

    def announce(self, manifest: Manifest, transport: Chosen) -> None:
        """Take a published version; the same one again changes nothing."""
        version = manifest.version
        newest = self._newest.get(version.model)
        if not manifest.fingerprint:
            raise InfrastructureError(f"{version}: published without a fingerprint; nothing could prove its arrival")
        if newest is not None:
            self._refuse_old(newest[0], manifest)
            if newest[0].version.incarnation == version.incarnation:
                prove_successor(newest[0], manifest, applied=False)
        self._newest[version.model] = (manifest, transport)
        self._remember(version, manifest.fingerprint)

    def _refuse_old(self, newest: Manifest, manifest: Manifest) -> None:
        have, got = newest.version, manifest.version
        if got.incarnation < have.incarnation:
            raise InfrastructureError(f"{got}: incarnation {got.incarnation} was abandoned; the newest is {have}")
        if not got.supersedes(have):
            raise InfrastructureError(f"{got}: older than {have}, which is published; versions only go up")
        if got == have and manifest.fingerprint != newest.fingerprint:
            raise InfrastructureError(f"{got}: published twice with different bytes; start a new incarnation")

    def _remember(self, version: Version, fingerprint: str) -> None:
        known = self._fingerprints.setdefault(version.model, {})
        if any(old.incarnation != version.incarnation for old in known):
            known.clear()
        known[version] = fingerprint
        while len(known) > _REMEMBERED:
            del known[next(iter(known))]

    def newest(self, model: str, after: Version | None) -> tuple[Manifest, Chosen] | None:
        """The newest version where it is later than `after`."""
        newest = self._newest.get(model)
        if newest is None or (after is not None and newest[0].version[1:] <= after[1:]):
            return None
        return newest

    def receipt(self, receipt: Receipt) -> None:
        """Take a receiver's proof; raise where it proves something else."""
        version, newest = receipt.version, self._newest.get(receipt.version.model)
        if newest is not None and version.incarnation < newest[0].version.incarnation:
            raise InfrastructureError(
                f"{receipt.receiver}: proved {version} of an abandoned incarnation; it must load {newest[0].version}"
            )
        want = self._fingerprints.get(version.model, {}).get(version)
        if want is None:
            raise InfrastructureError(f"{receipt.receiver}: proved {version}, which was never published here")
        if receipt.fingerprint != want:
            self.forget(receipt.receiver, version.model)
            raise InfrastructureError(
                f"{receipt.receiver}: {version} differs on arrival: have {receipt.fingerprint}, want {want}; "
                "it must load again before it serves"
            )
        self._received.setdefault(version.model, {})[receipt.receiver] = version

    def receivers(self, model: str) -> Mapping[str, Version]:
        """What each receiver last proved."""
        return dict(self._received.get(model, {}))

    def forget(self, receiver: str, model: str) -> None:
        """It left, or is not to be trusted: it has proved nothing."""
        self._received.get(model, {}).pop(receiver, None)
