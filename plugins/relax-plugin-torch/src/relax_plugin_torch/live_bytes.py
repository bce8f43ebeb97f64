# SPDX-License-Identifier: Apache-2.0
"""A count of the bytes of live tensors by kind, now and at the peak, kept operation by operation.

A storage counts once, however many views it has. The count covers tensors that torch's dispatcher returns. It excludes
buffers inside a kernel and memory that an allocator keeps in reserve. Fake tensors count like real tensors.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """A context manager that counts the bytes of tensors made within it: `now`, and the peak of each moment, by kind."""

    def __init__(self, kind_of: Callable[[Tensor], str], moment_of: Callable[[], Hashable] = tuple) -> None:
        """Start with no tensors. `kind_of` names the kind of a new tensor, `moment_of` the present part of the work."""
        super().__init__()
        self._kind_of, self._moment_of = kind_of, moment_of
        self._kinds: dict[int, tuple[str, int]] = {}
        self.now: Counter[str] = Counter()
        self.peaks: dict[Hashable, dict[str, int]] = {}
        """Bytes by kind when most were alive, for each moment."""
        self._most: dict[Hashable, int] = {}

    @property
    def peak(self) -> dict[str, int]:
        return max(self.peaks.values(), key=lambda parts: sum(parts.values()), default={})

    def belongs(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """Count these tensors under `kind` from now on, instead of the kind that `kind_of` gave them."""
        for tensor in tensors:
            if tensor is not None:
                self._note(tensor)
                before, size = self._kinds[_key(tensor)]
                self._kinds[_key(tensor)] = (kind, size)
                self.now[before] -= size
                self.now[kind] += size

    def restart(self) -> None:
        """Reset the peaks to the bytes that are alive now."""
        self.peaks, self._most = {}, {}
        self._look()

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for value in tree_iter(made):
            if isinstance(value, Tensor):
                self._note(value)
        return made

    def _note(self, tensor: Tensor) -> None:
        if (key := _key(tensor)) in self._kinds:
            return
        storage, kind = tensor.untyped_storage(), self._kind_of(tensor)
        self._kinds[key] = (kind, storage.nbytes())
        self.now[kind] += storage.nbytes()
        weakref.finalize(storage, self._freed, key)
        self._look()

    def _look(self) -> None:
        moment, total = self._moment_of(), self.now.total()
        if total > self._most.get(moment, 0):
            self._most[moment], self.peaks[moment] = total, {kind: size for kind, size in self.now.items() if size}

    def _freed(self, key: int) -> None:
        kind, size = self._kinds.pop(key)
        self.now[kind] -= size


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
