# SPDX-License-Identifier: Apache-2.0
"""Components of this plugin, named by strings so that listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_environments() -> list[Component]:
    package = "relax_plugin_agents"
    return [
        Component("agent", f"{package}.environment:Agent", "any program or function that calls the policy over HTTP"),
        Component(
            "verifiers",
            f"{package}.verifiers_environment:Verifiers",
            "environments of PrimeIntellect's verifiers library",
        ),
    ]
