# SPDX-License-Identifier: Apache-2.0
"""Registration of this distribution's components by import path, so that listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook

_PACKAGE = "relax_plugin_supervised"


@hook
def relax_algorithms() -> list[Component]:
    return [
        Component("sft", f"{_PACKAGE}.sft:SFT", "Supervised fine-tuning: the likelihood of given answers"),
        Component("dpo", f"{_PACKAGE}.dpo:DPO", "Direct Preference Optimization (arXiv 2305.18290), IPO, hinge"),
        Component(
            "reward-model", f"{_PACKAGE}.reward_model:RewardModel", "Bradley-Terry reward model (arXiv 2203.02155)"
        ),
    ]
