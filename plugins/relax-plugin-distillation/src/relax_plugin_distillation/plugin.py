# SPDX-License-Identifier: Apache-2.0
"""The components of this distribution, named by strings so that listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_algorithms() -> list[Component]:
    return [
        Component(
            "distillation",
            "relax_plugin_distillation.distillation:Distillation",
            "On-policy distillation from a teacher (arXiv 2306.13649)",
        )
    ]
