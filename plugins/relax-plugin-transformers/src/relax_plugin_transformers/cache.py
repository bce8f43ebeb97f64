# SPDX-License-Identifier: Apache-2.0
"""A KV cache of right-aligned rows, which transformers writes and a batch rearranges.

All rows end at the same column, so a decode step writes one column for all rows. Memory is reserved ahead and grows by
half. Rows from the end replace finished rows, which keeps copies few. Sliding-window layers keep their whole history,
since the mask limits attention, not the cache. Layers of linear attention have a state instead, whose size does not
depend on the number of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

_ROUND = 16
"""Columns are reserved in multiples of this."""


class Extent:
    """The used part of the reserved memory, common to all layers."""

    def __init__(self) -> None:
        self.first = 0
        """First row of the current forward pass."""
        self.rows = 0
        """Number of rows in the current forward pass."""
        self.length = 0
        """Number of columns written."""


class RowsLayer(CacheLayerMixin):
    """Keys and values of one layer, [rows, heads, columns, dim]; allocated at the first update."""

    is_sliding = False

    def __init__(self, extent: Extent, rows: int, columns: int) -> None:
        super().__init__()
        self._extent, self._rows, self._columns = extent, rows, columns

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = (
            state.new_zeros(self._rows, state.shape[1], self._columns, state.shape[3])
            for state in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin = self._extent.length
        end = begin + key_states.shape[2]
        rows = slice(self._extent.first, self._extent.first + key_states.shape[0])
        self.keys[rows, :, begin:end] = key_states
        self.values[rows, :, begin:end] = value_states
        return self.keys[rows, :, :end], self.values[rows, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._extent.length + query_length, 0

    def get_seq_length(self) -> int:
        return self._extent.length

    def get_max_length(self) -> int:
        return -1

    def rebuild(self, rows: int, columns: int, index: torch.Tensor | slice, shift: int, drop: int) -> None:
        """Allocate new memory with the rows of `index`, and the columns from `drop` on moved right by `shift`."""
        kept = self._extent.length - drop
        self._rows, self._columns = rows, columns
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            picked = old[index, :, drop : self._extent.length]
            new = old.new_zeros(rows, old.shape[1], columns, old.shape[3])
            new[: picked.shape[0], :, shift : shift + kept] = picked
            setattr(self, name, new)

    def tensors(self) -> list[torch.Tensor]:
        return [self.keys, self.values] if self.is_initialized else []

    def append(self, other: RowsLayer, rows: slice, gap: int) -> None:
        """Copy the first rows of another layer into `rows`, right of the first `gap` columns, which are zeroed."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine[rows, :, :gap] = 0
            length = self._extent.length
            mine[rows, :, gap:length] = theirs[: rows.stop - rows.start, :, : length - gap]

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for tensor in self.tensors():
            tensor[target, :, : self._extent.length] = tensor[source, :, : self._extent.length]


