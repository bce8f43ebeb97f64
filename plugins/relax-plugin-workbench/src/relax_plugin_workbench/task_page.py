# SPDX-License-Identifier: Apache-2.0
"""The HTML page of one task, which `relax data show --html` writes, and the facts about media as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from relax_core.api.errors import printable
from relax_core.runs import MEDIA_CSS, medium_figure


def medium_facts(facts: Mapping[str, Any]) -> str:
    """Return the known properties of a medium (size, duration, format) as one line."""
    units = {"size_bytes": "bytes", "tokens": "tokens", "seconds": "s", "rate": "Hz", "channels": "channels"}
    parts = [f"{facts[name]:g} {unit}" for name, unit in units.items() if facts.get(name) is not None]
    if facts.get("width"):
        parts.insert(0, f"{facts['width']} x {facts['height']}")
    parts += [str(facts[name]) for name in ("format", "codec") if facts.get(name)]
    return ", ".join([*parts, *([f"key {facts['key'][:12]}"] if facts.get("key") else [])])


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:">
<title>{title}</title><style>
:root {{ color-scheme: light dark; --soft: #7a8491; }}
body {{ margin: 0 auto; padding: 1rem; max-width: 52rem; font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }}
pre {{ white-space: pre-wrap; font: .88rem/1.6 ui-monospace, Menlo, monospace; }} pre i {{ font-style: normal; opacity: .35; }}
{css}
</style></head><body><h1>{title}</h1><p>{length} tokens of text and media placeholders</p>
{media}<h2>Prompt</h2><pre>{tokens}</pre><h2>Answer</h2><pre>{answer}</pre><h2>Other columns</h2><pre>{metadata}</pre>
</body></html>
"""


def task_page(shown: Mapping[str, Any], previews: Sequence[bytes | None]) -> str:
    """Return the HTML page of a task from the document of `relax data show --json` and a preview of each medium."""
    media = "".join(
        medium_figure(medium["kind"], preview, f"{medium['source']}: {medium.get('error') or medium_facts(medium)}")
        for medium, preview in zip(shown["media"], previews, strict=True)
    )
    return printable(
        _PAGE.format(
            title=escape(f"{shown['where']} ({shown['id']})"), css=MEDIA_CSS, length=len(shown["ids"]), media=media,
            tokens="<i>│</i>".join(map(escape, shown["tokens"])), answer=escape(_json_text(shown["answer"])),
            metadata=escape(_json_text(shown["metadata"])),
        )
    )  # fmt: skip


def _json_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1, default=str)
