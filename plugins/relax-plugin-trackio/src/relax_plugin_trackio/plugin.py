# SPDX-License-Identifier: Apache-2.0
"""The components of this distribution, named by strings so that listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_sinks() -> list[Component]:
    return [
        Component(
            "trackio",
            "relax_plugin_trackio.sink:Trackio",
            "A run of Trackio, local, on a server or in a Hugging Face Space",
        )
    ]
