# SPDX-License-Identifier: Apache-2.0
"""Results of tool calls in the form that the policy sees: text up to a limit, images, and descriptions of the rest."""

from __future__ import annotations

import json
from typing import Any

from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
)

from relax_core.api import Media, Part

CUT = "\n[{} bytes more are not shown]"


def content_of(result: CallToolResult, most_bytes: int, images: bool) -> str | tuple[Part, ...]:
    """Return the result as text, or as parts if it has images. Text beyond `most_bytes` is cut between characters."""
    parts: list[Part] = []
    texts: list[str] = []
    blocks: list[Any] = list(result.content)
    if not blocks and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    for block in blocks:
        if images and isinstance(block, ImageContent):
            parts += [Part("\n".join(texts))] if texts else []
            texts = []
            parts.append(Part(media=Media("image", f"data:{block.mime_type};base64,{block.data}")))
        else:
            texts.append(_in_words(block))
    if not parts:
        return _bounded("\n".join(texts), most_bytes)
    parts += [Part("\n".join(texts))] if texts else []
    shown: list[Part] = []
    for part in parts:
        shown.append(part if part.media else Part(_bounded(part.text, most_bytes)))
        most_bytes = max(0, most_bytes - len(part.text.encode(errors="replace")))
    return tuple(shown)


def _in_words(block: Any) -> str:
    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, ImageContent | AudioContent):
        kind = "image" if isinstance(block, ImageContent) else "sound"
        return f"[{kind}, {block.mime_type}, {len(block.data) * 3 // 4} bytes, not shown]"
    if isinstance(block, ResourceLink):
        return f"[link to {block.uri}{f': {block.description}' if block.description else ''}]"
    if isinstance(block, EmbeddedResource):
        inside = block.resource
        if isinstance(inside, BlobResourceContents):
            return f"[{inside.uri}, {inside.mime_type or 'bytes'}, {len(inside.blob) * 3 // 4} bytes, not shown]"
        return inside.text
    return f"[content of type {getattr(block, 'type', type(block).__name__)}, not shown]"


def _bounded(text: str, most_bytes: int) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= most_bytes:
        return text
    kept = encoded[:most_bytes].decode(errors="ignore")
    return kept + CUT.format(len(encoded) - len(kept.encode()))
