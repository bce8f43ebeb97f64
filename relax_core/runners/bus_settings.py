# SPDX-License-Identifier: Apache-2.0
"""What the bus is told of a run: from the launch's plain data, so that it can be opened in any process."""

from __future__ import annotations

from relax_core.api.bus import BusSettings
from relax_core.api.version import Version
from relax_core.runners.launch import Launch


def bus_settings(launch: Launch) -> BusSettings:
    rollout, plan = launch.config["rollout"], launch.plan
    return BusSettings(
        group_size=plan.group_size,
        groups_per_step=rollout["prompts_per_step"],
        max_staleness=plan.max_staleness,
        late=rollout["late"],
        spare_groups=rollout["spare_groups"],
        min_valid=plan.min_valid,
        columns=plan.trained_columns,
        steps=launch.config["steps"],
        followers=tuple(f"{role}.fit" for role in plan.fit_columns),
    )


def starting_version(launch: Launch) -> Version:
    """Of the actor's weights when the run, or its continuation, begins."""
    return Version("actor", launch.incarnation, launch.resume.step if launch.resume else 0)
