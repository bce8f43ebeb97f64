# SPDX-License-Identifier: Apache-2.0
"""The part of publishing and loading weights that does not depend on how a trainer holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from relax_core.api import Chosen, InfrastructureError, Manifest, Version, WeightTransport


class RankPublisher:
    """The transports of one rank, and the state of the version that the rank loaded last.

    A subclass sets `_torn` before it changes the first weight and empties it, with `_loaded`, after the last. So
    `_torn` is not empty while the weights mix two versions.
    """

    def __init__(self, build: Callable[[Chosen], Any]) -> None:
        self._build = build
        self._transports: dict[str, WeightTransport] = {}
        self._loaded: Version | None = None
        self._torn = ""

    def check_whole(self) -> None:
        """Raise InfrastructureError if a load broke off, so that the weights mix two versions."""
        if self._torn:
            raise InfrastructureError(f"{self._torn}, so the weights mix two versions; load a full version first")

    def _refuse(self, manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError for a version of another architecture, or a delta whose base this rank does not have.

        `shapes`: those of this rank's model, by published name.
        """
        if manifest.payload == "delta" and (self._torn or manifest.base != str(self._loaded)):
            raise ValueError(
                f"{manifest.version}: delta on top of {manifest.base}; this trainer has {self._loaded}; publish it full"
            )
        sent = {info.name: tuple(info.shape) for info in manifest.tensors}
        differing = sorted(name for name in shapes.keys() | sent.keys() if shapes.get(name) != sent.get(name))
        if differing:
            names = ", ".join(differing[:3])
            raise ValueError(f"{manifest.version}: {names} differ from this model; publish from the same architecture")

    def _transport(self, chosen: Chosen) -> WeightTransport:
        """Return the transport. It is made once, because it compares each version with the version it sent before."""
        key = f"{chosen.name} {sorted(chosen.options.items())}"
        if key not in self._transports:
            self._transports[key] = self._build(chosen)
        return self._transports[key]
