# SPDX-License-Identifier: Apache-2.0
"""A task: a prompt with what is needed to judge it; and the messages it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MediaKind = Literal["image", "video", "audio"]


@dataclass(frozen=True, slots=True)
class Media:
    """A medium by reference: bytes live once in the payload store under their key."""

    kind: MediaKind
    source: str
    """Path, URL or data-URI as the task named it; relative paths are relative to the task file."""
    key: str = ""
    """Hash of bytes, processor configuration and family; empty until a processor has seen it."""
    view: tuple[float, float] | None = None
    """Part of it, in seconds (start, end), so that two views share one stored medium."""

    @property
    def reference(self) -> str:
        """Key (or source) and view as one text, a media fragment: `abc#t=1.0,2.5`."""
        name = self.key or self.source
        return name if self.view is None else f"{name}#t={self.view[0]},{self.view[1]}"


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a message: text or a medium."""

    text: str = ""
    media: Media | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the policy wrote, parsed by the model family. Arrays among its arguments are lists, whoever made it."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", _with_lists(self.arguments))


def _with_lists(value: Any) -> Any:
    """JSON data whose arrays are lists."""
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

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


@dataclass(frozen=True, slots=True)
class Task:
    """A task: the prompt that the model is given, and the facts by which its response is judged."""

    id: str
    prompt: str | tuple[Message, ...]
    """A string is sent to the model as it stands; messages go through the chat template."""
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the task file."""
    environment: str = ""
    """The environment for this task where a run has several; empty is the run's."""

    def column(self, name: str) -> Any:
        """The value of a column of the task file, or None where this task lacks it."""
        return self.answer if name == "answer" else self.metadata.get(name)
