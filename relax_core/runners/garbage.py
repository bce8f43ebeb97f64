# SPDX-License-Identifier: Apache-2.0
"""Garbage collection of a process in which roles work: seldom, and only of what came after they began.

A step makes objects by the ten thousand and hardly a cycle; searching all of them, and every imported module, each time
took half of what a step costs beside its compute. Ends with the roles: a notebook's process is as it was.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = (50_000, 20, 20)
_before: list[tuple[int, int, int]] = []
"""The thresholds that were met, once for each role at work."""


@contextmanager
def collected_seldom() -> Iterator[None]:
    """While any role of this process is in here."""
    _before.append(gc.get_threshold())
    gc.freeze()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        if len(_before) > 1:
            _before.pop()  # the first one's stays: it is the process's own
        else:
            gc.set_threshold(*_before.pop())
            gc.unfreeze()
