# SPDX-License-Identifier: Apache-2.0
"""Tensors of a model folder: the names, shapes and bytes that a published version must match.

For authors of engines whose own memory does not hold tensors under their published names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from relax_core.api.errors import ConfigError
from relax_core.api.weights import Manifest, TensorInfo, tensor_fingerprint
from relax_core.tensor_files import safetensors_file

if TYPE_CHECKING:
    import numpy as np


def folder_tensors(folder: str) -> dict[str, TensorInfo]:
    """Describe every tensor of the folder's safetensors files. ConfigError where there are none."""
    found = {
        name: TensorInfo(name, array.shape, dtype, tensor_fingerprint(array), int(array.nbytes))
        for name, array, dtype in folder_arrays(folder)
    }
    if not found and not any(Path(folder).glob("*.safetensors")):
        raise ConfigError("model.path", folder, "this engine reads folders with .safetensors files")
    return found


def folder_arrays(folder: str) -> Iterator[tuple[str, np.ndarray, str]]:
    """Give (name, array, dtype) of every tensor, mapped: nothing is read before it is looked at."""
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors, dtypes, _ = safetensors_file.read(file)
        for name, array in tensors.items():
            yield name, array, dtypes[name]


def check_manifest(manifest: Manifest, known: Mapping[str, TensorInfo], dtype: str) -> None:
    """Raise ValueError unless the version is exactly this model, in the folder's dtype or in the engine's."""
    given = {info.name for info in manifest.tensors}
    lacking, extra = sorted(known.keys() - given), sorted(given - known.keys())
    if lacking or extra or len(given) != len(manifest.tensors):
        raise ValueError(
            f"{manifest.version}: lacks {lacking[:8]}, has {extra[:8]} beyond this model, {len(manifest.tensors)} tensors; "
            f"publish its {len(known)} tensors, each once"
        )
    for info in manifest.tensors:
        want = known[info.name]
        if info.shape != want.shape or info.dtype not in (want.dtype, dtype):
            have = f"{info.dtype} {info.shape}"
            raise ValueError(f"{manifest.version} {info.name}: have {have}, want {want.dtype} {want.shape}")
