# SPDX-License-Identifier: Apache-2.0
"""Weight transports through a network. Strings only: nothing heavy is imported to list them."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_weight_transports() -> list[Component]:
    here = "relax_plugin_network_weights"
    return [
        Component("http", f"{here}.http:Http", "Files that the trainer's process serves to other hosts"),
        Component("collective", f"{here}.collective:Collective", "From memory to memory over gloo or nccl"),
    ]
