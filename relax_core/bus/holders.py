# SPDX-License-Identifier: Apache-2.0
"""What the producers say they work on. The account counts from here, so that a lost attempt is seen as lost.

A report covers the attempts that its holder had been admitted by then; later ones are still on their way to it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from relax_core.api.batch import AttemptId
from relax_core.api.bus import Issue
from relax_core.bus.leases import belongs


@dataclass(slots=True)
class Holder:
    """One producer's newest report, and what was admitted to it since."""

    reported: frozenset[AttemptId] = frozenset()
    seen: int = 0
    admitted: int = 0
    on_the_way: deque[AttemptId] = field(default_factory=deque)


class Holders:
    """All producers by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, Holder] = {}

    def admit(self, name: str, issue: Issue) -> None:
        holder = self.by_name.setdefault(name, Holder())
        holder.admitted += len(issue.attempts)
        holder.on_the_way.extend(issue.attempts)

    def report(self, name: str, attempts: frozenset[AttemptId], admitted: int) -> None:
        """Take a report unless a later one was here before it."""
        holder = self.by_name.setdefault(name, Holder())
        if admitted < holder.seen:
            return
        for _ in range(min(admitted, holder.admitted) - holder.seen):
            holder.on_the_way.popleft()
        holder.seen, holder.reported = min(admitted, holder.admitted), attempts

    def forget(self, role: str) -> None:
        """A new incarnation holds nothing yet."""
        for name in [name for name in self.by_name if belongs(name, role)]:
            del self.by_name[name]

    def attempts(self) -> set[AttemptId]:
        """All that producers hold or are about to get."""
        return set().union(*((*holder.reported, *holder.on_the_way) for holder in self.by_name.values()))
