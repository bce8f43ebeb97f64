# SPDX-License-Identifier: Apache-2.0
"""A medium on a page: an image that is shown, a sound or video that is played, within the page itself."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from relax_core.api.modality import browser_type

CSS = """.medium { margin: .4rem 0; } .medium img, .medium video { max-width: 100%; max-height: 18rem; min-width: 4rem;
  border-radius: .3rem; display: block; } .medium video { min-width: 12rem; }
.medium figcaption { color: var(--soft, #5d6773); font-size: .8rem; }"""
_IMAGE = '<img alt="{caption}" src="{source}">'
_SOUND = '<audio controls preload="metadata" src="{source}"></audio>'
_VIDEO = '<video controls preload="metadata" src="{source}"></video>'
_ELEMENTS = {"image": _IMAGE, "audio": _SOUND, "video": _VIDEO}


def element(kind: str, data: bytes | None, caption: str) -> Markup:
    """A figure; without bytes that a browser knows it says what is missing."""
    form = browser_type(data) if data else ""
    shown = Markup("<em>no copy of this {kind} was kept</em>").format(kind=kind)
    if data and form.startswith(kind) and kind in _ELEMENTS:
        source = f"data:{form};base64,{base64.b64encode(data).decode()}"
        shown = Markup(_ELEMENTS[kind]).format(caption=caption, source=source)
    return Markup('<figure class="medium">{shown}<figcaption>{caption}</figcaption></figure>').format(
        shown=shown, caption=caption
    )


def told(facts: Mapping[str, Any]) -> str:
    """What is known of a medium, in one line."""
    units = {"size_bytes": "bytes", "tokens": "tokens", "seconds": "s", "rate": "Hz", "channels": "channels"}
    parts = [f"{facts[name]:g} {unit}" for name, unit in units.items() if facts.get(name) is not None]
    if facts.get("width"):
        parts.insert(0, f"{facts['width']} x {facts['height']}")
    parts += [str(facts[name]) for name in ("format", "codec") if facts.get(name)]
    return ", ".join([*parts, *([f"key {facts['key'][:12]}"] if facts.get("key") else [])])
