# SPDX-License-Identifier: Apache-2.0
"""The weights in an engine's memory: access by name, replacement, fingerprints, offloading, and adapters.

Tensors have the names of the model folder. Tied weights appear once. A tensor that fuses several tensors of the folder
(experts) appears as these tensors, which are views. This module does not track versions.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from typing import IO

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from relax_core.api.weights import Manifest, TensorInfo, tensor_fingerprint
from relax_core.engine_kit.model_weights import StagedAdapter
from relax_core.engine_kit.threaded_engine import Arriving
from relax_core.learn.huggingface import parts_of

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
Tensors = Mapping[str, torch.Tensor]


class Resident:
    """A module's parameters and saved buffers, each once, under the names of the model folder."""

    def __init__(self, module: torch.nn.Module) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        self._own = dict(_once(module))
        self._parts = parts_of(self._own, lambda tensors: revert_weight_conversion(module, tensors))
        self._aside = OffloadedTensors()
        self._name()

    def _name(self) -> None:
        fused = {part.source for part in self._parts.values()}
        self.tensors = {name: tensor for name, tensor in self._own.items() if name not in fused}
        self.tensors |= {name: part.of(self._own) for name, part in self._parts.items()}

    def value(self, name: str) -> np.ndarray:
        """Return the current value of a tensor, as its bits if numpy does not have the dtype."""
        return as_array(self.tensors[name])

    def load(self, manifest: Manifest, staged: Arriving) -> None:
        """Overwrite tensors as they arrive; call between two iterations. After an error, memory mixes two versions."""
        for info, array in staged:
            bits = as_bits(self.tensors[info.name])
            want = torch.empty(0, dtype=bits.dtype).numpy().dtype
            if (array.dtype, array.shape) != (want, tuple(bits.shape)):
                raise ValueError(f"{manifest.version} {info.name}: got {array.dtype} {array.shape}; publish again")
            if bits.is_cuda:
                bits.copy_(torch.from_numpy(np.array(array)))
            else:
                np.copyto(bits.numpy(), array, casting="no")

    def infos(self) -> dict[str, TensorInfo]:
        """Return names, shapes, dtypes, fingerprints and sizes of the tensors in memory, by name."""
        return {
            name: TensorInfo(
                name, tuple(tensor.shape), _DTYPES[tensor.dtype], tensor_fingerprint(as_array(tensor)), tensor.nbytes
            )
            for name, tensor in self.tensors.items()
        }

    def release(self) -> int:
        """Move the weights out of device memory; return the bytes that this freed."""
        for name in self._parts:
            self.tensors.pop(name, None)
        return self._aside.release(self._own)

    def restore(self) -> None:
        """Undo `release`."""
        self._aside.restore(self._own)
        self._name()

    def close(self) -> None:
        """Discard the values that `release` kept."""
        self._aside.close()


class Adapters:
    """The adapter merged into a model's weights. Base weights are kept, so each adapter is merged into them alone."""

    def __init__(self, resident: Resident) -> None:
        self._resident = resident
        self._base: dict[str, torch.Tensor] = {}
        self._aside = OffloadedTensors()

    def load(self, staged: StagedAdapter) -> None:
        """Set the weights to the kept base plus this adapter; call between two iterations."""
        for weight in staged.pairs:
            tensor = self._resident.tensors[weight]
            base = self._base.setdefault(weight, tensor.detach().clone())
            tensor.copy_(staged.merged(weight, base).to(tensor.dtype))

    def forget(self) -> None:
        """Discard the kept base weights, after a whole model was loaded as the new base."""
        self._base.clear()
        self._aside.close()

    def release(self) -> int:
        """Move the kept base weights out of device memory; return the bytes that this freed."""
        return self._aside.release(self._base)

    def restore(self) -> None:
        """Undo `release`."""
        self._aside.restore(self._base)


class OffloadedTensors:
    """Offloaded values of tensors: in host memory for tensors on a GPU, in a temporary file for tensors on a CPU.

    Tensor objects stay in the model, empty until `restore` fills them. Callers must pass the same tensors to `release`
    and `restore`.
    """

    def __init__(self) -> None:
        self._kept: IO[bytes] | dict[str, torch.Tensor] | None = None
        self._shapes: dict[str, torch.Size] = {}

    def release(self, tensors: Tensors) -> int:
        """Store the values elsewhere and free the tensors' memory; return the bytes that this freed."""
        if self._kept is not None or not tensors:
            return 0
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        on_gpu = next(iter(tensors.values())).is_cuda
        self._kept = {name: tensor.cpu() for name, tensor in tensors.items()} if on_gpu else _to_disk(tensors)
        held = [(StorageWeakRef(t.untyped_storage()), t.untyped_storage().nbytes()) for t in tensors.values()]
        with torch.inference_mode(False):
            for tensor in tensors.values():
                tensor.data = tensor.new_empty(0)
        return sum(size for storage, size in held if storage.expired())

    def restore(self, tensors: Tensors) -> None:
        """Undo `release`."""
        if self._kept is None:
            return
        with torch.inference_mode(False):
            if isinstance(self._kept, dict):
                for name, tensor in tensors.items():
                    tensor.data = self._kept[name].to(tensor.device)
            else:
                self._kept.seek(0)
                for name, tensor in tensors.items():
                    filled = tensor.new_empty(self._shapes[name])
                    self._kept.readinto(as_array(filled).reshape(-1).view(np.uint8).data)  # type: ignore[attr-defined]
                    tensor.data = filled
        self.close()

    def close(self) -> None:
        """Discard the values that `release` kept."""
        if self._kept is not None and not isinstance(self._kept, dict):
            self._kept.close()
        self._kept = None


def _to_disk(tensors: Tensors) -> IO[bytes]:
    """Write tensors to a file without a name, which the system deletes when the process ends or is killed."""
    file = tempfile.TemporaryFile(prefix="relax-offloaded-")  # noqa: SIM115  # open until the weights are back
    try:
        for tensor in tensors.values():
            file.write(as_array(tensor).reshape(-1).view(np.uint8).data)
        file.flush()
    except OSError:
        file.close()
        raise
    return file


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as integers if numpy does not have its dtype (bf16 and fp8), else the tensor."""
    return tensor.view(_BITS[tensor.dtype]) if tensor.dtype in _BITS else tensor


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a numpy array that shares a CPU tensor's memory; for a GPU tensor, a copy."""
    return as_bits(tensor.detach().cpu()).numpy()


def _once(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and saved buffers, each copied to its own memory; tied tensors under their first name."""
    saved = module.state_dict(keep_vars=True)
    seen: set[int] = set()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in saved and id(tensor) not in seen:
            seen.add(id(tensor))
            tensor.requires_grad_(False)
            # Loaders may leave a parameter in mapped or shared memory, which can't be freed and may change.
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
            yield name, tensor
