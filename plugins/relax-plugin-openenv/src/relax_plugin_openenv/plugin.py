# SPDX-License-Identifier: Apache-2.0
"""Components of this plugin, named by strings so that listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_environments() -> list[Component]:
    target = "relax_plugin_openenv.environment:OpenEnv"
    return [Component("openenv", target, "environments of OpenEnv servers: reset and step over a WebSocket")]
