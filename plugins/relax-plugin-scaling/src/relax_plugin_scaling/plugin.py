# SPDX-License-Identifier: Apache-2.0
"""Registration of the scaling policies by import path, and the hook that makes the autoscaler of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_core.api.component import Component
from relax_core.api.hooks import hook

if TYPE_CHECKING:
    from relax_core.api import ScalingLimits, ScalingPolicy
    from relax_plugin_scaling.autoscaler import Autoscaler

HERE = "relax_plugin_scaling"


@hook
def relax_scaling_policies() -> list[Component]:
    return [
        Component(
            "target-utilization", f"{HERE}.target_utilization:TargetUtilization", "keeps the use of engines in a band"
        ),
        Component("balance", f"{HERE}.balance:Balance", "gives the trainer as many engines as it needs"),
    ]


@hook
def relax_autoscaler(policy: ScalingPolicy, limits: ScalingLimits, min_engines: int) -> Autoscaler:
    from relax_plugin_scaling.autoscaler import Autoscaler

    return Autoscaler(policy, limits, min_engines)
