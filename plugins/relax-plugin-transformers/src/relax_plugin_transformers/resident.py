# SPDX-License-Identifier: Apache-2.0
"""The weights that a model really holds: by name, checked, replaced whole, fingerprinted where they lie.

Tied weights appear once, under the name `transformers` saves them by. Nothing here knows versions.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import IO, TypeAlias

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
PAYLOADS = ("full", "delta")
Staged: TypeAlias = Iterator[tuple[TensorInfo, np.ndarray]]


class Resident:
    """A module's parameters and saved buffers, each once."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.tensors = dict(_once(module))
        self._specs = {name: (_DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in self.tensors.items()}
        self._aside: IO[bytes] | dict[str, torch.Tensor] | None = None

    def stage(self, manifest: Manifest, transport: WeightTransport) -> Staged:
        """What arrives, beside the running version; ValueError where it is not exactly this model.

        What is stored is checked whole before anything changes: a full version as views of files, a delta once now and
        again while `load` takes it. Of a live one only the first tensor is here: no second model lies in memory.
        """
        self._check(manifest)
        arriving = transport.receive(manifest, self.value)
        if manifest.payload == "full" and not transport.live:
            return iter(list(arriving))
        if not transport.live:
            for _ in arriving:  # a damaged delta is refused before anything changes
                pass
            arriving = transport.receive(manifest, self.value)
        first = next(arriving, None)
        return iter(()) if first is None else chain([first], arriving)

    def _check(self, manifest: Manifest) -> None:
        if manifest.payload not in PAYLOADS:
            raise ValueError(
                f"{manifest.version}: payload {manifest.payload!r}; this engine loads {' and '.join(PAYLOADS)}"
            )
        self._check_names(manifest)
        for info in manifest.tensors:
            have, want = (info.dtype, info.shape), self._specs[info.name]
            if have != want:
                raise ValueError(f"{manifest.version} {info.name}: have {have[0]} {have[1]}, want {want[0]} {want[1]}")

    def _check_names(self, manifest: Manifest) -> None:
        given = {info.name for info in manifest.tensors}
        lacking, extra = sorted(self.tensors.keys() - given), sorted(given - self.tensors.keys())
        if lacking or extra or len(given) != len(manifest.tensors):
            raise ValueError(
                f"{manifest.version}: lacks {lacking[:8]}, has {extra[:8]} beyond this model, {len(manifest.tensors)} "
                f"tensors; publish its {len(self.tensors)} tensors, each once"
            )

    def value(self, name: str) -> np.ndarray:
        """What a tensor is now, as its bits where numpy has no such dtype."""
        return _bytes(self.tensors[name])

    def load(self, manifest: Manifest, staged: Staged) -> None:
        """Replace what is sent; called between two iterations. Where it raises, half of two versions lies in memory."""
        missing = {info.name for info in manifest.sent}
        for info, array in staged:
            bits = _as_bits(self.tensors[info.name])
            want = torch.empty(0, dtype=bits.dtype).numpy().dtype
            if (array.dtype, array.shape) != (want, tuple(bits.shape)):
                raise ValueError(f"{manifest.version} {info.name}: got {array.dtype} {array.shape}; publish again")
            if bits.is_cuda:
                bits.copy_(torch.from_numpy(np.array(array)))
            else:
                np.copyto(bits.numpy(), array, casting="no")
            missing.discard(info.name)
        if missing:
            raise ValueError(f"{manifest.version}: {sorted(missing)[:8]} did not arrive; publish again")

    def infos(self) -> tuple[TensorInfo, ...]:
        """What lies in memory now."""
        return tuple(
            TensorInfo(
                name, tuple(tensor.shape), _DTYPES[tensor.dtype], tensor_fingerprint(_bytes(tensor)), tensor.nbytes
            )
            for name, tensor in self.tensors.items()
        )

    def fingerprint(self) -> str:
        """Of what lies in memory now, comparable with a manifest's."""
        return combined_fingerprint(self.infos())

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

    def _to_disk(self) -> IO[bytes]:
        """A nameless file: it ends with the process, also with one that is killed."""
        file = tempfile.TemporaryFile(prefix="relax-asleep-")  # noqa: SIM115  # open until the weights are back
        try:
            for tensor in self.tensors.values():
                file.write(_bytes(tensor).reshape(-1).view(np.uint8).data)
            file.flush()
        except OSError:
            file.close()
            raise
        return file

    def restore(self) -> None:
        """Undo `release`."""
        if self._aside is None:
            return
        with torch.inference_mode(False):
            if isinstance(self._aside, dict):
                for name, tensor in self.tensors.items():
                    tensor.data = self._aside[name].to(tensor.device)
            else:
                self._from_disk(self._aside)
        self.forget_aside()

    def _from_disk(self, file: IO[bytes]) -> None:
        file.seek(0)
        for name, tensor in self.tensors.items():
            filled = tensor.new_empty(self._specs[name][1])
            file.readinto(_bytes(filled).reshape(-1).view(np.uint8).data)  # type: ignore[attr-defined]
            tensor.data = filled

    def forget_aside(self) -> None:
        """Remove what `release` kept."""
        if self._aside is not None and not isinstance(self._aside, dict):
            self._aside.close()
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
