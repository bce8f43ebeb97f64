# SPDX-License-Identifier: Apache-2.0
"""The weights that a model really holds: by name, checked, replaced whole, fingerprinted where they lie.

Names are those of its folder: tied weights appear once, and what a model fuses (experts) by its parts, which are views.
Nothing here knows versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TypeAlias

import numpy as np
import torch

from relax_core.api.weights import Manifest, TensorInfo, WeightTransport, combined_fingerprint, tensor_fingerprint
from relax_core.learn.huggingface import parts_of
from relax_plugin_transformers.aside import Aside
from relax_plugin_transformers.bits import as_bits, as_bytes

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
PAYLOADS = ("full", "delta")
Staged: TypeAlias = Iterator[tuple[TensorInfo, np.ndarray]]


class Resident:
    """A module's parameters and saved buffers, each once."""

    def __init__(self, module: torch.nn.Module) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        self._own = dict(_once(module))
        self._parts = parts_of(self._own, lambda tensors: revert_weight_conversion(module, tensors))
        self.tensors: dict[str, torch.Tensor] = {}
        self._name()
        self._specs = {name: (_DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in self.tensors.items()}
        self._aside = Aside()

    def _name(self) -> None:
        fused = {part.source for part in self._parts.values()}
        self.tensors = {name: tensor for name, tensor in self._own.items() if name not in fused}
        self.tensors |= {name: part.of(self._own) for name, part in self._parts.items()}

    def stage(self, manifest: Manifest, transport: WeightTransport) -> Staged:
        """Return the arriving weights, beside the running version; ValueError where they are not exactly this model.

        A stored version is checked whole before anything changes: a full one as views of files, a delta once now and
        again while `load` takes it. A live one has only its first tensor here: no second model lies in memory.
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
        """Return the present value of a tensor, as its bits where numpy has no such dtype."""
        return as_bytes(self.tensors[name])

    def load(self, manifest: Manifest, staged: Staged) -> None:
        """Replace what is sent; called between two iterations. Where it raises, half of two versions lies in memory."""
        missing = {info.name for info in manifest.sent}
        for info, array in staged:
            bits = as_bits(self.tensors[info.name])
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
        """Return the infos of the tensors in memory now."""
        return tuple(
            TensorInfo(
                name, tuple(tensor.shape), _DTYPES[tensor.dtype], tensor_fingerprint(as_bytes(tensor)), tensor.nbytes
            )
            for name, tensor in self.tensors.items()
        )

    def fingerprint(self) -> str:
        """Return the fingerprint of the weights in memory now, comparable with a manifest's."""
        return combined_fingerprint(self.infos())

    def release(self) -> int:
        """Free the weights' memory, keeping their values elsewhere; returns the bytes that are really gone."""
        for name in self._parts:
            self.tensors.pop(name, None)
        return self._aside.release(self._own)

    def restore(self) -> None:
        """Undo `release`."""
        self._aside.restore(self._own)
        self._name()

    def forget_aside(self) -> None:
        """Remove what `release` kept."""
        self._aside.forget()


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
