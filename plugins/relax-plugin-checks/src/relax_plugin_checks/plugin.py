# SPDX-License-Identifier: Apache-2.0
"""Registration of this distribution's checks by import path, so that listing them imports nothing heavy."""

from relax_core.api.component import Check
from relax_core.api.hooks import hook


@hook
def relax_checks() -> list[Check]:
    help_line = "tokenizer, template, mask, log-probs, rewards and optimizer of step 1"
    return [Check("first-step", "relax_plugin_checks.first_step:first_step", help_line, stage="first-step")]
