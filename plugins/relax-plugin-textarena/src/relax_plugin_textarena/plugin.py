# SPDX-License-Identifier: Apache-2.0
"""Components of this plugin, named by strings so that listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook

HERE = "relax_plugin_textarena.environment"


@hook
def relax_environments() -> list[Component]:
    return [
        Component("textarena", f"{HERE}:TextArena", "games of TextArena, alone or against opponents"),
        Component("textarena-team", f"{HERE}:TextArenaTeam", "games of TextArena in which the policy is a whole team"),
    ]
