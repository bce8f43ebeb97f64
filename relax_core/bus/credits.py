# SPDX-License-Identifier: Apache-2.0
"""Credits: how many rows and bytes producers may have on the bus. They wait for credit; nothing is ever refused.

Payloads of trained samples, kept for a rollback, have a budget of their own and block nobody. Credit of a put that its
producer never ended comes back when the producer starts anew, or after the time of a lease.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from relax_core.bus.leases import belongs


@dataclass(frozen=True, slots=True)
class Reservation:
    """Credit of a put on its way."""

    rows: int
    bytes: int
    holder: str
    expires: float


@dataclass(slots=True)
class Credits:
    """Rows and bytes in use against what the run allows."""

    max_rows: int
    max_bytes: int
    rows: int = 0
    bytes: int = 0
    kept_bytes: int = 0
    reserved: dict[int, Reservation] = field(default_factory=dict)

    def fits(self, rows: int, size_bytes: int) -> bool:
        """Whether a producer may put this much now; an empty bus takes anything, or a large row could never pass."""
        return (
            not rows
            or not self.rows
            or (self.rows + rows <= self.max_rows and self.bytes + size_bytes <= self.max_bytes)
        )

    @property
    def over_kept(self) -> bool:
        return self.kept_bytes > self.max_bytes

    def reserve(self, key: int, rows: int, size_bytes: int, holder: str = "", expires: float = math.inf) -> None:
        """Credit for a put on its way, named by its block."""
        self.reserved[key] = Reservation(rows, size_bytes, holder, expires)
        self.rows += rows
        self.bytes += size_bytes

    def unreserve(self, key: int) -> None:
        """The rows have come, or will never."""
        found = self.reserved.pop(key, None)
        if found is not None:
            self.rows -= found.rows
            self.bytes -= found.bytes

    def overdue(self, now: float) -> list[int]:
        """Blocks whose producer has had time enough."""
        return [key for key, found in self.reserved.items() if found.expires <= now]

    def of_role(self, role: str) -> list[int]:
        return [key for key, found in self.reserved.items() if belongs(found.holder, role)]

    def next_expiry(self) -> float | None:
        return min((found.expires for found in self.reserved.values()), default=None)

    def take_rows(self, rows: int) -> None:
        self.rows += rows

    def take_bytes(self, size_bytes: int) -> None:
        self.bytes += size_bytes

    def keep_bytes(self, size_bytes: int) -> None:
        """Move bytes from use to what is only kept."""
        self.bytes -= size_bytes
        self.kept_bytes += size_bytes

    def drop_kept(self, size_bytes: int) -> None:
        self.kept_bytes -= size_bytes
