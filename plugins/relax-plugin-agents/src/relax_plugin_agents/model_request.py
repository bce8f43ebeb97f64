# SPDX-License-Identifier: Apache-2.0
"""Requests to the policy and its answers, independent of any dialect; `Dialect` translates between both forms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from relax_core.api.environment import Tool
from relax_core.api.task import Message, ToolCall

Finish = Literal["", "stop", "length", "tool_calls"]
"""Reason for a turn's end; empty while the turn is being sampled."""


class Refused(Exception):
    """Error for a malformed request, or for a setting that would change the trained distribution."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One request to the policy, translated from its dialect."""

    messages: tuple[Message, ...]
    """The whole history, system message first. Tool results are messages of role `tool` with the tool's name."""
    tools: tuple[Tool, ...] = ()
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    context: str = ""
    """The agent's name for the conversation, which gets its own reward; empty: the sample as a whole."""
    overridden: tuple[str, ...] = ()
    """Settings in the request that the run's configuration overrides, such as `temperature`."""


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """The answer of the policy or a pool.

    Ids of tool calls are unique in a session; a retried request gets the same ids.
    """

    id: str
    """Id of the turn, unique in a session: letters, digits and `_`. Each dialect adds its own prefix."""
    model: str
    created: int
    """Unix time in seconds."""
    text: str
    """Text of the answer without its tool calls."""
    tool_calls: tuple[ToolCall, ...]
    finish: Finish
    prompt_tokens: int
    completion_tokens: int
    stop_text: str = ""
    """The request's stop text that ended the turn, which `text` leaves out; empty if another reason ended it."""


@dataclass(frozen=True, slots=True)
class Sent:
    """The part of a turn that a stream has already sent to its client."""

    events: int = 0
    """Number of events that were sent."""
    text: str = ""
    """Text of the answer that was sent."""


def before_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """Return the text before the first stop text, and this stop text; without a stop text, (text, "")."""
    end, stop_text = min(((text.find(one), one) for one in stop if one in text), default=(len(text), ""))
    return text[:end], stop_text


def sure_before_stop(text: str, stop: Sequence[str]) -> str:
    """Return the part of an unfinished text that no later text can turn into a stop text."""
    sure, _ = before_stop(text, stop)
    begun = (end for one in stop for end in range(1, len(one)) if sure.endswith(one[:end]))
    return sure[: len(sure) - max(begun, default=0)]


class Dialect(ABC):
    """One HTTP protocol for calling a model."""

    path: ClassVar[str]
    """Path of the route after the server's address, such as `/v1/chat/completions`."""

    @abstractmethod
    def ask(self, body: Mapping[str, Any]) -> ModelRequest:
        """Translate the body of a request. Raises Refused naming the field that can't be served."""

    @abstractmethod
    def reply(self, turn: ModelTurn) -> dict[str, Any]:
        """Return the response body of a complete answer, for a request without a stream."""

    @abstractmethod
    def events(self, turn: ModelTurn, body: Mapping[str, Any], sent: Sent) -> Iterator[str]:
        """Yield the server-sent events that a client still needs for this turn, after the part that was `sent`.

        Each event ends with an empty line. The closing events follow only if the turn has ended. `body` is the body of
        the request.
        """

    @abstractmethod
    def failed(self, message: str, kind: str, field: str | None = None) -> dict[str, Any]:
        """Return the body of an error.

        `message` names the `field`; `kind` is `invalid_request_error`, `authentication_error`, `not_found_error` or
        `api_error`.
        """

    @abstractmethod
    def failed_event(self, message: str) -> str:
        """Return the event that ends a stream with an error; clients raise the error."""

    @property
    @abstractmethod
    def heartbeat(self) -> str:
        """The keep-alive event of a stream, which clients ignore."""