class StateLayer(LinearAttentionCacheLayerMixin):
    """The states of one layer of linear attention, [rows, ...]; empty before the first column."""

    def __init__(self, extent: Extent, rows: int, columns: int) -> None:
        super().__init__()
        self._extent, self._rows = extent, rows
        self._states: dict[str, torch.Tensor] = {}

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: memory is allocated with the first states."""

    def state(self, name: str) -> torch.Tensor | None:
        """Return the state of the current pass's rows as a view, since some models write to it; None before any."""
        if not self._extent.length:
            return None
        return self._states[name][self._extent.first : self._extent.first + self._extent.rows]

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Keep the last columns as the state; return the convolution's input: the former state and the new columns."""
        before = self.state(f"conv {state_idx}")
        missing = max(0, conv_kernel_size - conv_states.shape[-1])
        seen = torch.nn.functional.pad(conv_states, (missing, 0))
        if before is not None:
            seen = torch.cat([before, conv_states], dim=-1)
        self._keep(f"conv {state_idx}", seen[..., -conv_kernel_size:])
        return seen

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:  # fmt: skip
        self._keep(f"recurrent {state_idx}", recurrent_states)
        return recurrent_states

    def _keep(self, name: str, state: torch.Tensor) -> None:
        if name not in self._states:
            self._states[name] = state.new_zeros(self._rows, *state.shape[1:])
        self._states[name][self._extent.first : self._extent.first + len(state)] = state

    def rebuild(self, rows: int, columns: int, index: torch.Tensor | slice, shift: int, drop: int) -> None:
        """Allocate new memory with the rows of `index`."""
        self._rows = rows
        for name, old in self._states.items():
            picked = old[index]
            self._states[name] = old.new_zeros(rows, *old.shape[1:])
            self._states[name][: len(picked)] = picked

    def tensors(self) -> list[torch.Tensor]:
        return list(self._states.values())

    def append(self, other: StateLayer, rows: slice, gap: int) -> None:
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine[rows] = theirs[: rows.stop - rows.start]

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for tensor in self.tensors():
            tensor[target] = tensor[source]


class RowsCache(Cache):
    """The cache of all layers of a batch, with a common length."""

    def __init__(self, kinds: Sequence[str], rows: int, columns: int) -> None:
        """Reserve rows and columns. `kinds`: kind of each layer, by its name in model configurations."""
        self.extent = Extent()
        self.capacity = (rows, _rounded(columns))
        made = (StateLayer if kind == "linear_attention" else RowsLayer for kind in kinds)
        super().__init__(layers=[layer(self.extent, *self.capacity) for layer in made])

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.layers[layer_idx].state(f"conv {state_idx}")  # type: ignore[no-any-return]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.layers[layer_idx].state(f"recurrent {state_idx}")  # type: ignore[no-any-return]

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    @property
    def length(self) -> int:
        return self.extent.length

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for layer in self.layers for tensor in layer.tensors()]

    @property
    def size_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())

    def reserve(self, rows: int, columns: int, used_rows: int) -> None:
        """Make room for this many rows and columns, keeping the used rows; capacity grows by half at least."""
        if rows <= self.capacity[0] and columns <= self.capacity[1]:
            return
        if rows > self.capacity[0]:
            rows = max(rows, self.capacity[0] * 3 // 2)
        if columns > self.capacity[1]:
            columns = max(columns, self.capacity[1] * 3 // 2)
        self._rebuild(max(rows, self.capacity[0]), max(columns, self.capacity[1]), slice(0, used_rows), 0, 0)

    def pick(self, index: torch.Tensor, columns: int) -> None:
        """Replace the rows by those of `index`, which may repeat, so that samples share their prompt's prefill."""
        self._rebuild(len(index), max(columns, self.length), index, 0, 0)

    def shift(self, by: int, used_rows: int) -> None:
        """Move all columns right (`by` > 0), or drop the first `-by` columns."""
        columns = self.length + by + max(self.capacity[1] - self.length, 0)
        self._rebuild(self.capacity[0], columns, slice(0, used_rows), max(by, 0), max(-by, 0))
        self.extent.length += by

    def _rebuild(self, rows: int, columns: int, index: torch.Tensor | slice, shift: int, drop: int) -> None:
        self.capacity = (rows, _rounded(columns))
        for layer in self.layers:
            layer.rebuild(*self.capacity, index, shift, drop)

    def append(self, other: RowsCache, used_rows: int, new_rows: int) -> None:
        """Append the first rows of a cache that is not longer, right-aligned; columns to their left are zeroed."""
        self.reserve(used_rows + new_rows, self.length, used_rows)
        rows, gap = slice(used_rows, used_rows + new_rows), self.length - other.length
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.append(theirs, rows, gap)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy `source` rows to the places of `target` rows, which have left."""
        for layer in self.layers:
            layer.move(source, target)


def _rounded(columns: int) -> int:
    return -(-columns // _ROUND) * _ROUND
