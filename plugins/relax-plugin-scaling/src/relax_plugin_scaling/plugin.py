# SPDX-License-Identifier: Apache-2.0
"""Registration of the scaling policies by import path, and the hooks that make the parts of a run that scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_core.api.component import Component
from relax_core.api.hooks import hook

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relax_core.api import Chosen, Clock, Engine, ScalingLimits, ScalingPolicy, Secret
    from relax_plugin_scaling.autoscaler import Autoscaler
    from relax_plugin_scaling.external import ExternalWorkers

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


@hook
def relax_external_workers(
    address: str, token: Secret, engine: Chosen, kind: type[Engine], plugins: Sequence[tuple[str, ...]], clock: Clock
) -> ExternalWorkers:
    from relax_plugin_scaling.external import ExternalWorkers, describe

    return ExternalWorkers(address, token, describe(engine, kind, plugins), clock)
