# SPDX-License-Identifier: Apache-2.0
"""Components of this plugin, named by strings so that listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_environments() -> list[Component]:
    return [Component("search", "relax_plugin_search.environment:Search", "A tool that searches a file of documents")]
