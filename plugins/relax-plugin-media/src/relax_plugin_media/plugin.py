# SPDX-License-Identifier: Apache-2.0
"""Registration of the media pipeline."""

from __future__ import annotations

from relax_core.api.hooks import hook


@hook
def relax_media_pipeline() -> str:
    """Return the class of the pipeline."""
    return "relax_plugin_media.pipeline:ProcessedOncePipeline"
