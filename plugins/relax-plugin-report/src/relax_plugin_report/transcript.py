# SPDX-License-Identifier: Apache-2.0
"""Transcripts of samples. A sample is any record of `samples/`; missing fields are left out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
