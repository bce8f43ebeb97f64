# SPDX-License-Identifier: Apache-2.0
"""The figures of media that HTML pages show."""

from __future__ import annotations

import base64
from html import escape

from relax_core.api.modality import browser_type

MEDIA_CSS = """.medium { margin: .4rem 0; } .medium img, .medium video { max-width: 100%; max-height: 18rem; min-width: 4rem;
  border-radius: .3rem; display: block; } .medium video { min-width: 12rem; }
.medium figcaption { color: var(--soft, #5d6773); font-size: .8rem; }"""
_IMAGE = '<img alt="{caption}" src="{source}">'
_SOUND = '<audio controls preload="metadata" src="{source}"></audio>'
_VIDEO = '<video controls preload="metadata" src="{source}"></video>'
_ELEMENTS = {"image": _IMAGE, "audio": _SOUND, "video": _VIDEO}


def medium_figure(kind: str, data: bytes | None, caption: str) -> str:
    """Return the HTML figure of a medium. If a browser can't show `data`, the figure says that no copy was kept."""
    form, caption = browser_type(data) if data else "", escape(caption)
    shown = f"<em>no copy of this {escape(kind)} was kept</em>"
    if data and form.startswith(kind) and kind in _ELEMENTS:
        source = f"data:{form};base64,{base64.b64encode(data).decode()}"
        shown = _ELEMENTS[kind].format(caption=caption, source=source)
    return f'<figure class="medium">{shown}<figcaption>{caption}</figcaption></figure>'
