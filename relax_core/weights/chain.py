# SPDX-License-Identifier: Apache-2.0
"""The published versions of one model that a receiver may load: from the last full one to the newest. Pure.

A full version or an adapter begins a new chain; a delta continues it. A live version is not stored: it leads somewhere
only while its sender hands it out, and whoever comes later must want it.
"""

from __future__ import annotations

from typing import TypeAlias

from relax_core.api.errors import InfrastructureError
from relax_core.api.trainer import Chosen
from relax_core.api.version import Version
from relax_core.api.weights import Manifest
from relax_core.weights.prove import prove_successor

Published: TypeAlias = tuple[Manifest, Chosen]
Route: TypeAlias = tuple[Published, ...]


class Chain:
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
