# SPDX-License-Identifier: Apache-2.0
"""A request to the policy and its answer, in no dialect: `Dialect` translates both ways and holds no state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from relax_core.api.environment import Tool
from relax_core.api.task import Message, ToolCall

Finish = Literal["", "stop", "length", "tool_calls"]
"""How a turn has ended; empty: it is still being sampled."""


class Refused(Exception):
    """A request that is not served: it is malformed, or asks for what would change the distribution that is trained."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One request, whatever dialect it came in."""

    messages: tuple[Message, ...]
    """The whole history, the system message first; results of tools are messages of role `tool` with the tool's name."""
    tools: tuple[Tool, ...] = ()
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    context: str = ""
    """Name that the agent has given to the conversation, so that its turns may be credited apart."""
    overridden: tuple[str, ...] = ()
    """Settings of the client that the run's own take the place of, such as `temperature`."""


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """The policy's answer. Ids of calls are unique in a session, and equal where the same request is answered again."""

    id: str
    """Unique in a session, letters, digits and `_`; a dialect puts its own prefix before it."""
    model: str
    created: int
    """Seconds since the epoch."""
    text: str
    """Without the calls."""
    tool_calls: tuple[ToolCall, ...]
    finish: Finish
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Sent:
    """Part of a stream that was sent already."""

    events: int = 0
    text: str = ""


class Dialect(ABC):
    """One way of asking a model over HTTP."""

    path: ClassVar[str]
    """Behind the base URL, such as `/v1/chat/completions`."""

    @abstractmethod
    def ask(self, body: Mapping[str, Any]) -> ModelRequest:
        """Read a request's body. Raises Refused, which names the field."""

    @abstractmethod
    def reply(self, turn: ModelTurn) -> dict[str, Any]:
        """The whole answer, of a request that asked for no stream."""

    @abstractmethod
    def events(self, turn: ModelTurn, body: Mapping[str, Any], sent: Sent) -> Iterator[str]:
        """The server-sent events that bring whoever was `sent` a part of the answer to this turn, and to its end where it has
        one; each with the empty line that ends it. `body` as in `ask`."""

    @abstractmethod
    def failed(self, message: str, kind: str, field: str | None = None) -> dict[str, Any]:
        """An error's body; `message` names the `field`; `kind`: `invalid_request_error`, `authentication_error`,
        `not_found_error` or `api_error`."""

    @abstractmethod
    def failed_event(self, message: str) -> str:
        """The event by which a stream that began tells that no more of the answer comes; clients raise it."""

    @property
    @abstractmethod
    def heartbeat(self) -> str:
        """Sign of life on a stream whose answer is awaited, which clients take for nothing."""
