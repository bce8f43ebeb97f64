# SPDX-License-Identifier: Apache-2.0
"""What this distribution offers. Strings only: nothing heavy is imported to list it."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_training_backends() -> list[Component]:
    return [Component("torch", "relax_plugin_torch.trainer:TorchTrainer", "Hugging Face models in plain torch")]
