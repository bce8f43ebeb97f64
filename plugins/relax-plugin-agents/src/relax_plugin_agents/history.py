# SPDX-License-Identifier: Apache-2.0
"""The tree of one sample's calls, which maps each client's message history to a branch of the sample.

A client sends its whole message history with each call. The tree finds the policy's last answer in this history. The
call continues from that answer's sampled tokens; only later messages are rendered. This module does no input or output.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from relax_core.api import Action, Session
from relax_core.api.environment import Observation, Tool
from relax_core.api.task import Message
from relax_plugin_agents.model_request import ModelRequest, Refused, before_stop

THOUGHT_END = "</think>"
THOUGHTS = frozenset(("reasoning_content", "reasoning", "thinking"))
"""Fields of an assistant's message that hold its thought."""
NONCES = re.compile(r"^x-[a-z-]*billing-header:.*$", re.MULTILINE)
"""Lines of a system prompt that differ in each call of a conversation, and that history comparisons ignore."""

FORKS = {
    "new": "its first messages match no earlier call: a sub-agent, or a restarted history",
    "tools": "its tools or its context match no earlier call",
    "rewritten": "an answer in its history differs from the policy's answer; it becomes plain text and is not trained",
    "branched": "an earlier call already continued from the same answer",
    "repeated": "its messages equal those of an earlier call and it was not marked as a retry, so it is another answer to "
    "the same prompt, as in parallel sampling",
}
"""Reasons for which a call starts a new branch, each with an explanation."""


@dataclass(eq=False, slots=True)
class Call:
    """One call to the policy: a branch that takes one turn."""

    name: str
    """Name of the call, unique in the sample; depends only on the history and on the number of equal calls before."""
    key: str
    """Digest of the call's history, tools, context and limits; equal for a call that a client sends again."""
    branch: Session
    reason: str
    """Reason for the choice of the call's branch: `first`, `continued`, `extended`, or a key of `FORKS`."""
    history: str
    """Digest of the tools, the context and all messages before the call's answer."""
    context: str = ""
    """The agent's name for the conversation, which gets its own reward; empty: the sample as a whole."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer, and that the client does not get."""
    said: str = ""
    """Text of the answer as the client gets it. For a call that extends a truncated answer, it begins with that
    answer's text."""
    action: Action | None = None
    partial: Action | None = None
    """The part of the answer that is sampled so far; None unless the call's first client asked for a stream."""
    ids: dict[str, str] = field(default_factory=dict)
    """Ids of the calls that the policy wrote on the branch, by the ids that the client uses for these calls."""
    delivered: bool = False
    """True once the answer was sent to a client."""
    clients: int = 0
    """Number of clients that are waiting for the answer."""
    calls_after: int = 0
    """Number of calls that continue from the answer."""
    before: Call | None = None
    """The call from whose answer this call continues."""


