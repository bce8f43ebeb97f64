# SPDX-License-Identifier: Apache-2.0
"""Components of plugins of ours by kind and name, so that an unknown name can say what to install. Not a registry."""

from __future__ import annotations

_POLICY_GRADIENT = (
    "cispo", "dapo", "dppo", "dr-grpo", "gdpo", "gigpo", "gpg", "grpo", "gspo", "m2po", "max-rl", "opo", "ppo", "reinforce",
    "reinforce-plus-plus", "reinforce-plus-plus-baseline", "remax", "rloo", "sapo",
)  # fmt: skip

KNOWN: dict[str, dict[str, str]] = {
    "algorithm": {
        **dict.fromkeys(_POLICY_GRADIENT, "relax-plugin-policy-gradient"),
        "distillation": "relax-plugin-distillation",
        **dict.fromkeys(("dpo", "reward-model", "sft"), "relax-plugin-supervised"),
    },
    "filter": dict.fromkeys(("zero-variance", "reward-band", "truncated"), "relax-plugin-selection"),
    "sampler": dict.fromkeys(("curriculum", "mixture", "success-rate"), "relax-plugin-selection"),
    "reward": dict.fromkeys(("exact", "judge", "maths"), "relax-plugin-rewards"),
    "modality-processor": dict.fromkeys(("image", "video", "audio"), "relax-plugin-omni"),
    "engine": {
        "transformers": "relax-plugin-transformers",
        "vllm": "relax-plugin-vllm",
        "sglang": "relax-plugin-sglang",
    },
    "trainer": {"torch": "relax-plugin-torch", "megatron": "relax-plugin-megatron"},
    "sink": {"tensorboard": "relax-plugin-tensorboard"},
    "bus": {"transferqueue": "relax-plugin-transferqueue"},
}
