# SPDX-License-Identifier: Apache-2.0
"""Components of this plugin, named by strings so that listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_environments() -> list[Component]:
    return [
        Component("mcp", "relax_plugin_mcp.environment:Mcp", "tools of MCP servers, called until the policy answers")
    ]
