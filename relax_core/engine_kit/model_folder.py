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
from typing import TYPE_CHECKING

from relax_core.api.errors import ConfigError
from relax_core.api.weights import Manifest, TensorInfo, tensor_fingerprint

if TYPE_CHECKING:
    import numpy as np

_KINDS: Mapping[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
    "BOOL": "<b1",
}  # fmt: skip
"""As numpy has them; bf16 as bits, and what is not here as bytes."""


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


def folder_arrays(folder: str) -> Iterator[tuple[str, np.ndarray, str]]:
    """(name, array, dtype) of every tensor, mapped: nothing is read before it is looked at."""
    import numpy as np

    for file in sorted(Path(folder).glob("*.safetensors")):
        mapped = np.memmap(file, np.uint8, mode="r")
        start = 8 + int(mapped[:8].view("<u8")[0])
        for name, entry in json.loads(mapped[8:start].tobytes()).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                bits = mapped[start + begin : start + end].view(_KINDS.get(entry["dtype"], "<u1"))
                yield name, bits.reshape(entry["shape"]), entry["dtype"]


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
