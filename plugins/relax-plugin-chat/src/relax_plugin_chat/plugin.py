# SPDX-License-Identifier: Apache-2.0
"""Registration of this distribution's components by import path, so that listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_model_families() -> list[Component]:
    return [
        Component("chat", "relax_plugin_chat.chat:ChatFamily", "Any model with a tokenizer.json and a chat template")
    ]
