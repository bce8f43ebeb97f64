# SPDX-License-Identifier: Apache-2.0
"""Registration of this distribution's components by import path, so that listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_inference_backends() -> list[Component]:
    return [Component("sglang", "relax_plugin_sglang.engine:SglangEngine", "SGLang: radix cache, continuous batching")]
