# SPDX-License-Identifier: Apache-2.0
"""Memory of tensors that others need for a while: their values lie on the host meanwhile, or, of a CPU, on disk.

The tensors stay the same objects, so whoever computes with them finds them filled again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import IO

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from relax_plugin_transformers.bits import as_bytes

Tensors = Mapping[str, torch.Tensor]


class Aside:
    """A store for tensors that were put aside; the same tensors are handed over each time."""

    def __init__(self) -> None:
        self._kept: IO[bytes] | dict[str, torch.Tensor] | None = None
        self._shapes: dict[str, torch.Size] = {}

    def release(self, tensors: Tensors) -> int:
        """Free their memory; returns the bytes that are really gone."""
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
                self._from_disk(tensors, self._kept)
        self.forget()

    def _from_disk(self, tensors: Tensors, file: IO[bytes]) -> None:
        file.seek(0)
        for name, tensor in tensors.items():
            filled = tensor.new_empty(self._shapes[name])
            file.readinto(as_bytes(filled).reshape(-1).view(np.uint8).data)  # type: ignore[attr-defined]
            tensor.data = filled

    def forget(self) -> None:
        """Remove what `release` kept."""
        if self._kept is not None and not isinstance(self._kept, dict):
            self._kept.close()
        self._kept = None


def _to_disk(tensors: Tensors) -> IO[bytes]:
    """A nameless file: it ends with the process, also with one that is killed."""
    file = tempfile.TemporaryFile(prefix="relax-asleep-")  # noqa: SIM115  # open until the weights are back
    try:
        for tensor in tensors.values():
            file.write(as_bytes(tensor).reshape(-1).view(np.uint8).data)
        file.flush()
    except OSError:
        file.close()
        raise
    return file
