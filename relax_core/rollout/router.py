# SPDX-License-Identifier: Apache-2.0
"""Which engine gets a request: least work among those that may continue its group. A pure function, no IO."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from relax_core.bus import gate


class EngineLoad(NamedTuple):
    """One engine as the router sees it."""

    name: str
    serving: bool
    """False while it enters (new, recovered, quarantined) or has died."""
    step: int
    """Of the weights it has."""
    work: int
    """Tokens it still may have to generate."""


def choose(engines: Iterable[EngineLoad], floor: int) -> str | None:
    """The name of the least loaded engine at or above the group's floor; None where no engine may serve it now."""
    able = [engine for engine in engines if engine.serving and gate.may_continue(engine.step, floor)]
    return min(able, key=lambda engine: (engine.work, engine.name)).name if able else None
