# SPDX-License-Identifier: Apache-2.0
"""The components of this distribution, named by strings so that listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook

_PACKAGE = "relax_plugin_policy_gradient"


@hook
def relax_algorithms() -> list[Component]:
    return [
        Component("grpo", f"{_PACKAGE}.grpo:GRPO", "Group Relative Policy Optimization (arXiv 2402.03300)"),
        Component(
            "dr-grpo", f"{_PACKAGE}.dr_grpo:DrGRPO", "GRPO without length and difficulty bias (arXiv 2503.20783)"
        ),
        Component(
            "dapo", f"{_PACKAGE}.dapo:DAPO", "Clip-higher, mean over tokens, soft overlong penalty (arXiv 2503.14476)"
        ),
        Component("gspo", f"{_PACKAGE}.gspo:GSPO", "Group Sequence Policy Optimization (arXiv 2507.18071)"),
        Component("sapo", f"{_PACKAGE}.sapo:SAPO", "Soft Adaptive Policy Optimization (arXiv 2511.20347)"),
        Component(
            "cispo",
            f"{_PACKAGE}.cispo:CISPO",
            "Clipped importance weights, every token keeps its gradient (arXiv 2506.13585)",
        ),
        Component("rloo", f"{_PACKAGE}.rloo:RLOO", "REINFORCE with a leave-one-out baseline (arXiv 2402.14740)"),
        Component(
            "reinforce",
            f"{_PACKAGE}.reinforce:Reinforce",
            "The policy gradient with a constant baseline (Williams 1992)",
        ),
        Component(
            "reinforce-plus-plus",
            f"{_PACKAGE}.reinforce_plus_plus:ReinforcePlusPlus",
            "REINFORCE++: normalised over the batch (arXiv 2501.03262)",
        ),
        Component(
            "reinforce-plus-plus-baseline",
            f"{_PACKAGE}.reinforce_plus_plus_baseline:ReinforcePlusPlusBaseline",
            "REINFORCE++ with the group's mean as baseline (arXiv 2501.03262)",
        ),
        Component("gpg", f"{_PACKAGE}.gpg:GPG", "Group Policy Gradient (arXiv 2504.02546)"),
        Component(
            "opo", f"{_PACKAGE}.opo:OPO", "On-policy REINFORCE with the optimal reward baseline (arXiv 2505.23585)"
        ),
        Component("dppo", f"{_PACKAGE}.dppo:DPPO", "Divergence Proximal Policy Optimization (arXiv 2602.04879)"),
        Component("m2po", f"{_PACKAGE}.m2po:M2PO", "A bound on the second moment of log ratios (arXiv 2510.01161)"),
        Component("ppo", f"{_PACKAGE}.ppo:PPO", "Proximal Policy Optimization with a critic (arXiv 1707.06347)"),
        Component("remax", f"{_PACKAGE}.remax:ReMax", "REINFORCE with a greedy answer as baseline (arXiv 2310.10505)"),
        Component("max-rl", f"{_PACKAGE}.max_rl:MaxRL", "Maximum likelihood reinforcement learning (arXiv 2602.02710)"),
        Component(
            "gigpo",
            f"{_PACKAGE}.gigpo:GiGPO",
            "Group-in-Group: turns compared where states are equal (arXiv 2505.10978)",
        ),
        Component("gdpo", f"{_PACKAGE}.gdpo:GDPO", "Several rewards, each normalised on its own (arXiv 2601.05242)"),
    ]
