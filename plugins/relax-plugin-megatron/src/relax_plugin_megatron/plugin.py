# SPDX-License-Identifier: Apache-2.0
"""The entry point of relax-plugin-megatron."""

from __future__ import annotations

from relax_core.api import Component, hook


@hook
def relax_training_backends() -> list[Component]:
    return [Component("megatron", "relax_plugin_megatron.trainer:MegatronTrainer", "Trains with megatron-core.")]
