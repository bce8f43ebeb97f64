# SPDX-License-Identifier: Apache-2.0
"""What this distribution offers. Strings only: nothing heavy is imported to list it."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_inference_backends() -> list[Component]:
    return [Component("sglang", "relax_plugin_sglang.engine:SglangEngine", "SGLang: radix cache, continuous batching")]
