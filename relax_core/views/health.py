# SPDX-License-Identifier: Apache-2.0
"""Whether a run goes, has ended or was lost: from its documents, the wall clock and the process table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil

from relax_core.observe.recorder import ENDINGS
from relax_core.observe.status import host_mark
from relax_core.views.run import RunView

STALE_S = 30.0
"""A live controller writes its status far more often."""


@dataclass(frozen=True, slots=True)
class Health:
    """`state` is one of the endings, starting, running, silent (says nothing any more), lost (its process is gone)."""

    state: str
    said_s_ago: float | None = None
    detail: str = ""

    @property
    def ended(self) -> bool:
        return self.state in ENDINGS


def health(run: RunView, wall: float) -> Health:
    """A run's state at wall-clock time `wall`."""
    status, summary = run.status(), run.summary()
    if not status:
        ending = str(summary.get("status", ""))
        return Health(ending) if ending else Health("starting", None, "it has said nothing yet")
    age = max(wall - float(status.get("written_at", wall)), 0.0)
    state = str(status.get("state", "running"))
    if state in ENDINGS:
        return Health(state, age, str(summary.get("error") or ""))
    if _gone(status):
        return Health("lost", age, f"its process {status['pid']} is gone; continue with `relax resume {run.name}`")
    if age > STALE_S:
        return Health("silent", age, f"process {status.get('pid')} may hang, or is on another machine")
    return Health(state, age)


def _gone(status: dict[str, Any]) -> bool:
    return status.get("host") == host_mark() and not psutil.pid_exists(int(status.get("pid", 0)))
