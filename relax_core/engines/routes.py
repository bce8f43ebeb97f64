# SPDX-License-Identifier: Apache-2.0
"""Experts that the positions of a token sequence visited, as engines report them piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from relax_core.api.batch import Ragged
from relax_core.api.routing import Routing
from relax_core.api.trajectory import Node, Path

if TYPE_CHECKING:
    import numpy as np

_KNOWN, _HOLE = b"\1", b"\0"


class Routes:
    """Routes of a sequence, by position from 0.

    Invariants:
    - The first report of a position stays: what another engine, or newer weights, make of it later is not what the sample
      was drawn from.
    - A position that nobody reported is a hole of zeros, which a later call may fill.
    """

    __slots__ = ("_known", "_values", "routing", "width")

    def __init__(self, routing: Routing) -> None:
        self.routing, self.width = routing, routing.width
        self._values, self._known = bytearray(), bytearray()

    def __len__(self) -> int:
        """Count positions up to the last that was reported."""
        return len(self._known)

    def add(self, start: int, values: bytes) -> None:
        """Take routes of consecutive positions; those that are known stay."""
        width, stop = self.width, start + len(values) // self.width
        had = len(self._known)
        if stop > had:
            self._values += bytes((stop - had) * width)
            self._known += bytes(stop - had)
        if start >= had or 1 not in self._known[start:stop]:
            self._values[start * width : stop * width] = values
            self._known[start:stop] = _KNOWN * (stop - start)
            return
        for at in range(start, stop):
            if not self._known[at]:
                self._values[at * width : (at + 1) * width] = values[(at - start) * width : (at + 1 - start) * width]
                self._known[at] = 1

    def fault(self, start: int, values: bytes, length: int) -> str:
        """Say what can't be true of routes of a sequence of so many tokens; empty where it may be."""
        count, over = divmod(len(values), self.width)
        if over or start < 0 or start + count > length:
            return f"{len(values)} bytes of routes from position {start}, {self.width} each, for {length} tokens"
        most = int(_array(values, self.routing).max(initial=0))
        return f"expert {most}, of {self.routing.experts}" if most >= self.routing.experts else ""

    def between(self, start: int, stop: int) -> tuple[bytes, bytes]:
        """Return (routes, known) of these positions; holes are zeros."""
        values = bytes(self._values[start * self.width : stop * self.width])
        known = bytes(self._known[start:stop])
        return values.ljust((stop - start) * self.width, _HOLE), known.ljust(stop - start, _HOLE)


def filled(node: Node, start: int, routes: Routes) -> tuple[bytes, bytes] | None:
    """Fill a node's (routes, routed) with what is known of its positions from `start`; None where nothing is new."""
    if node.routed and _HOLE not in node.routed:
        return None
    values_here, known = routes.between(start, start + len(node.tokens))
    if not node.routed:
        return (values_here, known) if _KNOWN in known else None
    values, have, width = bytearray(node.routes), bytearray(node.routed), routes.width
    fresh = [at for at, (mine, theirs) in enumerate(zip(have, known, strict=True)) if theirs and not mine]
    for at in fresh:
        values[at * width : (at + 1) * width] = values_here[at * width : (at + 1) * width]
        have[at] = 1
    return (bytes(values), bytes(have)) if fresh else None


def route_columns(paths: Sequence[Path], routing: Routing, lengths: np.ndarray) -> dict[str, Ragged]:
    """Make the columns of rows whose nodes are these; `lengths` are their numbers of tokens."""
    import numpy as np

    nodes = [node for path in paths for node, _ in path]
    values = b"".join(node.routes or bytes(len(node.tokens) * routing.width) for node in nodes)
    known = b"".join(node.routed or bytes(len(node.tokens)) for node in nodes)
    return {
        "routed_experts": Ragged(_array(values, routing), lengths),
        "routed_valid": Ragged(np.frombuffer(known, np.uint8), lengths),
    }


def _array(values: bytes, routing: Routing) -> np.ndarray:
    """[positions, layers, top_k]."""
    import numpy as np

    told = np.frombuffer(values, np.dtype(routing.dtype).newbyteorder("<"))
    return told.astype(routing.dtype, copy=False).reshape(-1, routing.layers, routing.top_k)
