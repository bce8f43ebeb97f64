# SPDX-License-Identifier: Apache-2.0
"""What a model folder holds, tensor by tensor: the names, shapes and bytes that a published version must match.

For those who write engines whose own memory does not hold tensors under their published names.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from relax_core.api.errors import ConfigError
from relax_core.api.weights import Manifest, TensorInfo, tensor_fingerprint


def folder_tensors(folder: str) -> dict[str, TensorInfo]:
    """Every tensor of the folder's safetensors files. ConfigError where there are none."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ConfigError("model.path", folder, "this engine reads folders with .safetensors files")
    return {info.name: info for file in files for info in _of(file)}


def _of(file: Path) -> Iterator[TensorInfo]:
    import numpy as np

    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                start, end = entry["data_offsets"]
                view = np.frombuffer(mapped, np.uint8, end - start, 8 + length + start)
                print_ = tensor_fingerprint(view)
                del view  # or the map could not be closed
                yield TensorInfo(name, tuple(entry["shape"]), entry["dtype"], print_, end - start)


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
