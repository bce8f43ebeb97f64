# SPDX-License-Identifier: Apache-2.0
"""A KV cache of right-aligned rows: transformers writes to the cache, and `Batch` adds, moves and drops rows.

All rows end at the same column, so a decode step writes one column for all rows. Memory is reserved in advance and
grows by half. Only rows from the end move, into the gaps of finished rows. Sliding-window layers keep all keys and
values, since the mask limits attention, not the cache. A layer of linear attention keeps a state, whose size does not
depend on the number of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from relax_plugin_transformers.reservation import grown, rounded


class Extent:
    """The used part of a cache's reserved memory; all layers share one object."""

    def __init__(self) -> None:
        self.first = 0
        """First row of the current forward pass."""
        self.rows = 0
        """Number of rows in the current forward pass."""
        self.length = 0
        """Number of columns written so far."""


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
        """Allocate new memory and copy the rows of `index`: drop `drop` columns, move the rest right by `shift`."""
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
        """Copy the first rows of another layer into `rows`, from column `gap` on; zero the columns before `gap`."""
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
        """Return the states of the current pass's rows as a view, which some models write to; None if none exist."""
        if not self._extent.length:
            return None
        return self._states[name][self._extent.first : self._extent.first + self._extent.rows]

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Store the last columns as the new state; return the old state and the new columns, to convolve."""
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
        """Allocate new memory for `rows` rows and copy the rows of `index`.

        Recurrent states have no token dimension, so `columns` does not apply.
        """
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
    """The caches of all layers for one batch; all layers have the same number of columns."""

    def __init__(self, kinds: Sequence[str], rows: int, columns: int) -> None:
        """Reserve rows and columns. `kinds`: the kind of each layer, as in `layer_types` of `config.json`."""
        self.extent = Extent()
        self.capacity = (rows, rounded(columns))
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
        """Make room for `rows` and `columns`, keeping the first `used_rows`; a growth is at least by half."""
        if rows <= self.capacity[0] and columns <= self.capacity[1]:
            return
        self._rebuild(grown(self.capacity[0], rows), grown(self.capacity[1], columns), slice(0, used_rows), 0, 0)

    def pick(self, index: torch.Tensor, columns: int) -> None:
        """Replace the rows by the rows of `index`. Indices may repeat: samples of a prompt share its prefill."""
        self._rebuild(len(index), max(columns, self.length), index, 0, 0)

    def shift(self, by: int, used_rows: int) -> None:
        """Move all columns right (`by` > 0), or drop the first `-by` columns."""
        columns = self.length + by + max(self.capacity[1] - self.length, 0)
        self._rebuild(self.capacity[0], columns, slice(0, used_rows), max(by, 0), max(-by, 0))
        self.extent.length += by

    def _rebuild(self, rows: int, columns: int, index: torch.Tensor | slice, shift: int, drop: int) -> None:
        self.capacity = (rows, rounded(columns))
        for layer in self.layers:
            layer.rebuild(*self.capacity, index, shift, drop)

    def append(self, other: RowsCache, used_rows: int, new_rows: int) -> None:
        """Append the first `new_rows` of a cache that is not longer, right-aligned, with zeros on their left."""
        self.reserve(used_rows + new_rows, self.length, used_rows)
        rows, gap = slice(used_rows, used_rows + new_rows), self.length - other.length
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.append(theirs, rows, gap)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the rows `source` over the rows `target`, which have finished."""
        for layer in self.layers:
            layer.move(source, target)
