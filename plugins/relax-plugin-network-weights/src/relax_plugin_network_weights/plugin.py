# SPDX-License-Identifier: Apache-2.0
"""Registration of the weight transports by import path, so that listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_weight_transports() -> list[Component]:
    here = "relax_plugin_network_weights"
    return [
        Component("http", f"{here}.http:Http", "Files that the trainer's process serves to other hosts"),
        Component("collective", f"{here}.collective:Collective", "From memory to memory over gloo or nccl"),
    ]
