# SPDX-License-Identifier: Apache-2.0
"""Where a run's time went, of its metrics: by role for the page's stacked bars, by debtor and by part for its tables.

Sums over the steps that were accounted; the curve of a single key is the report's other business.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from relax_core.views.run import Metrics

_PARTS = ("busy", "wait", "idle")
PUBLISH = ("gather", "hash", "write", "wire", "load", "proof")
"""In the order in which they happen."""
ROW, GAP, NAME, WIDTH = 26, 10, 110, 720


@dataclass(frozen=True, slots=True)
class Spent:
    """One role's seconds."""

    role: str
    busy: float
    wait: float
    idle: float
    owed: Mapping[str, float]
    """Of the waits, by whoever owed them, the longest first."""

    @property
    def seconds(self) -> float:
        return self.busy + self.wait + self.idle


def roles(metrics: Metrics) -> list[Spent]:
    """Every role that told its time."""
    names = [key.split("/")[1] for key in metrics.names() if key.startswith("time/") and key.endswith("/busy_s")]
    return [spent for name in names if (spent := _role(metrics, name)).seconds > 0]


def _role(metrics: Metrics, name: str) -> Spent:
    prefix = f"time/{name}/wait/"
    owed = {
        key.removeprefix(prefix).removesuffix("_s"): sum(metrics.column(key))
        for key in metrics.names()
        if key.startswith(prefix)
    }
    longest = dict(sorted(((who, seconds) for who, seconds in owed.items() if seconds), key=lambda one: -one[1]))
    busy, wait, idle = (float(sum(metrics.column(f"time/{name}/{part}_s"))) for part in _PARTS)
    return Spent(name, busy, wait, idle, longest)


def publishing(metrics: Metrics) -> Iterator[tuple[str, float]]:
    """Mean seconds of each part of a publish."""
    found = {
        key.removeprefix("time/publish/").removesuffix("_s"): metrics.column(key)
        for key in metrics.names()
        if key.startswith("time/publish/")
    }
    for part in sorted(found, key=lambda part: (PUBLISH.index(part) if part in PUBLISH else len(PUBLISH), part)):
        yield part, sum(found[part]) / len(found[part])


def stacked(spent: list[Spent]) -> str:
    """One bar a role as inline SVG: busy, waiting, idle; classes `spent-busy` ... carry the colours."""
    if not spent:
        return ""
    height = len(spent) * (ROW + GAP)
    drawn = "".join(_bar(one, at * (ROW + GAP)) for at, one in enumerate(spent))
    label = "busy, waiting and idle time by role"
    return f'<svg class="curve" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{drawn}</svg>'


def _bar(spent: Spent, top: float) -> str:
    left, drawn = float(NAME), []
    for part in _PARTS:
        share = getattr(spent, part) / spent.seconds
        wide = share * (WIDTH - NAME)
        title = f"<title>{html.escape(spent.role)}: {part} {getattr(spent, part):.1f} s, {share:.0%}</title>"
        drawn.append(
            f'<rect class="spent-{part}" x="{left:.1f}" y="{top}" width="{wide:.1f}" height="{ROW}">{title}</rect>'
        )
        if wide > 44:
            drawn.append(
                f'<text class="on-bar" x="{left + wide / 2:.1f}" y="{top + 18}" text-anchor="middle">{share:.0%}</text>'
            )
        left += wide
    name = f'<text x="{NAME - 8}" y="{top + 18}" text-anchor="end">{html.escape(spent.role)}</text>'
    return name + "".join(drawn)