@dataclass(slots=True)
class History:
    """The calls of one sample, indexed by the history that ends with each call's answer.

    Invariants:
    - a call continues from the longest prefix of its history that ends with an answer of the policy and has the same
      text, tool calls and tools; the comparison ignores ids, key order, white space around an answer, and thoughts that
      a client left out;
    - sampled tokens are never rendered again; an answer that the client changed is rendered as given text, which is not
      trained, on a branch from the messages before it;
    - histories of different contexts never match;
    - a branch's seed depends only on its history and on the number of earlier calls with that history.
    """

    root: Session
    calls: list[Call] = field(default_factory=list)
    _states: defaultdict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    """Answered calls by the digest of the history that ends with their answer."""
    _tools: set[str] = field(default_factory=set)
    """Digests of the tools and the context of each call so far."""
    _asked: Counter[str] = field(default_factory=Counter)
    """Number of calls by the digest of their history."""
    _overridden: set[str] = field(default_factory=set)
    """Settings that clients sent and that the run's configuration overrides."""

    def same(self, request: ModelRequest, again: bool) -> Call | None:
        """Return the newest call that a request repeats; None for a new request.

        A request repeats a call with the same key if no call continues from that call, and either its client
        disconnected before the answer, or `again`: the request's headers mark it as a retry.
        """
        key = call_key(request)
        for call in reversed(self.calls):
            lost = not call.delivered and not call.clients
            if call.key == key and not call.calls_after and (again or lost):
                return call
        return None

    def begin(self, request: ModelRequest) -> Call:
        """Start a call on a new branch after the request's history. Raises Refused if the policy can't take a turn."""
        messages = request.messages
        check_media(messages, self.root.media)
        digests = list(_digests(messages, request.tools, request.context, self._states))
        at, state = self._longest(digests, messages)
        rest = messages[at:]
        if rest and rest[-1].role == "assistant":
            raise Refused(
                "messages", "the last message is an assistant's that the policy did not write; end with another role"
            )
        if state is not None and not rest and (state.action is None or not state.action.cut):
            raise Refused("messages", "the last message is a complete answer of the policy; append a message after it")
        history = digests[-1]
        name = f"{history}/{self._asked[history]}"
        ids: dict[str, str] = {}
        self._asked[history] += 1
        if state is None:
            branch = self.root.restart(messages, request.tools, name, request.context)
        else:
            branch = state.branch.fork(name)
            state.calls_after += 1
            sampled = () if state.action is None else state.action.tool_calls
            pairs = zip(messages[at - 1].tool_calls, sampled, strict=True)
            ids = state.ids | {given.id: own.id for given, own in pairs}
            if rest:
                branch.observe(Observation(messages=tuple(_with_own_ids(rest, ids))))
        reason = "repeated" if self._asked[history] > 1 else self._reason(state, rest, digests)
        call = Call(
            name, call_key(request), branch, reason, history, request.context, request.stop, ids=ids, before=state
        )
        if state is not None and not rest:
            call.history, call.said = state.history, state.said
        self._tools.add(digests[0])
        self._overridden.update(request.overridden)
        self.calls.append(call)
        return call

    def answered(self, call: Call, action: Action) -> None:
        """Record the answer of a call, so that later calls can continue from it."""
        call.action = action
        call.said += before_stop(action.text, call.stop)[0]
        self._states[_chained(call.history, Message("assistant", call.said, action.tool_calls))].append(call)

    def refused(self, call: Call) -> None:
        """Forget a call whose messages the policy can't take."""
        self.calls.remove(call)
        if call.before is not None:
            call.before.calls_after -= 1

    def discard_unread(self) -> None:
        """Discard the answers that no client has read, so that they are not trained. Call it at the sample's end."""
        for call in self.calls:
            if call.action is not None and not call.delivered and not call.calls_after:
                call.branch.discard("undelivered")

    def reasons(self) -> dict[str, int]:
        """Return the number of calls by reason: `first`, `continued`, `extended`, or a key of `FORKS`."""
        return dict(Counter(call.reason for call in self.calls))

    def summary(self) -> dict[str, Any]:
        """Describe the calls as JSON data: counts by reason, calls that began a new branch, overridden settings."""
        forks = [
            {"call": number, "reason": call.reason, "why": FORKS[call.reason], **self._equal(number, call)}
            for number, call in enumerate(self.calls)
            if call.reason in FORKS
        ]
        return {"calls": self.reasons(), "forks": forks, "overridden": sorted(self._overridden)}

    def _equal(self, number: int, call: Call) -> dict[str, int]:
        """Return `equals` with the number of the first call whose request equals that of a repeated call."""
        if call.reason != "repeated":
            return {}
        asked = call.name.rpartition("/")[0]
        equal = (at for at, one in enumerate(self.calls[:number]) if one.name.startswith(f"{asked}/"))
        return {"equals": first} if (first := next(equal, None)) is not None else {}  # the first may have been refused

    def _longest(self, digests: Sequence[str], messages: Sequence[Message]) -> tuple[int, Call | None]:
        """Return the length of the longest prefix of a history that ends with an answer, and the answer's call.

        Returns (0, None) if no prefix matches. If several calls match, the call with the fewest later calls wins.
        """
        for number in range(len(messages), 0, -1):
            text = _said(messages[number - 1])
            known = [
                call for call in self._states.get(digests[number], ())
                if call.action is not None and (not text or _spoken(call.said) == text)
            ]  # fmt: skip
            if known:
                return number, min(known, key=lambda call: call.calls_after)
        return 0, None

    def _reason(self, state: Call | None, rest: Sequence[Message], digests: Sequence[str]) -> str:
        """Return why a history led to its branch: a value of `Call.reason`."""
        if self.calls and digests[0] not in self._tools:
            return "tools"
        if any(message.role == "assistant" for message in rest):
            return "rewritten"
        if state is not None:
            return "branched" if state.calls_after > 1 else "continued" if rest else "extended"
        return "new" if self.calls else "first"


