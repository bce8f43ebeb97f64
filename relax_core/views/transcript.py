# SPDX-License-Identifier: Apache-2.0
"""A sample as people read it: its turns, its reward, what else is known. Takes any mapping that a role wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LONGEST = 6_000
"""Characters of a turn that a page shows."""
_FACTS = ("outcome", "task_id", "group_id", "sample_index", "attempt", "num_tokens", "lag", "purpose")


@dataclass(frozen=True, slots=True)
class Transcript:
    """What a page shows of one sample."""

    reward: str
    facts: str
    turns: tuple[tuple[str, str], ...]


def transcript(sample: Mapping[str, Any]) -> Transcript:
    """From a record of `samples/step-*.jsonl.zst`."""
    reward = sample.get("reward")
    # Only a judged sample has a reward; the outcome says why there is none.
    shown = f"{reward:.3g}" if isinstance(reward, (int, float)) else str(sample.get("outcome") or "no reward")
    parts = [f"{name} {value:.3g}" for name, value in (sample.get("rewards") or {}).items() if value is not None]
    facts = [f"{key} {sample[key]}" for key in _FACTS if sample.get(key) not in (None, "")]
    return Transcript(shown, ", ".join([*parts, *facts]), tuple(_turns(sample)))


def _turns(sample: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    messages = sample.get("messages") or ()
    turns = [(str(turn.get("role", "")), _text(turn.get("content"))) for turn in messages if isinstance(turn, Mapping)]
    if not turns and sample.get("prompt") is not None:
        turns.append(("prompt", _text(sample["prompt"])))
    response = sample.get("response")
    if response is not None and (not turns or turns[-1][0] != "assistant"):
        turns.append(("assistant", _text(response)))
    if sample.get("answer") is not None:
        turns.append(("expected answer", _text(sample["answer"])))
    return turns


def _text(content: Any) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        text = "".join(_part(part) for part in content)
    else:
        text = "" if content is None else str(content)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}\n... and {len(text) - LONGEST} more characters"


def _part(part: Any) -> str:
    if isinstance(part, Mapping):
        return str(part.get("text") or f"[{part.get('type') or part.get('kind') or 'media'}]")
    return str(part)
