# SPDX-License-Identifier: Apache-2.0
"""The components of this distribution, named by strings so that listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_sinks() -> list[Component]:
    return [Component("clearml", "relax_plugin_clearml.sink:ClearML", "An offline session of ClearML")]
