# SPDX-License-Identifier: Apache-2.0
"""Readable forms of samples, media and tasks: transcripts, figures of media, and pages of one task.

A sample is any record of `samples/`; missing fields are left out.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from relax_core.api.errors import printable
from relax_core.api.modality import browser_type

LONGEST = 6_000
"""Most characters of a turn that a page shows."""
_FACTS = ("outcome", "task_id", "group_id", "sample_index", "attempt", "num_tokens", "lag", "purpose")
Media = tuple[Mapping[str, Any], ...]
"""Media parts of a message, with `type`, and if known `source` and the `key` in the media store."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """The parts of one sample that a page shows."""

    reward: str
    facts: str
    turns: tuple[tuple[str, str], ...]
    media: tuple[Media, ...] = ()
    """Media of each turn."""


def transcript(sample: Mapping[str, Any]) -> Transcript:
    """Return the transcript of a record of `samples/step-*.jsonl.zst`."""
    reward = sample.get("reward")
    # Only a judged sample has a reward; else the outcome is the reason.
    shown = f"{reward:.3g}" if isinstance(reward, (int, float)) else str(sample.get("outcome") or "no reward")
    parts = [f"{name} {value:.3g}" for name, value in (sample.get("rewards") or {}).items() if value is not None]
    facts = [f"{key} {sample[key]}" for key in _FACTS if sample.get(key) not in (None, "")]
    turns = list(_turns(sample))
    return Transcript(
        shown, ", ".join([*parts, *facts]), tuple((role, text) for role, text, _ in turns), tuple(m for *_, m in turns)
    )


def _turns(sample: Mapping[str, Any]) -> Iterator[tuple[str, str, Media]]:
    last = ""
    for role, content, calls in _said(sample):
        last = role
        yield role, "\n".join(filter(None, (_text(content), *calls))), _media(content)
    response = sample.get("response")
    if response is not None and last != "assistant":
        yield "assistant", _text(response), ()
    if sample.get("answer") is not None:
        yield "expected answer", _text(sample["answer"]), ()


def _said(sample: Mapping[str, Any]) -> Iterator[tuple[str, Any, list[str]]]:
    """Yield (role, content, tool calls) of each message, or of the prompt if the sample has no messages."""
    prompt = sample.get("prompt")
    several = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    is_chat = several and all(isinstance(turn, Mapping) and "role" in turn for turn in prompt or ())
    messages: Any = sample.get("messages") or (prompt if is_chat else ())
    turns = [turn for turn in messages if isinstance(turn, Mapping)]
    if not turns and prompt is not None:
        yield "prompt", prompt, []
    for turn in turns:
        calls = [call for call in turn.get("tool_calls") or () if isinstance(call, Mapping)]
        shown_calls = [
            _text(f"{call.get('name')}({json.dumps(call.get('arguments'), ensure_ascii=False)})") for call in calls
        ]
        yield str(turn.get("role", "")), turn.get("content"), shown_calls


def _text(content: Any) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        text = "".join(_part(part) for part in content)
    else:
        text = "" if content is None else str(content)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}\n... and {len(text) - LONGEST} more characters"


def _media(content: Any) -> Media:
    if not isinstance(content, Sequence) or isinstance(content, str):
        return ()
    return tuple(
        part for part in content if isinstance(part, Mapping) and part.get("type") in ("image", "video", "audio")
    )


def _part(part: Any) -> str:
    if isinstance(part, Mapping):
        return str(part.get("text") or f"[{part.get('type') or part.get('kind') or 'media'}]")
    return str(part)


MEDIA_CSS = """.medium { margin: .4rem 0; } .medium img, .medium video { max-width: 100%; max-height: 18rem; min-width: 4rem;
  border-radius: .3rem; display: block; } .medium video { min-width: 12rem; }
.medium figcaption { color: var(--soft, #5d6773); font-size: .8rem; }"""
_IMAGE = '<img alt="{caption}" src="{source}">'
_SOUND = '<audio controls preload="metadata" src="{source}"></audio>'
_VIDEO = '<video controls preload="metadata" src="{source}"></video>'
_ELEMENTS = {"image": _IMAGE, "audio": _SOUND, "video": _VIDEO}


def medium_figure(kind: str, data: bytes | None, caption: str) -> Markup:
    """Return the HTML figure of a medium. If a browser can't show `data`, the figure says that no copy was kept."""
    form = browser_type(data) if data else ""
    shown = Markup("<em>no copy of this {kind} was kept</em>").format(kind=kind)
    if data and form.startswith(kind) and kind in _ELEMENTS:
        source = f"data:{form};base64,{base64.b64encode(data).decode()}"
        shown = Markup(_ELEMENTS[kind]).format(caption=caption, source=source)
    return Markup('<figure class="medium">{shown}<figcaption>{caption}</figcaption></figure>').format(
        shown=shown, caption=caption
    )


def medium_facts(facts: Mapping[str, Any]) -> str:
    """Return the known properties of a medium (size, duration, format) as one line."""
    units = {"size_bytes": "bytes", "tokens": "tokens", "seconds": "s", "rate": "Hz", "channels": "channels"}
    parts = [f"{facts[name]:g} {unit}" for name, unit in units.items() if facts.get(name) is not None]
    if facts.get("width"):
        parts.insert(0, f"{facts['width']} x {facts['height']}")
    parts += [str(facts[name]) for name in ("format", "codec") if facts.get(name)]
    return ", ".join([*parts, *([f"key {facts['key'][:12]}"] if facts.get("key") else [])])


_PAGE = Markup("""<!doctype html>
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
""")


def task_page(shown: Mapping[str, Any], previews: Sequence[bytes | None]) -> str:
    """Return the HTML page of a task from the document of `relax data show --json` and a preview of each medium."""
    media = Markup("").join(
        medium_figure(medium["kind"], preview, f"{medium['source']}: {medium.get('error') or medium_facts(medium)}")
        for medium, preview in zip(shown["media"], previews, strict=True)
    )
    return printable(
        _PAGE.format(
            title=f"{shown['where']} ({shown['id']})", css=Markup(MEDIA_CSS), length=len(shown["ids"]), media=media,
            tokens=Markup("<i>│</i>").join(shown["tokens"]), answer=_json_text(shown["answer"]),
            metadata=_json_text(shown["metadata"]),
        )
    )  # fmt: skip


def _json_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1, default=str)
