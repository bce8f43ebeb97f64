# SPDX-License-Identifier: Apache-2.0
"""Registration of the check of memory by import path, so that listing it imports nothing heavy."""

from relax_core.api.component import Check
from relax_core.api.hooks import hook


@hook
def relax_checks() -> list[Check]:
    help_line = "the run fits into the free memory of this machine"
    return [Check("memory", "relax_plugin_workbench.memory:memory", help_line, stage="preflight", timeout_s=600.0)]
