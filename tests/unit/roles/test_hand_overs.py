# SPDX-License-Identifier: Apache-2.0
"""Hand-overs between roles cost no waiting: as long as a step lasts, some worker works."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.roles.simulated_run import SimulatedRun, Span

STEPS = 3
REFERENCE = {"algorithm": {"name": "grpo", "kl_coef": 0.1}}
FORWARD = {"batch": {"updates_per_step": 2}, "algorithm": {"name": "grpo", "correction": "truncate"}}
GPU = {"mode": "colocate", "rollout": {"gpus_per_engine": 1}, "actor": {"gpus_per_rank": 1}}


def gaps(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """When nobody worked, between the first call and the last."""
    found, until = list[tuple[float, float]](), None
    for span in sorted(spans, key=lambda span: span.start):
        if until is not None and span.start > until + 1e-6:
            found.append((until, span.start))
        until = span.end if until is None else max(until, span.end)
    return found


ROLES = {"few": {}, "reference": REFERENCE, "two-updates": FORWARD}
PLACEMENTS = {"colocate": "colocate", "gpu": GPU, "hybrid": "hybrid", "async": "async"}
CASES = {
    f"{role}-{placement}-{(at + row) % 2}": (ROLES[role], PLACEMENTS[placement], (at + row) % 2)
    for row, role in enumerate(ROLES)
    for at, placement in enumerate(PLACEMENTS)
}
"""All roles in all placements; each of them has both values of the staleness."""


@pytest.mark.parametrize(("roles", "placement", "staleness"), CASES.values(), ids=CASES)
def test_some_role_works_at_every_moment_of_a_run(
    tmp_path: Path, roles: dict[str, Any], placement: Any, staleness: int
) -> None:
    outcome = SimulatedRun(tmp_path, steps=STEPS, placement=placement, max_staleness=staleness, **roles).run(
        at_most_s=1e3
    )
    assert len(outcome.steps) == STEPS
    assert gaps(span for span in outcome.spans if span.end > span.start) == []
