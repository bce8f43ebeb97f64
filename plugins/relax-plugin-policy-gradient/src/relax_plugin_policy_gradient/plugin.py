# SPDX-License-Identifier: Apache-2.0
"""What this distribution offers. Strings only: nothing heavy is imported to list it."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook

_PACKAGE = "relax_plugin_policy_gradient"


@hook
def relax_algorithms() -> list[Component]:
    return [
        Component("grpo", f"{_PACKAGE}.grpo:GRPO", "Group Relative Policy Optimization"),
        Component("dr-grpo", f"{_PACKAGE}.dr_grpo:DrGRPO", "GRPO without length and difficulty bias"),
        Component("dapo", f"{_PACKAGE}.dapo:DAPO", "Clip-higher, mean over tokens, soft overlong penalty"),
        Component("gspo", f"{_PACKAGE}.gspo:GSPO", "Group Sequence Policy Optimization"),
        Component("sapo", f"{_PACKAGE}.sapo:SAPO", "Soft Adaptive Policy Optimization"),
        Component("cispo", f"{_PACKAGE}.cispo:CISPO", "Clipped importance weights, every token keeps its gradient"),
        Component("rloo", f"{_PACKAGE}.rloo:RLOO", "REINFORCE with a leave-one-out baseline"),
        Component("reinforce", f"{_PACKAGE}.reinforce:Reinforce", "The policy gradient with a constant baseline"),
        Component(
            "reinforce-plus-plus",
            f"{_PACKAGE}.reinforce_plus_plus:ReinforcePlusPlus",
            "REINFORCE++: normalised over the batch",
        ),
        Component(
            "reinforce-plus-plus-baseline",
            f"{_PACKAGE}.reinforce_plus_plus_baseline:ReinforcePlusPlusBaseline",
            "REINFORCE++ with the group's mean as baseline",
        ),
        Component("gpg", f"{_PACKAGE}.gpg:GPG", "Group Policy Gradient"),
        Component("opo", f"{_PACKAGE}.opo:OPO", "On-policy REINFORCE with the optimal reward baseline"),
        Component("dppo", f"{_PACKAGE}.dppo:DPPO", "Divergence Proximal Policy Optimization"),
        Component("max-rl", f"{_PACKAGE}.max_rl:MaxRL", "Maximum likelihood reinforcement learning"),
        Component("gdpo", f"{_PACKAGE}.gdpo:GDPO", "Several rewards, each normalised on its own"),
    ]
