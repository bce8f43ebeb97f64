# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters laid over a model folder: folder + scale * B A, computed in float32, rounded once. For engine authors.

For engines whose own memory does not hold tensors under their published names: every version is laid over the folder anew
and given whole, so nothing adds up and nothing of it is kept. What arrived is checked before anything changes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from relax_core.api.weights import Manifest, TensorInfo, WeightTransport, combined_fingerprint, tensor_fingerprint
from relax_core.engine_kit.model_folder import folder_arrays

if TYPE_CHECKING:
    import numpy as np
    import torch

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
FLOATS = ("F32", "F16", "BF16")


class StagedMerge(NamedTuple):
    """An adapter that arrived whole."""

    pairs: Mapping[str, Mapping[str, torch.Tensor]]
    """By name of the weight: A [rank, in] and B [out, rank], float32."""
    arrived: list[TensorInfo]


class MergedAdapters:
    """The adapters that one engine merges into its weights; `table` is `[model] lora`, `dtype` the engine's."""

    def __init__(
        self, folder: str, known: Mapping[str, TensorInfo], table: Mapping[str, Any] | None, dtype: str
    ) -> None:
        self._folder, self._known, self._table, self._dtype = folder, known, table, dtype
        self.base = self._base_print() if table is not None else ""
        """Fingerprint of the folder as the trainer has it, in the engine's dtype."""

    def stage(self, manifest: Manifest, transport: WeightTransport) -> StagedMerge:
        """Receive an adapter; ValueError where it is not exactly one for this model."""
        pairs: dict[str, dict[str, torch.Tensor]] = {}
        arrived: list[TensorInfo] = []
        for info, array in transport.receive(manifest):
            arrived.append(TensorInfo(info.name, array.shape, info.dtype, tensor_fingerprint(array), int(array.nbytes)))
            weight, side = self._place(manifest, info)
            pairs.setdefault(weight, {})[side] = _tensor(array, info.dtype).float()
        self._check_whole(manifest, pairs)
        for weight, pair in pairs.items():
            self._check_shapes(manifest, weight, pair)
        return StagedMerge(pairs, arrived)

    def laid(self, staged: StagedMerge) -> Iterator[tuple[str, np.ndarray, str]]:
        """The whole model with this adapter: (name, array, dtype)."""
        scale = _scale(self._table or {})
        for name, array, dtype in folder_in_dtype(self._folder, self._dtype):
            if pair := staged.pairs.get(name):
                base = _tensor(array, dtype).float()
                array = _array(base + scale * (pair["B"] @ pair["A"]), self._dtype)
            yield name, array, dtype

    def _base_print(self) -> str:
        if all(info.dtype == self._dtype for info in self._known.values()):
            return combined_fingerprint(self._known.values())
        return combined_fingerprint(
            TensorInfo(name, array.shape, dtype, tensor_fingerprint(array), int(array.nbytes))
            for name, array, dtype in folder_in_dtype(self._folder, self._dtype)
        )

    def _place(self, manifest: Manifest, info: TensorInfo) -> tuple[str, str]:
        found = _NAME.fullmatch(info.name)
        weight = f"{found['module']}.weight" if found else ""
        if found is None or weight not in self._known or self._known[weight].dtype not in FLOATS:
            raise ValueError(f"{manifest.version} {info.name}: this model has no such module for an adapter")
        if info.dtype not in FLOATS:
            raise ValueError(f"{manifest.version} {info.name}: dtype {info.dtype}; adapters are {', '.join(FLOATS)}")
        return weight, found["side"]

    def _check_whole(self, manifest: Manifest, pairs: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        targets = tuple((self._table or {}).get("targets") or ())
        wanted = {name for name in self._known if name.removesuffix(".weight").rpartition(".")[2] in targets}
        lacking = sorted(wanted - pairs.keys())
        lacking += sorted(f"{name} (lora_A or lora_B)" for name, pair in pairs.items() if len(pair) != 2)
        if lacking or not pairs:
            raise ValueError(
                f"{manifest.version}: adapters of {lacking[:4] or 'all modules'} are missing; publish all of them"
            )

    def _check_shapes(self, manifest: Manifest, weight: str, pair: Mapping[str, torch.Tensor]) -> None:
        rank, shape = int((self._table or {})["rank"]), self._known[weight].shape
        have = tuple(pair["A"].shape), tuple(pair["B"].shape)
        want = ((rank, shape[-1]), (shape[0], rank))
        if len(shape) != 2 or have != want:
            raise ValueError(f"{manifest.version} {weight}: adapters of shapes {have}, want {want} for rank {rank}")


def folder_in_dtype(folder: str, dtype: str) -> Iterator[tuple[str, np.ndarray, str]]:
    """The folder as an engine of this dtype has it, tensor by tensor; what needs no change stays mapped."""
    for name, array, kept in folder_arrays(folder):
        if kept in FLOATS and kept != dtype and dtype in FLOATS:
            yield name, _array(_tensor(array, kept), dtype), dtype
        else:
            yield name, array, kept


def _scale(table: Mapping[str, Any]) -> float:
    rank = int(table["rank"])
    return float(table["alpha"]) / (math.sqrt(rank) if table.get("rslora") else rank)


def _tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    import numpy as np
    import torch

    made = torch.from_numpy(np.array(array))
    return made.view(torch.bfloat16) if dtype == "BF16" else made


def _array(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    """As it travels: bf16 as bits."""
    import numpy as np
    import torch

    if dtype == "BF16":
        return tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return tensor.to({"F32": torch.float32, "F16": torch.float16}[dtype]).numpy()
