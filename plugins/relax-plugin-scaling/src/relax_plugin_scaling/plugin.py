# SPDX-License-Identifier: Apache-2.0
"""Registration of this distribution's components by import path, so that listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook

HERE = "relax_plugin_scaling"


@hook
def relax_scaling_policies() -> list[Component]:
    return [
        Component(
            "target-utilization", f"{HERE}.target_utilization:TargetUtilization", "keeps the use of engines in a band"
        ),
        Component("balance", f"{HERE}.balance:Balance", "gives the trainer as many engines as it needs"),
    ]
