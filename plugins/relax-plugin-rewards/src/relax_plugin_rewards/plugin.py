# SPDX-License-Identifier: Apache-2.0
"""The components that this distribution offers. They are named by strings only: listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_rewards() -> list[Component]:
    return [
        Component("exact", "relax_plugin_rewards.exact:Exact", "1 when the whole response equals the answer"),
        Component("judge", "relax_plugin_rewards.judge:Judge", "What another model thinks of the response"),
        Component("maths", "relax_plugin_rewards.maths:Maths", "1 when the final expression equals the answer"),
    ]
