# SPDX-License-Identifier: Apache-2.0
"""Components of plugins of ours by kind and name, so that an unknown name can say what to install. Not a registry."""

from __future__ import annotations

KNOWN: dict[str, dict[str, str]] = {
    "algorithm": {"grpo": "relax-plugin-policy-gradient"},
    "reward": {"exact": "relax-plugin-rewards", "maths": "relax-plugin-rewards"},
    "engine": {
        "transformers": "relax-plugin-transformers",
        "vllm": "relax-plugin-vllm",
        "sglang": "relax-plugin-sglang",
    },
    "trainer": {"torch": "relax-plugin-torch", "megatron": "relax-plugin-megatron"},
    "sink": {"tensorboard": "relax-plugin-tensorboard"},
    "bus": {"transfer-queue": "relax-plugin-transfer-queue"},
}
