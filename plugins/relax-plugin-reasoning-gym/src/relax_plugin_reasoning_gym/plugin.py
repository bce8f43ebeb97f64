# SPDX-License-Identifier: Apache-2.0
"""Components of this plugin, named by strings so that listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_task_sources() -> list[Component]:
    target = "relax_plugin_reasoning_gym.source:ReasoningGymSource"
    return [
        Component("reasoning-gym", target, "Tasks that reasoning-gym generates from a set's name, options and seed")
    ]


@hook
def relax_rewards() -> list[Component]:
    target = "relax_plugin_reasoning_gym.reward:ReasoningGymReward"
    return [
        Component("reasoning-gym", target, "1 if the rule of the task's reasoning-gym set accepts the answer, else 0")
    ]
