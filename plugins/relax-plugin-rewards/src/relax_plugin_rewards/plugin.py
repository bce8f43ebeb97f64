# SPDX-License-Identifier: Apache-2.0
"""What this distribution offers. Strings only: nothing heavy is imported to list it."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_rewards() -> list[Component]:
    return [
        Component("exact", "relax_plugin_rewards.exact:Exact", "1 when the whole response equals the answer"),
        Component("judge", "relax_plugin_rewards.judge:Judge", "What another model thinks of the response"),
        Component("maths", "relax_plugin_rewards.maths:Maths", "1 when the final expression equals the answer"),
    ]
