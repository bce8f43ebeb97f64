# SPDX-License-Identifier: Apache-2.0
"""The facts about a run's first step, and the findings of its checks as lines for people.

Roles describe the step as plain data: the rollout the first tasks and their samples ("stops", "tasks"), the actor the
rows ("rows") and the log-probs of a few rows ("log_probs"). `sampling.first_samples` and `roles.first_rows` make the
facts and document their keys. Plugins make the checks (`control.preflight`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from relax_core.api.checks import CheckFinding

ROUND_TRIP = "the template round trip is exact"
"""Name of the check that proves the tokens of the first tasks against their rows."""
MOST_TASKS = 8
"""Number of tasks of step 1 that the rollout describes."""
SHOWN = 2
"""Number of examples of tokens that the actor describes."""


def add_facts(known: dict[str, Any], told: Mapping[str, Any]) -> None:
    """Add facts of a role to the known facts of the step; tasks of several deliveries come together."""
    tasks = [*known.get("tasks", ()), *told.get("tasks", ())][:MOST_TASKS]
    known.update(told)
    known["tasks"] = tasks


def passed_line(checks: Iterable[CheckFinding], step: int = 1) -> str:
    """Return one line with all passed checks; empty for none."""
    well = ", ".join(f"{check.name} ({check.found})" for check in checks if check.state == "ok")
    return f"step {step}: {well}" if well else ""


def fault_lines(checks: Sequence[CheckFinding], step: int = 1) -> list[str]:
    """Return one line for each fault, failed checks first."""
    titles = {"failed": "check failed", "warning": "warning"}
    return [
        f"step {step}: {title}: {check.name}: {check.found}{'; ' * bool(check.evidence)}{check.evidence}; {check.advice}"
        for state, title in titles.items()
        for check in checks
        if check.state == state
    ]
