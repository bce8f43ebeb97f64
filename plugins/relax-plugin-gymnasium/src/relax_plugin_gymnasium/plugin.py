# SPDX-License-Identifier: Apache-2.0
"""The components that this distribution offers. They are named by strings only: listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_environments() -> list[Component]:
    target = "relax_plugin_gymnasium.environment:Gymnasium"
    return [Component("gymnasium", target, "environments of Gymnasium, told and played in words")]
