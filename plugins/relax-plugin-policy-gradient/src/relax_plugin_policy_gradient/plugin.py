# SPDX-License-Identifier: Apache-2.0
"""What this distribution offers. Strings only: nothing heavy is imported to list it."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_algorithms() -> list[Component]:
    return [Component("grpo", "relax_plugin_policy_gradient.grpo:GRPO", "Group Relative Policy Optimization")]
