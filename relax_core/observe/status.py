# SPDX-License-Identifier: Apache-2.0
"""`status.json`: what a run said of itself last. Role states and waits as they came, with the clock they are told in.

Readers need no clock of ours: `now` and `written_at` were read together, so ages follow from the wall clock.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from relax_core.api.status import Beat


def status_document(beats: Sequence[Beat], now: float, wall: float, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Beats and the run's own facts (state, step, steps, run_id) as they are at `now`."""
    return {
        **facts,
        "written_at": wall,
        "now": now,
        "pid": os.getpid(),
        "host": host_mark(),
        "roles": [_role(beat) for beat in sorted(beats, key=lambda beat: beat.role)],
    }


def _role(beat: Beat) -> dict[str, Any]:
    """Spans are told once, in the trace."""
    return {key: value for key, value in asdict(replace(beat, spans=())).items() if key not in ("spans", "sent")}


def told(beats: Sequence[Beat]) -> tuple[Any, ...]:
    """What of the beats a reader would notice: a status is written when this changes."""
    return tuple((b.role, b.state, b.doing, b.waits, b.incarnation) for b in sorted(beats, key=lambda b: b.role))


def host_mark() -> str:
    """Tells machines apart without naming them: a process id means something only on its own."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]
