# SPDX-License-Identifier: Apache-2.0
"""Weights of a model for engine authors: tensors of a model folder, checks of published versions, and adapters.

An adapter is merged into its base weights as base + scale * B A, computed in float32 and rounded once. Each adapter
version is merged into the original base, so that rounding errors do not accumulate, and is checked before any weight
changes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from relax_core.api.errors import ConfigError, PluginError
from relax_core.api.weights import Manifest, Resident, TensorInfo, WeightTransport, tensor_fingerprint
from relax_core.tensor_files import safetensors_file

if TYPE_CHECKING:
    import numpy as np
    import torch

BUCKET_BYTES = 256 << 20
"""Approximate number of bytes of weights that an engine's own loader gets at once."""
FLOATS = ("F32", "F16", "BF16")
ADAPTER_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


def as_tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    """Copy a received array into a tensor; a dtype that numpy lacks (bf16, fp8) arrives as unsigned integers."""
    import numpy as np
    import torch

    bits = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
    made = torch.from_numpy(np.array(array))
    return made.view(bits[dtype]) if dtype in bits else made


def tensor_buckets(arrays: Iterable[tuple[str, np.ndarray, str]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield lists of (name, tensor) of about `BUCKET_BYTES` bytes; the tensors own their memory."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, array, dtype in arrays:
        bucket.append((name, as_tensor(array, dtype)))
        size += array.nbytes
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def as_array(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    """Convert a tensor to the array to send, with bf16 as uint16 bits."""
    import numpy as np
    import torch

    if dtype == "BF16":
        return tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return tensor.to({"F32": torch.float32, "F16": torch.float16}[dtype]).numpy()


# -- a model folder -----------------------------------------------------------------------------------------------


def folder_arrays(folder: str) -> Iterator[tuple[str, np.ndarray, str]]:
    """Yield (name, array, dtype) of every tensor; arrays are memory-mapped, so that data are read on access only."""
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors, dtypes, _ = safetensors_file.read(file)
        for name, array in tensors.items():
            yield name, array, dtypes[name]


def folder_in_dtype(folder: str, dtype: str) -> Iterator[tuple[str, np.ndarray, str]]:
    """Yield the folder's tensors with floats converted to `dtype`; tensors that need no conversion stay mapped."""
    for name, array, kept in folder_arrays(folder):
        if kept in FLOATS and kept != dtype and dtype in FLOATS:
            yield name, as_array(as_tensor(array, kept), dtype), dtype
        else:
            yield name, array, kept


def folder_tensors(folder: str, dtype: str = "") -> dict[str, TensorInfo]:
    """Return the description of every tensor of a folder by name, converted to `dtype` if given.

    Raises ConfigError if the folder has no safetensors files.
    """
    found = {
        name: TensorInfo(name, array.shape, kept, tensor_fingerprint(array), int(array.nbytes))
        for name, array, kept in folder_in_dtype(folder, dtype)
    }
    if not found and not any(Path(folder).glob("*.safetensors")):
        raise ConfigError("model.path", folder, "give a folder with .safetensors files, which this engine reads")
    return found


def check_manifest(manifest: Manifest, known: Mapping[str, TensorInfo], dtype: str = "") -> None:
    """Raise ValueError unless the version has exactly this model's tensors, each in its own dtype or in `dtype`."""
    given = {info.name for info in manifest.tensors}
    lacking, extra = sorted(known.keys() - given), sorted(given - known.keys())
    if lacking or extra or len(given) != len(manifest.tensors):
        raise ValueError(
            f"{manifest.version}: lacks {lacking[:8]}, has {extra[:8]} beyond this model, {len(manifest.tensors)} "
            f"tensors in all; publish the model's {len(known)} tensors, each once"
        )
    for info in manifest.tensors:
        want = known[info.name]
        if info.shape != want.shape or info.dtype not in (want.dtype, dtype):
            have = f"{info.dtype} {info.shape}"
            raise ValueError(f"{manifest.version} {info.name}: have {have}, want {want.dtype} {want.shape}")


# -- adapters -----------------------------------------------------------------------------------------------------


class StagedAdapter(NamedTuple):
    """A received adapter that is complete and fits the model."""

    pairs: Mapping[str, Mapping[str, torch.Tensor]]
    """Matrices `A` [rank, in] and `B` [out, rank], float32, by name of the weight that they change."""
    scale: float
    arrived: list[TensorInfo]

    def merged(self, weight: str, base: torch.Tensor) -> torch.Tensor:
        """Return base + scale * B A in float32."""
        pair = self.pairs[weight]
        return base.float() + self.scale * (pair["B"].to(base.device) @ pair["A"].to(base.device))

    def over_folder(self, folder: str, dtype: str) -> Iterator[tuple[str, np.ndarray, str]]:
        """Yield all tensors of a model folder in `dtype`, with this adapter merged."""
        for name, array, kept in folder_in_dtype(folder, dtype):
            if name in self.pairs:
                array = as_array(self.merged(name, as_tensor(array, kept)), dtype)
            yield name, array, kept


def received(
    transport: WeightTransport, manifest: Manifest, resident: Resident | None = None
) -> Iterator[tuple[TensorInfo, np.ndarray]]:
    """Yield the tensors that a transport receives. Raises PluginError, naming the transport, for any other item."""
    items: Any = transport.receive(manifest, resident)
    if not isinstance(items, Iterable):
        raise _wrong_item(transport, items)
    for item in items:
        is_pair = isinstance(item, tuple) and len(item) == 2
        if not (is_pair and isinstance(item[0], TensorInfo) and hasattr(item[1], "nbytes")):
            raise _wrong_item(transport, item)
        yield item


def _wrong_item(transport: WeightTransport, item: object) -> PluginError:
    got = f"receive(): got {repr(item)[:80]} ({type(item).__qualname__}); yield pairs of a TensorInfo and an array"
    return PluginError(f"weight-transport {type(transport).__qualname__}", got)


def stage_adapter(
    manifest: Manifest, transport: WeightTransport, known: Mapping[str, TensorInfo], table: Mapping[str, Any],
    needed: Collection[str] = (),
) -> StagedAdapter:  # fmt: skip
    """Receive an adapter; raise ValueError if it does not fit this model or lacks a target.

    `table`: the options `model.lora`. `needed`: weights that must have an adapter in addition to the targets.
    """
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    arrived: list[TensorInfo] = []
    for info, array in received(transport, manifest):
        arrived.append(TensorInfo(info.name, array.shape, info.dtype, tensor_fingerprint(array), int(array.nbytes)))
        found = ADAPTER_NAME.fullmatch(info.name)
        weight = f"{found['module']}.weight" if found else ""
        if found is None or weight not in known or known[weight].dtype not in FLOATS:
            raise ValueError(f"{manifest.version} {info.name}: the model has no such module for an adapter")
        if info.dtype not in FLOATS:
            raise ValueError(f"{manifest.version} {info.name}: got dtype {info.dtype}; want {', '.join(FLOATS)}")
        pairs.setdefault(weight, {})[found["side"]] = as_tensor(array, info.dtype).float()
    targets = tuple(table.get("targets") or ())
    wanted = {name for name in known if name.removesuffix(".weight").rpartition(".")[2] in targets}
    lacking = sorted((wanted | set(needed)) - pairs.keys())
    lacking += sorted(f"{name} (lora_A or lora_B)" for name, pair in pairs.items() if len(pair) != 2)
    if lacking or not pairs:
        raise ValueError(
            f"{manifest.version}: adapters of {lacking[:4] or 'all modules'} are missing; publish every adapter"
        )
    rank = int(table["rank"])
    for weight, pair in pairs.items():
        shape, have = known[weight].shape, (tuple(pair["A"].shape), tuple(pair["B"].shape))
        want = ((rank, shape[-1]), (shape[0], rank))
        if len(shape) != 2 or have != want:
            raise ValueError(f"{manifest.version} {weight}: got adapters of shapes {have}, want {want} for rank {rank}")
    scale = float(table["alpha"]) / (math.sqrt(rank) if table.get("rslora") else rank)
    return StagedAdapter(pairs, scale, arrived)
