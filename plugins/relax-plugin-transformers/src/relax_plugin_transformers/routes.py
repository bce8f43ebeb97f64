# SPDX-License-Identifier: Apache-2.0
"""Which experts the rows of a pass visited, brought back from the order in which a model computes to rows and columns.

Nothing is kept beyond a pass; whoever wants routes takes them.
"""

from __future__ import annotations

import numpy as np
import torch

from relax_core.api.routing import Routing
from relax_core.learn.huggingface import RouteRecorder, routing_of


class Watch:
    """Watches the routers of one model while `on`."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.routing: Routing | None = routing_of(module)
        self._recorder = None if self.routing is None else RouteRecorder(module, self.routing)
        self._pieces: list[tuple[int, int, np.ndarray]] = []

    @property
    def on(self) -> bool:
        return self._recorder is not None and self._recorder.on

    def watch(self, wanted: bool) -> None:
        """From the next pass on; what was seen before is forgotten."""
        self._pieces.clear()
        if self._recorder is not None:
            self._recorder.on = wanted

    def passed(self, row: int, column: int, rows: int) -> None:
        """A pass over so many rows, from this row and column on, is over."""
        if self._recorder is not None and self._recorder.on:
            seen = self._recorder.take()
            self._pieces.append((row, column, seen.reshape(rows, -1, *seen.shape[1:])))

    def take(self) -> np.ndarray:
        """[rows, columns, layers, top_k] of all passes since the last one."""
        pieces, self._pieces = self._pieces, []
        rows = max(row + len(seen) for row, _, seen in pieces)
        first = min(column for _, column, _ in pieces)
        columns = max(column + seen.shape[1] for _, column, seen in pieces) - first
        whole = np.zeros((rows, columns, *pieces[0][2].shape[2:]), pieces[0][2].dtype)
        for row, column, seen in pieces:
            whole[row : row + len(seen), column - first : column - first + seen.shape[1]] = seen
        return whole
