# SPDX-License-Identifier: Apache-2.0
"""From histories to branches: the tree of one sample's calls.

A client sends its whole history with each call. What of it the policy wrote is found again in the tree, and the call goes on
behind the very tokens that were sampled; only what came since is rendered. Nothing here does any input or output.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from relax_core.api import Action, Session
from relax_core.api.environment import Observation, Tool
from relax_core.api.task import Message
from relax_plugin_agents.model_request import ModelRequest, Refused

THOUGHT_END = "</think>"
NONCES = re.compile(r"^x-[a-z-]*billing-header:.*$", re.MULTILINE)
"""Lines of a system prompt that differ in each call of one conversation."""

FORKS = {
    "new": "its first messages are those of no call before it: a sub-agent, or a history that was begun anew",
    "tools": "its tools, or its context, are those of no call before it",
    "rewritten": "an answer in its history is not what the policy wrote, which is given text there and not trained",
    "branched": "a call before it had already gone on behind the same answer",
}
"""Reasons for which a call began a branch of its own, explained."""


@dataclass(eq=False, slots=True)
class Call:
    """One call of the policy: a branch that takes one turn."""

    key: str
    """Of its history, tools and limits: equal for a call that is made again."""
    branch: Session
    reason: str
    """How its history came to its branch: `first`, `continued`, `extended`, or one of `FORKS`."""
    history: str
    """Digest of what was said up to its answer."""
    context: str = ""
    """Name under which it may be credited apart."""
    said: str = ""
    """Its answer; before that, the part of it that a limit had cut off, which it extends."""
    action: Action | None = None
    partial: Action | None = None
    """Its answer as far as it is sampled, where a client reads it as a stream."""
    delivered: bool = False
    """Its answer has reached a client."""
    clients: int = 0
    """That wait for its answer now."""
    calls_after: int = 0
    """That were built on its answer."""


@dataclass(slots=True)
class History:
    """The calls of one sample, and the states that their answers have led to.

    Invariants:
    - a call goes on behind the longest part of its history that ends with an answer of the policy and came in the same
      words, calls and tools; ids, key order, white space around an answer and thoughts that a client left out do not count;
    - what the policy wrote is never rendered again; an answer that came back with other words is given text, which is not
      trained, on a branch behind what came before it;
    - a context has histories of its own;
    - a branch draws by its history, and by how many calls with that history came before it: not by its place in time.
    """

    root: Session
    calls: list[Call] = field(default_factory=list)
    _states: defaultdict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    """Calls by the digest of the history that ends with their answer."""
    _tools: set[str] = field(default_factory=set)
    """Digests of all tools that were given."""
    _asked: Counter[str] = field(default_factory=Counter)
    """Calls by their history."""
    _overridden: set[str] = field(default_factory=set)
    """Settings of the client that the run's own took the place of."""

    def same(self, request: ModelRequest, again: bool) -> Call | None:
        """Find the call that a request repeats: one that nobody built on, whose client went away before it had the answer, or
        any at all where the client says that it asks `again`. The newest."""
        key = call_key(request)
        for call in reversed(self.calls):
            lost = not call.delivered and not call.clients
            if call.key == key and not call.calls_after and (again or lost):
                return call
        return None

    def begin(self, request: ModelRequest) -> Call:
        """Branch off where a request's history leads. Raises Refused where no turn of the policy can follow."""
        messages = request.messages
        digests = list(_digests(messages, request.tools, request.context))
        at, state = self._longest(digests, messages)
        rest = messages[at:]
        if rest and rest[-1].role == "assistant":
            raise Refused(
                "messages", "the last one is an assistant's that the policy did not write; it can't go on from there"
            )
        if state is not None and not rest and (state.action is None or not state.action.cut):
            raise Refused("messages", "the last one is an answer that the policy has ended; say something after it")
        history = digests[-1]
        name = f"{history}/{self._asked[history]}"
        self._asked[history] += 1
        if state is None:
            branch = self.root.restart(messages, request.tools, name, request.context)
        else:
            branch = state.branch.fork(name)
            state.calls_after += 1
            if rest:
                branch.observe(Observation(messages=rest))
        call = Call(call_key(request), branch, self._reason(state, rest, digests), history, request.context)
        if state is not None and not rest:
            call.history, call.said = state.history, state.said
        self._tools.add(digests[0])
        self._overridden.update(request.overridden)
        self.calls.append(call)
        return call

    def answered(self, call: Call, action: Action) -> None:
        """Note a call's answer: histories may go on behind it."""
        call.action = action
        call.said += action.text
        self._states[_chained(call.history, Message("assistant", call.said, action.tool_calls))].append(call)

    def discard_unread(self) -> None:
        """At the sample's end: what no client has read is not trained."""
        for call in self.calls:
            if call.action is not None and not call.delivered and not call.calls_after:
                call.branch.discard("undelivered")

    def reasons(self) -> dict[str, int]:
        """Number of calls by how their history came to its branch."""
        return dict(Counter(call.reason for call in self.calls))

    def summary(self) -> dict[str, Any]:
        """Describe the calls as JSON: their number by reason, why each that did not go on where the one before it ended began
        elsewhere, and the client's settings that the run's own took the place of."""
        forks = [
            {"call": number, "reason": call.reason, "why": FORKS[call.reason]}
            for number, call in enumerate(self.calls)
            if call.reason in FORKS
        ]
        return {"calls": self.reasons(), "forks": forks, "overridden": sorted(self._overridden)}

    def _longest(self, digests: Sequence[str], messages: Sequence[Message]) -> tuple[int, Call | None]:
        """The longest beginning of a history that ends with an answer: its number of messages, and the call that gave it.

        Among equal answers the one with the same words, then one on which nothing was built yet."""
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
        """Say how a history came to its branch."""
        if self.calls and digests[0] not in self._tools:
            return "tools"
        if any(message.role == "assistant" for message in rest):
            return "rewritten"
        if state is not None:
            return "branched" if state.calls_after > 1 else "continued" if rest else "extended"
        return "new" if self.calls else "first"


def call_key(request: ModelRequest) -> str:
    """Name a call by all that its answer depends on."""
    *_, history = _digests(request.messages, request.tools, request.context)
    return _digest(history, str(request.max_new_tokens), *request.stop)


def _digests(messages: Sequence[Message], tools: Sequence[Tool], context: str) -> Iterator[str]:
    """Digests of tools and context alone, and with the first message, with the first two, ..."""
    told = _canonical([(tool.name, tool.description, tool.parameters) for tool in tools])
    digest = _digest("tools", told, context) if context else _digest("tools", told)
    yield digest
    for message in messages:
        digest = _chained(digest, message)
        yield digest


def _chained(digest: str, message: Message) -> str:
    """Add a message to the digest of those before it."""
    if message.role == "assistant":
        calls = [(call.name, call.arguments) for call in message.tool_calls]
        # Clients leave out words that stood beside a call: calls alone tell, and `_longest` looks at words that are there.
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
    """An answer without the thoughts before it, which templates and clients leave out, and without white space around it."""
    return text.rpartition(THOUGHT_END)[2].strip()


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def _digest(*texts: str) -> str:
    digest = blake2b(digest_size=12)
    for text in texts:
        encoded = text.encode(errors="surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()
