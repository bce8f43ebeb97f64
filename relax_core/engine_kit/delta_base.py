# SPDX-License-Identifier: Apache-2.0
"""A copy in host memory of the weights that an engine serves, by their published names, to put deltas on. For engine authors.

For engines whose own memory does not hold tensors under their published names: a delta is made whole from the copy, and the
engine is given whole versions only. It knows of versions what it must to refuse a delta on top of another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from relax_core.api.weights import Manifest, TensorInfo, Version, WeightTransport
from relax_core.engine_kit.merged_adapters import folder_in_dtype

if TYPE_CHECKING:
    import numpy as np


class DeltaBase:
    """Of one engine; it begins with the model folder, in the engine's dtype and mapped until a version replaces it."""

    def __init__(self, folder: str, dtype: str, version: Version) -> None:
        self._arrays = {name: array for name, array, _ in folder_in_dtype(folder, dtype)}
        self._version: Version | None = version
        """None while a version goes by, and for ever where it does not come to its end."""

    def value(self, name: str) -> np.ndarray:
        """What the engine has of a tensor now."""
        return self._arrays[name]

    def refuse(self, delta: Manifest, have: Version) -> None:
        """Raise ValueError unless the delta is on top of what is kept, and that is what the engine serves."""
        if delta.base != str(have):
            raise ValueError(f"{delta.version}: a delta on top of {delta.base}; this engine has {have}")
        if self._version != have:
            raise ValueError(
                f"{delta.version}: a delta, but an adapter lies over the weights here; publish a full version"
            )

    def check(self, delta: Manifest, transport: WeightTransport) -> None:
        """Raise ValueError where what is stored does not give what the manifest says; nothing changes."""
        for _ in transport.receive(delta, self.value):
            pass

    def whole(
        self, manifest: Manifest, arriving: Iterator[tuple[TensorInfo, np.ndarray]]
    ) -> Iterator[tuple[TensorInfo, np.ndarray, bool]]:
        """Every tensor of a version, kept as it goes by, and whether it arrived; of a delta the others follow."""
        self._version = None
        for info, array in arriving:
            self._keep(info.name, array)
            yield info, self._arrays[info.name], True
        sent = {info.name for info in manifest.sent}
        for info in manifest.tensors:
            if info.name not in sent:
                yield info, self._arrays[info.name], False
        self._version = manifest.version

    def _keep(self, name: str, array: np.ndarray) -> None:
        import numpy as np

        have = self._arrays[name]
        if have.flags.writeable and (have.dtype, have.shape) == (array.dtype, array.shape):
            np.copyto(have, array)
        else:
            self._arrays[name] = np.array(array)
