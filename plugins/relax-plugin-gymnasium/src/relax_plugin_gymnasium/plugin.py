# SPDX-License-Identifier: Apache-2.0
"""Components of this plugin, named by strings so that listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_environments() -> list[Component]:
    target = "relax_plugin_gymnasium.environment:Gymnasium"
    return [Component("gymnasium", target, "environments of Gymnasium, shown as text or images and played in text")]
