# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters laid over a model's weights: base + scale * B A, computed in float32, rounded once.

The base of the modules that have adapters is kept, so that each version is laid over it anew and nothing adds up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from relax_core.api.weights import Manifest, TensorInfo, WeightTransport, combined_fingerprint, tensor_fingerprint
from relax_plugin_transformers.aside import Aside
from relax_plugin_transformers.resident import Resident

LAYOUT = "hugging-face+adapter"
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_FLOATS: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StagedAdapter(NamedTuple):
    """An adapter that arrived and lies beside the running weights."""

    pairs: dict[str, dict[str, torch.Tensor]]
    """By name of the weight: A [rank, in] and B [out, rank]."""
    wire: str
    """Fingerprint of what arrived."""


class Adapters:
    """The adapters of one engine; `table` is `[model] lora`."""

    def __init__(self, resident: Resident, table: Mapping[str, Any] | None) -> None:
        self._resident, self._table = resident, table
        self._base: dict[str, torch.Tensor] = {}
        self._aside = Aside()

    @property
    def laid(self) -> bool:
        """Whether the weights in memory are not the base's."""
        return bool(self._base)

    def stage(self, manifest: Manifest, transport: WeightTransport) -> StagedAdapter:
        """Receive an adapter; ValueError where it is not exactly one for this model."""
        if self._table is None:
            raise ValueError(f"{manifest.version}: an adapter, but model.lora is not set for this engine")
        pairs: dict[str, dict[str, torch.Tensor]] = {}
        arrived: list[TensorInfo] = []
        for info, array in transport.receive(manifest):
            arrived.append(TensorInfo(info.name, array.shape, info.dtype, tensor_fingerprint(array), int(array.nbytes)))
            weight, side = self._place(manifest, info)
            pairs.setdefault(weight, {})[side] = _tensor(manifest, info, array)
        self._check_whole(manifest, pairs)
        for weight, pair in pairs.items():
            self._check_shapes(manifest, weight, pair)
        return StagedAdapter(pairs, combined_fingerprint(arrived))

    def _place(self, manifest: Manifest, info: TensorInfo) -> tuple[str, str]:
        found = _NAME.fullmatch(info.name)
        weight = f"{found['module']}.weight" if found else ""
        if found is None or weight not in self._resident.tensors:
            raise ValueError(f"{manifest.version} {info.name}: this model has no such module for an adapter")
        return weight, found["side"]

    def _check_whole(self, manifest: Manifest, pairs: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        targets = tuple((self._table or {}).get("targets") or ())
        wanted = {name for name in self._resident.tensors if name.removesuffix(".weight").rpartition(".")[2] in targets}
        lacking = sorted((wanted | self._base.keys()) - pairs.keys())
        lacking += sorted(f"{name} (lora_A or lora_B)" for name, pair in pairs.items() if len(pair) != 2)
        if lacking or not pairs:
            raise ValueError(
                f"{manifest.version}: adapters of {lacking[:4] or 'all modules'} are missing; publish all of them"
            )

    def _check_shapes(self, manifest: Manifest, weight: str, pair: Mapping[str, torch.Tensor]) -> None:
        rank, shape = int((self._table or {})["rank"]), tuple(self._resident.tensors[weight].shape)
        have = tuple(pair["A"].shape), tuple(pair["B"].shape)
        want = ((rank, shape[-1]), (shape[0], rank))
        if len(shape) != 2 or have != want:
            raise ValueError(f"{manifest.version} {weight}: adapters of shapes {have}, want {want} for rank {rank}")

    def load(self, staged: StagedAdapter) -> None:
        """Lay it over the base; called between two iterations."""
        scale = _scale(self._table or {})
        for weight, pair in staged.pairs.items():
            tensor = self._resident.tensors[weight]
            base = self._base.setdefault(weight, tensor.detach().clone())
            low_rank = pair["B"].to(tensor.device) @ pair["A"].to(tensor.device)
            tensor.copy_((base.float() + scale * low_rank).to(tensor.dtype))

    def forget(self) -> None:
        """A whole model was loaded: that is the base now."""
        self._base.clear()
        self._aside.forget()

    def release(self) -> int:
        """Free the memory of what lies below; returns the bytes that are really gone."""
        return self._aside.release(self._base)

    def restore(self) -> None:
        """Undo `release`."""
        self._aside.restore(self._base)


def _scale(table: Mapping[str, Any]) -> float:
    rank = int(table["rank"])
    return float(table["alpha"]) / (math.sqrt(rank) if table.get("rslora") else rank)


def _tensor(manifest: Manifest, info: TensorInfo, array: np.ndarray) -> torch.Tensor:
    if info.dtype not in _FLOATS:
        raise ValueError(f"{manifest.version} {info.name}: dtype {info.dtype}; adapters are {', '.join(_FLOATS)}")
    return torch.from_numpy(np.array(array)).view(_FLOATS[info.dtype]).float()
