# SPDX-License-Identifier: Apache-2.0
"""Tasks, their messages and media."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MediaKind = Literal["image", "video", "audio"]
_HALF = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Media:
    """A reference to an image, video or audio."""

    kind: MediaKind
    source: str
    """Path, URL or data-URI from the task; a relative path is relative to the task file."""
    key: str = ""
    """Key in the media store, a hash of bytes, processor configuration and model family; empty until processed."""
    view: tuple[float, float] | None = None
    """Start and end in seconds of the part to show; None: the whole medium."""

    @property
    def reference(self) -> str:
        """Return the key, or the source if the key is empty, with the view as a media fragment: `abc#t=1.0,2.5`."""
        name = self.key or self.source
        return name if self.view is None else f"{name}#t={self.view[0]},{self.view[1]}"


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a message: text or a medium."""

    text: str = ""
    media: Media | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the model family parsed from the policy's turn."""

    name: str
    arguments: Mapping[str, Any]
    """Arguments by name; arrays are always lists, also if the caller passed tuples."""
    id: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", _with_lists(self.arguments))


def _with_lists(value: Any) -> object:
    """Return JSON data with every tuple as a list."""
    if isinstance(value, Mapping):
        return {key: _with_lists(item) for key, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat."""

    role: str
    content: str | tuple[Part, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further fields, such as `reasoning_content` or `tool_call_id`, which the chat template gets unchanged."""

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt for the policy, and the data for judging the response."""

    id: str
    prompt: str | tuple[Message, ...]
    """A string is tokenized without a template; messages are rendered with the chat template."""
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """All further columns of the task file: name -> value."""
    environment: str = ""
    """Name of the task's environment if the run has several environments; empty: the main environment."""

    def column(self, name: str) -> Any:
        """Return the value of a column of the task file; None if the task lacks the column."""
        return self.answer if name == "answer" else self.metadata.get(name)


def half(text: str) -> str:
    """Return the first half of a surrogate pair in a text, escaped as in JSON; empty for text of whole characters."""
    found = None if text.isascii() else _HALF.search(text)
    return "" if found is None else f"\\u{ord(found[0]):04x}"


def without_halves(text: str) -> str:
    """Return a text with the replacement character for each half of a surrogate pair."""
    return text if text.isascii() else _HALF.sub("\N{REPLACEMENT CHARACTER}", text)
