# SPDX-License-Identifier: Apache-2.0
"""A sample as people read it: its turns, its reward, what else is known. Takes any mapping that a role wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LONGEST = 6_000
"""Characters of a turn that a page shows."""
_FACTS = ("outcome", "task_id", "group_id", "sample_index", "attempt", "num_tokens", "lag", "purpose")
Media = tuple[Mapping[str, Any], ...]
"""Each with its `type`, and where known its `source` and its `key` in the media store."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """What a page shows of one sample."""

    reward: str
    facts: str
    turns: tuple[tuple[str, str], ...]
    media: tuple[Media, ...] = ()
    """By turn, what it shows."""


def transcript(sample: Mapping[str, Any]) -> Transcript:
    """From a record of `samples/step-*.jsonl.zst`."""
    reward = sample.get("reward")
    # Only a judged sample has a reward; the outcome says why there is none.
    shown = f"{reward:.3g}" if isinstance(reward, (int, float)) else str(sample.get("outcome") or "no reward")
    parts = [f"{name} {value:.3g}" for name, value in (sample.get("rewards") or {}).items() if value is not None]
    facts = [f"{key} {sample[key]}" for key in _FACTS if sample.get(key) not in (None, "")]
    turns = list(_turns(sample))
    return Transcript(
        shown, ", ".join([*parts, *facts]), tuple((role, text) for role, text, _ in turns), tuple(m for *_, m in turns)
    )


def _turns(sample: Mapping[str, Any]) -> Iterator[tuple[str, str, Media]]:
    last = ""
    for role, content in _said(sample):
        last = role
        yield role, _text(content), _media(content)
    response = sample.get("response")
    if response is not None and last != "assistant":
        yield "assistant", _text(response), ()
    if sample.get("answer") is not None:
        yield "expected answer", _text(sample["answer"]), ()


def _said(sample: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The conversation where there is one, else the prompt."""
    prompt = sample.get("prompt")
    messages: Any = sample.get("messages") or (prompt if _is_chat(prompt) else ())
    turns = [turn for turn in messages if isinstance(turn, Mapping)]
    if not turns and prompt is not None:
        yield "prompt", prompt
    for turn in turns:
        yield str(turn.get("role", "")), turn.get("content")


def _is_chat(prompt: Any) -> bool:
    several = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return several and all(isinstance(turn, Mapping) and "role" in turn for turn in prompt)


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
