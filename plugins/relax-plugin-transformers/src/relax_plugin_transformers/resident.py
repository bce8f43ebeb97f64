# SPDX-License-Identifier: Apache-2.0
"""The weights that a model really holds: by name, checked, replaced whole, fingerprinted where they lie.

Tied weights appear once, under the name `transformers` saves them by. Nothing here knows versions.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from relax_core.api.weights import (
    Manifest,
    TensorInfo,
    WeightTransport,
    combined_fingerprint,
    tensor_fingerprint,
)

_DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_BITS: Mapping[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
Staged = Sequence[tuple[torch.Tensor, np.ndarray]]


class Resident:
    """A module's parameters and saved buffers, each once."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.tensors = dict(_once(module))
        self._specs = {name: (_DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in self.tensors.items()}
        self._aside: Path | dict[str, torch.Tensor] | None = None

    def stage(self, manifest: Manifest, transport: WeightTransport) -> Staged:
        """Receive a version beside the running one; ValueError where it is not exactly this model."""
        if manifest.payload != "full":
            raise ValueError(f"{manifest.version}: payload {manifest.payload!r}; this engine loads full versions only")
        self._check_names(manifest)
        for info in manifest.tensors:
            have, want = (info.dtype, info.shape), self._specs[info.name]
            if have != want:
                raise ValueError(f"{manifest.version} {info.name}: have {have[0]} {have[1]}, want {want[0]} {want[1]}")
        return [(self.tensors[info.name], array) for info, array in transport.receive(manifest)]

    def _check_names(self, manifest: Manifest) -> None:
        given = {info.name for info in manifest.tensors}
        lacking, extra = sorted(self.tensors.keys() - given), sorted(given - self.tensors.keys())
        if lacking or extra or len(given) != len(manifest.tensors):
            raise ValueError(
                f"{manifest.version}: lacks {lacking[:8]}, has {extra[:8]} beyond this model, {len(manifest.tensors)} "
                f"tensors; publish its {len(self.tensors)} tensors, each once"
            )

    def load(self, staged: Staged) -> None:
        """Replace all values; called between two iterations."""
        for tensor, array in staged:
            if tensor.is_cuda:
                _as_bits(tensor).copy_(torch.from_numpy(np.array(array)))
            else:
                np.copyto(_as_bits(tensor).numpy(), array)

    def fingerprint(self) -> str:
        """Of what lies in memory now, comparable with a manifest's."""
        return combined_fingerprint(
            TensorInfo(
                name, tuple(tensor.shape), _DTYPES[tensor.dtype], tensor_fingerprint(_bytes(tensor)), tensor.nbytes
            )
            for name, tensor in self.tensors.items()
        )

    def release(self) -> int:
        """Free the weights' memory, keeping their values elsewhere; returns the bytes that are really gone."""
        if self._aside is not None:
            return 0
        on_gpu = next(iter(self.tensors.values())).is_cuda
        self._aside = {name: tensor.cpu() for name, tensor in self.tensors.items()} if on_gpu else self._to_disk()
        held = [(StorageWeakRef(t.untyped_storage()), t.untyped_storage().nbytes()) for t in self.tensors.values()]
        with torch.inference_mode(False):
            for tensor in self.tensors.values():
                tensor.data = tensor.new_empty(0)
        return sum(size for storage, size in held if storage.expired())

    def _to_disk(self) -> Path:
        with tempfile.NamedTemporaryFile(prefix="relax-asleep-", delete=False) as file:
            for tensor in self.tensors.values():
                file.write(_bytes(tensor).reshape(-1).view(np.uint8).data)
        return Path(file.name)

    def restore(self) -> None:
        """Undo `release`."""
        if self._aside is None:
            return
        with torch.inference_mode(False):
            if isinstance(self._aside, Path):
                self._from_disk(self._aside)
            else:
                for name, tensor in self.tensors.items():
                    tensor.data = self._aside[name].to(tensor.device)
        self.forget_aside()

    def _from_disk(self, path: Path) -> None:
        with path.open("rb") as file:
            for name, tensor in self.tensors.items():
                filled = tensor.new_empty(self._specs[name][1])
                file.readinto(_bytes(filled).reshape(-1).view(np.uint8).data)
                tensor.data = filled

    def forget_aside(self) -> None:
        """Remove what `release` kept."""
        if isinstance(self._aside, Path):
            self._aside.unlink(missing_ok=True)
        self._aside = None


def _once(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and saved buffers in their own memory; tied ones under their first name."""
    saved = module.state_dict(keep_vars=True)
    seen: set[int] = set()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in saved and id(tensor) not in seen:
            seen.add(id(tensor))
            tensor.requires_grad_(False)
            # Loaders may leave a parameter in mapped or shared memory, which could be neither freed nor trusted.
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
            yield name, tensor


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """numpy has no bf16 and no fp8: their bits."""
    return tensor.view(_BITS[tensor.dtype]) if tensor.dtype in _BITS else tensor


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return _as_bits(tensor.detach().cpu()).numpy()
