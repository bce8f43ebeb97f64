# SPDX-License-Identifier: Apache-2.0
"""Seconds by what they were spent on: gather, hash, write on the sender's side, wire, load, proof on the receiver's."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Stopwatch:
    """Adds up; spans of one name may be many."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @property
    def seconds(self) -> dict[str, float]:
        return dict(self._seconds)

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[what] += time.perf_counter() - began

    def each(self, what: str, items: Iterable[T]) -> Iterator[T]:
        """The items; time is that of making them, not of using them."""
        source, over = iter(items), object()
        while True:
            with self.timing(what):
                item = next(source, over)
            if item is over:
                return
            yield item  # type: ignore[misc]
