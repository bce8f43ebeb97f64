# SPDX-License-Identifier: Apache-2.0
"""The components of this distribution, named by strings so that listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_environments() -> list[Component]:
    return [Component("zoom", "relax_plugin_omni.zoom:Zoom", "A tool that shows a part of an image in more detail")]


@hook
def relax_modality_processors() -> list[Component]:
    return [
        Component("image", "relax_plugin_omni.image:ImageProcessor", "Images as patches, for Qwen-VL and Qwen-Omni"),
        Component("video", "relax_plugin_omni.video:VideoProcessor", "Frames of a video as patches"),
        Component("audio", "relax_plugin_omni.audio:AudioProcessor", "Sound as log-mel features, for Qwen-Omni"),
    ]
