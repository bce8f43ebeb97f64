# SPDX-License-Identifier: Apache-2.0
"""Registration of this distribution's components by import path, so that listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook

HERE = "relax_plugin_selection"


@hook
def relax_filters() -> list[Component]:
    return [
        Component("zero-variance", f"{HERE}.filters:ZeroVariance", "drops groups whose samples all earned the same"),
        Component("reward-band", f"{HERE}.filters:RewardBand", "drops groups whose mean reward is out of bounds"),
        Component("truncated", f"{HERE}.filters:Truncated", "drops groups of which too many samples were cut off"),
    ]


@hook
def relax_samplers() -> list[Component]:
    return [
        Component("curriculum", f"{HERE}.curriculum:Curriculum", "easy tasks first, by a column of difficulty"),
        Component("mixture", f"{HERE}.mixture:Mixture", "tasks of several kinds in given shares"),
        Component("success-rate", f"{HERE}.success_rate:SuccessRate", "tasks that the policy solves half of the time"),
    ]
