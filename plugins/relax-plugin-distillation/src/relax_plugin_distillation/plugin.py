# SPDX-License-Identifier: Apache-2.0
"""What this distribution offers. Strings only: nothing heavy is imported to list it."""

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
