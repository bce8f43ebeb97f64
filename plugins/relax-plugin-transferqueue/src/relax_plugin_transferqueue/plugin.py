# SPDX-License-Identifier: Apache-2.0
"""Registration of this distribution's components by import path, so that listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_buses() -> list[Component]:
    return [
        Component(
            "transferqueue", "relax_plugin_transferqueue.bus:TransferQueueBus", "Payloads in the TransferQueue package"
        )
    ]
