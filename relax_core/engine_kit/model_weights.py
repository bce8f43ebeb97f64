# SPDX-License-Identifier: Apache-2.0
"""Weights of a model, as authors of engines meet them: its folder's tensors, what a published version must match, adapters.

An adapter is merged into the weights below it: base + scale * B A, computed in float32 and rounded once. Each one is laid
over the base anew, so that nothing adds up; what arrived is checked before anything changes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from relax_core.api.errors import ConfigError
from relax_core.api.weights import Manifest, TensorInfo, WeightTransport, tensor_fingerprint
from relax_core.tensor_files import safetensors_file

if TYPE_CHECKING:
    import numpy as np
    import torch

FLOATS = ("F32", "F16", "BF16")
_ADAPTER_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


def as_tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    """Copy an array that travelled into a tensor; what numpy has no dtype for comes as bits."""
    import numpy as np
    import torch

    bits = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
    made = torch.from_numpy(np.array(array))
    return made.view(bits[dtype]) if dtype in bits else made


def _as_array(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    """Convert to the array that travels: bf16 as bits."""
    import numpy as np
    import torch

    if dtype == "BF16":
        return tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return tensor.to({"F32": torch.float32, "F16": torch.float16}[dtype]).numpy()


# -- a model folder -----------------------------------------------------------------------------------------------


def folder_arrays(folder: str) -> Iterator[tuple[str, np.ndarray, str]]:
    """Yield (name, array, dtype) of every tensor, mapped: nothing is read before it is looked at."""
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors, dtypes, _ = safetensors_file.read(file)
        for name, array in tensors.items():
            yield name, array, dtypes[name]


def folder_in_dtype(folder: str, dtype: str) -> Iterator[tuple[str, np.ndarray, str]]:
    """Yield the folder's tensors as an engine of this dtype has them; what needs no change stays mapped."""
    for name, array, kept in folder_arrays(folder):
        if kept in FLOATS and kept != dtype and dtype in FLOATS:
            yield name, _as_array(as_tensor(array, kept), dtype), dtype
        else:
            yield name, array, kept


def folder_tensors(folder: str, dtype: str = "") -> dict[str, TensorInfo]:
    """Describe every tensor of the folder's safetensors files, in another dtype where one is given. ConfigError where
    there are none."""
    found = {
        name: TensorInfo(name, array.shape, kept, tensor_fingerprint(array), int(array.nbytes))
        for name, array, kept in folder_in_dtype(folder, dtype)
    }
    if not found and not any(Path(folder).glob("*.safetensors")):
        raise ConfigError("model.path", folder, "this engine reads folders with .safetensors files")
    return found


def check_manifest(manifest: Manifest, known: Mapping[str, TensorInfo], dtype: str = "") -> None:
    """Raise ValueError unless the version is exactly this model, in its own dtypes or all in `dtype`."""
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


# -- adapters -----------------------------------------------------------------------------------------------------


class StagedAdapter(NamedTuple):
    """An adapter that arrived whole and fits the model."""

    pairs: Mapping[str, Mapping[str, torch.Tensor]]
    """By name of the weight: A [rank, in] and B [out, rank], float32."""
    scale: float
    arrived: list[TensorInfo]

    def merged(self, weight: str, base: torch.Tensor) -> torch.Tensor:
        """Return base + scale * B A in float32."""
        pair = self.pairs[weight]
        return base.float() + self.scale * (pair["B"].to(base.device) @ pair["A"].to(base.device))

    def over_folder(self, folder: str, dtype: str) -> Iterator[tuple[str, np.ndarray, str]]:
        """Yield the whole model of a folder with this adapter, in the engine's dtype."""
        for name, array, kept in folder_in_dtype(folder, dtype):
            if name in self.pairs:
                array = _as_array(self.merged(name, as_tensor(array, kept)), dtype)
            yield name, array, kept


def stage_adapter(
    manifest: Manifest, transport: WeightTransport, known: Mapping[str, TensorInfo], table: Mapping[str, Any],
    needed: Collection[str] = (),
) -> StagedAdapter:  # fmt: skip
    """Receive an adapter; ValueError where it is not exactly one for this model.

    `table` is `[model] lora`; `needed` are weights that must have one beside those that it targets.
    """
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    arrived: list[TensorInfo] = []
    for info, array in transport.receive(manifest):
        arrived.append(TensorInfo(info.name, array.shape, info.dtype, tensor_fingerprint(array), int(array.nbytes)))
        found = _ADAPTER_NAME.fullmatch(info.name)
        weight = f"{found['module']}.weight" if found else ""
        if found is None or weight not in known or known[weight].dtype not in FLOATS:
            raise ValueError(f"{manifest.version} {info.name}: this model has no such module for an adapter")
        if info.dtype not in FLOATS:
            raise ValueError(f"{manifest.version} {info.name}: dtype {info.dtype}; adapters are {', '.join(FLOATS)}")
        pairs.setdefault(weight, {})[found["side"]] = as_tensor(array, info.dtype).float()
    targets = tuple(table.get("targets") or ())
    wanted = {name for name in known if name.removesuffix(".weight").rpartition(".")[2] in targets}
    lacking = sorted((wanted | set(needed)) - pairs.keys())
    lacking += sorted(f"{name} (lora_A or lora_B)" for name, pair in pairs.items() if len(pair) != 2)
    if lacking or not pairs:
        raise ValueError(
            f"{manifest.version}: adapters of {lacking[:4] or 'all modules'} are missing; publish all of them"
        )
    rank = int(table["rank"])
    for weight, pair in pairs.items():
        shape, have = known[weight].shape, (tuple(pair["A"].shape), tuple(pair["B"].shape))
        want = ((rank, shape[-1]), (shape[0], rank))
        if len(shape) != 2 or have != want:
            raise ValueError(f"{manifest.version} {weight}: adapters of shapes {have}, want {want} for rank {rank}")
    scale = float(table["alpha"]) / (math.sqrt(rank) if table.get("rslora") else rank)
    return StagedAdapter(pairs, scale, arrived)
