# SPDX-License-Identifier: Apache-2.0
"""One task on a page: its media shown and played, its prompt token by token, its answer. The page needs no network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from relax_core.views.media_element import CSS, element, told

_PAGE = Markup("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:">
<title>{title}</title><style>
:root {{ color-scheme: light dark; --soft: #7a8491; }}
body {{ margin: 0 auto; padding: 1rem; max-width: 52rem; font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }}
pre {{ white-space: pre-wrap; font: .88rem/1.6 ui-monospace, Menlo, monospace; }} pre i {{ font-style: normal; opacity: .35; }}
{css}
</style></head><body><h1>{title}</h1><p>{length} tokens of text and places</p>
{media}<h2>Prompt</h2><pre>{tokens}</pre><h2>Answer</h2><pre>{answer}</pre><h2>Other columns</h2><pre>{metadata}</pre>
</body></html>
""")


def task_page(shown: Mapping[str, Any], previews: Sequence[bytes | None]) -> str:
    """The page, from what `relax data show --json` tells and a copy of each medium."""
    media = Markup("").join(
        element(medium["kind"], preview, f"{medium['source']}: {medium.get('error') or told(medium)}")
        for medium, preview in zip(shown["media"], previews, strict=True)
    )
    return str(
        _PAGE.format(
            title=f"{shown['where']} ({shown['id']})", css=Markup(CSS), length=len(shown["ids"]), media=media,
            tokens=Markup("<i>│</i>").join(shown["tokens"]), answer=_text(shown["answer"]), metadata=_text(shown["metadata"]),
        )
    )  # fmt: skip


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1, default=str)
