# SPDX-License-Identifier: Apache-2.0
"""Which media of the store may go where all are over the budget: those that no owner holds, least recently used first.

A state machine without IO: who asks deletes what `evicted` says, at once. Owners are groups by number, which hold until the bus
needs none so old any more, and whoever else names himself and lets go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping


class MediaBudget:
    """Media by key, the least recently used first."""

    def __init__(self, limit_bytes: int, found: Mapping[str, int], known_groups: int = 0) -> None:
        """`found`: sizes of what is there, oldest first. Groups below `known_groups` may need any of it."""
        self._limit = limit_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict(found)
        self._total = sum(found.values())
        self._holders: dict[str, set[Hashable]] = {}
        self._held: dict[Hashable, set[str]] = {}
        self._oldest = 0
        for key in found:
            self.hold(known_groups - 1, key)

    @property
    def total_bytes(self) -> int:
        return self._total

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    def add(self, key: str, size_bytes: int) -> None:
        """It is there now."""
        self._total += size_bytes - self._sizes.get(key, 0)
        self._sizes[key] = size_bytes
        self._sizes.move_to_end(key)

    def hold(self, owner: Hashable, key: str) -> None:
        """It stays for this owner. A group that is over already holds nothing."""
        if key in self._sizes:
            self._sizes.move_to_end(key)
        if isinstance(owner, int) and owner < self._oldest:
            return
        self._held.setdefault(owner, set()).add(key)
        self._holders.setdefault(key, set()).add(owner)

    def let_go(self, owner: Hashable) -> None:
        for key in self._held.pop(owner, ()):
            holders = self._holders[key]
            holders.discard(owner)
            if not holders:
                del self._holders[key]

    def over_below(self, group: int) -> None:
        """Nothing of groups below this number is needed any more."""
        self._oldest = max(self._oldest, group)
        for owner in [owner for owner in self._held if isinstance(owner, int) and owner < self._oldest]:
            self.let_go(owner)

    def needed(self, key: str) -> bool:
        return key in self._holders

    def evicted(self) -> list[str]:
        """What is to be deleted now; forgotten here."""
        gone: list[str] = []
        if self._total <= self._limit:
            return gone
        for key in [key for key in self._sizes if key not in self._holders]:
            if self._total <= self._limit:
                break
            self._total -= self._sizes.pop(key)
            gone.append(key)
        return gone