def check_media(messages: Sequence[Message], kinds: Sequence[str]) -> None:
    """Raise Refused for a medium of a kind that the model does not take; `kinds` are those that the model takes."""
    for message in messages:
        for part in () if isinstance(message.content, str) else message.content:
            if part.media is not None and part.media.kind not in kinds:
                takes = f"takes only text and {', '.join(kinds)}" if kinds else "is text only"
                names = {"image": "images", "video": "videos"}.get(part.media.kind, part.media.kind)
                raise Refused("messages", f"got {names} in a message of {message.role!r}; the model {takes}; send text")


def call_key(request: ModelRequest) -> str:
    """Return a digest of everything that the answer to a request depends on."""
    *_, history = _digests(request.messages, request.tools, request.context)
    return _digest(history, str(request.max_new_tokens), *request.stop)


def _digests(
    messages: Sequence[Message], tools: Sequence[Tool], context: str, known: Container[str] = ()
) -> Iterator[str]:  # fmt: skip
    """Yield a digest of tools and context, then a digest after each message, in all 1 + the number of messages.

    `known`: digests that end with an answer of the policy. A client may add a name or fields to such an answer.
    """
    described = _canonical([(tool.name, tool.description, tool.parameters) for tool in tools])
    digest = _digest("tools", described, context) if context else _digest("tools", described)
    yield digest
    waiting: list[str] = []  # ids of the calls without a result, first those of the newest turn
    for message in messages:
        digest = _chained(digest, message)
        if digest not in known and (further := _further(message)):
            digest = _digest(digest, "fields", further)
        ids = [call.id for call in message.tool_calls]
        waiting = [*ids, *(one for one in waiting if one not in ids)]
        if (answered := message.extra.get("tool_call_id")) in waiting:
            if place := waiting.index(
                answered
            ):  # clients may rename calls, so the place of the call counts, not its id
                digest = _digest(digest, "answers", str(place))
            waiting.remove(answered)
        yield digest


def _with_own_ids(messages: Sequence[Message], ids: dict[str, str]) -> Iterator[Message]:
    """Yield messages whose results name the policy's calls as the policy did; drop ids that a message uses again."""
    for message in messages:
        for call in message.tool_calls:
            ids.pop(call.id, None)
        given = message.extra.get("tool_call_id")
        yield replace(message, extra={**message.extra, "tool_call_id": ids[given]}) if given in ids else message


def _further(message: Message) -> str:
    """Return the fields of a message that `_chained` does not digest; a thought counts as a field that was left out."""
    fields = {name: value for name, value in message.extra.items() if name not in (*THOUGHTS, "tool_call_id")}
    if message.name and message.role in ("assistant", "system"):
        fields["name"] = message.name
    return _canonical(fields) if fields else ""


def _chained(digest: str, message: Message) -> str:
    """Return the digest of a history from the digest of its earlier messages and its last message."""
    if message.role == "assistant":
        calls = [(call.name, call.arguments) for call in message.tool_calls]
        # Clients may drop the text next to a call, so digest only the calls; `_longest` compares the text if present.
        said = _canonical(calls) if calls else _said(message)
        return _digest(digest, "assistant", said)
    if message.role == "system":
        return _digest(digest, "system", NONCES.sub("", message.text).strip())
    if isinstance(message.content, str):
        return _digest(digest, message.role, message.name, message.content)
    parts = [
        ("", part.text) if part.media is None else (part.media.kind, part.media.source) for part in message.content
    ]
    return _digest(digest, message.role, message.name, _canonical(parts))


def _said(message: Message) -> str:
    return _spoken(message.text) if message.role == "assistant" else ""


def _spoken(text: str) -> str:
    """Return an answer without its thoughts, which templates and clients drop, and without outer white space."""
    return text.rpartition(THOUGHT_END)[2].strip()


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def _digest(*texts: str) -> str:
    digest = blake2b(digest_size=12)
    for text in texts:
        encoded = text.encode(errors="surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()
