# SPDX-License-Identifier: Apache-2.0
"""One sample while it is played: branches on which the policy takes turns, and the forest of their tokens.

This module depends neither on engines nor on environments: a `Generate` function samples the turns. The pure functions
at the end of the file compute seeds, and keys of states.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain
from types import NoneType
from typing import Any

from relax_core.api.environment import Action, Observation, PromptRefused, Tool
from relax_core.api.errors import ConfigError, InfrastructureError, PoolFailed, RelaxError
from relax_core.api.family import ModelFamily, Rendered
from relax_core.api.media import MediaPipeline
from relax_core.api.task import MediaKind, Message, without_halves
from relax_core.api.trajectory import Node, Outcome, Trajectory
from relax_core.engines.requests import (
    SAMPLING,
    Generate,
    PendingRequest,
    RoutedExperts,
    SamplingParams,
    Watch,
    filled,
    stop_end,
    watch_for,
)
from relax_core.media.placeholders import MediaRefused, MediaUnavailable, media_of
from relax_core.registry.error_text import innermost, message_of, said
from relax_core.registry.shapes import WrongShape, checked, reward_number, shown
from relax_core.rpc import messages as wire

ENGINE_FAILS = (InfrastructureError, ValueError)
"""Errors that `generate` raises if an engine fails or refuses a request."""
Format = Callable[[Observation | str], tuple[Message, ...]]
OnPartial = Callable[[Action], None]
REPORT_SHARE = 64
"""The partial text of a turn is reported again once the turn has 1/REPORT_SHARE more tokens than at the last report."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a sample; 0 disables a bound, except `max_new_tokens`."""

    max_new_tokens: int
    """Longest turn, in tokens."""
    max_turns: int = 1
    token_budget: int = 0
    """Most tokens of the whole sample, including prompt and observations. A turn may use the budget left at its start,
    so concurrent turns of several branches can exceed the budget together."""
    max_context: int = 0
    """Most tokens of one branch, including prompt and observations."""
    stop: tuple[str, ...] = ()
    """Texts that end a turn."""


class SessionEnded(Exception):
    """The end of a sample: a limit is reached, or an engine or medium failed. Environments must not catch this."""


@dataclass(slots=True)
class Sample:
    """The state that all branches of a sample share.

        running -> finished | truncated | failed (an engine, a medium, the environment) -> trajectory

    Invariants:
    - The forest holds sampled ids as the engine returned them, never re-tokenized text. Each message is rendered once.
    - A node's parent precedes it. Branches that start with the same tokens share their root. A node changes only to add
      routed experts or to be marked as discarded.
    - The first unjudged outcome is final, and no turn begins after it.
    """

    family: ModelFamily
    generate: Generate
    limits: Limits
    format: Format
    """Function that turns observations into messages: the environment's `format_observation`."""
    tools: tuple[Tool, ...] = ()
    media: MediaPipeline | None = None
    """Processes media; None if all messages are text."""
    media_owner: Hashable = None
    """Key under which the pipeline keeps the sample's media in the store until the owner is released."""
    sampling: SamplingParams = SAMPLING
    place: int = 0
    """Index of the sample among the samples of its group that are played together."""
    forest: list[Node] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    outcome: Outcome = Outcome.FINISHED
    error: str = ""
    response: str = ""
    states: list[int] = field(default_factory=list)
    """Key of the state in which each turn began [turns]."""
    contexts: list[str] = field(default_factory=list)
    """Name of the context of each turn; empty for none [turns]."""
    num_tokens: int = 0
    step_rewards: list[float] = field(default_factory=list)
    step_turns: list[int] = field(default_factory=list)
    """Index of the turn that each of `step_rewards` was given for; -1: the whole sample."""
    newest: dict[int, int] = field(default_factory=dict)
    """Newest step of the weights that sampled the sample's tokens, by trainer incarnation."""
    info: dict[str, Any] = field(default_factory=dict)
    roots: dict[Rendered, int] = field(default_factory=dict)
    """Index in `forest` of each root, by its rendered prompt."""
    row_tools: tuple[Tool, ...] = ()
    """Tools that the task's row describes. Only the prompt shows them; an environment with tools has none of these."""
    broken: Exception | None = None
    """Error for which neither the sample nor its environment is to blame, even if it passed through their code."""
    waits: int = 0
    """Number of turns and sandbox waits in progress; the environment's own time stands still while it is above 0."""
    deadline: asyncio.Timeout | None = None
    """Deadline of the environment's `run`; None outside it."""
    own_time_s: float = 0.0
    """Seconds of the environment's own time from the end of each wait until `deadline`."""
    began: float = 0.0
    total_s: float = math.inf
    """Longest total of the environment's own time, in seconds."""
    queued_s: float = 0.0
    generate_s: float = 0.0
    environment_s: float = 0.0
    """The environment's own time in seconds, which excludes `waited_s`."""
    waited_s: float = 0.0
    """Seconds during which `waits` was above 0."""
    _waits_since: float = 0.0

    def end(self, outcome: Outcome, error: str) -> SessionEnded:
        """Record the end of the sample, unless an unjudged outcome was recorded before; return the error to raise."""
        if self.outcome.judged:
            self.outcome, self.error = outcome, error
        return SessionEnded(error)

    @contextmanager
    def charged(self, refuses: bool = False) -> Iterator[None]:
        """Charge the sample for an error of the body, which renders messages or parses a turn: raise SessionEnded.

        So text of the policy or environment, and its rendering by a template or family, can end only this sample. With
        `refuses`, raise PromptRefused, which leaves the decision to the environment.
        """
        try:
            yield
        except (SessionEnded, PromptRefused):
            raise
        except Exception as error:
            if isinstance(error, RelaxError) and not isinstance(error, ConfigError):
                raise
            raise PromptRefused(_fault(error)) if refuses else self.unreadable(error) from error

    def unreadable(self, error: Exception) -> SessionEnded:
        """End the sample because its messages can't be rendered or its turn can't be parsed."""
        return self.end(Outcome.ENVIRONMENT_ERROR, _fault(error))

    async def ask(self, request: PendingRequest) -> None:
        """Sample one turn of the policy while the environment's own time stands still.

        An engine failure ends the sample. Raises PoolFailed if no engine is left; this is not an outcome of the sample.
        """
        with self.paused():
            try:
                await self.generate([request])
            except PoolFailed:
                raise
            except ENGINE_FAILS as error:
                raise self.engine_failed(error) from error

    @property
    def time_left_s(self) -> float:
        """Seconds that the environment has left of `total_s`; valid only while `waits` is 0."""
        return self.total_s - (asyncio.get_running_loop().time() - self.began - self.waited_s)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the environment's own time, and so its deadline, inside this context."""
        now = asyncio.get_running_loop().time
        if not self.waits:
            self._waits_since = now()
        self.waits += 1
        if self.deadline is not None:
            self.deadline.reschedule(None)
        try:
            yield
        finally:
            self.waits -= 1
            if not self.waits:
                self.waited_s += now() - self._waits_since
            if self.deadline is not None and not self.waits and not self.deadline.expired():
                self.deadline.reschedule(now() + min(self.own_time_s, self.time_left_s))

    async def prepare(self, messages: Sequence[Message]) -> None:
        """Process the media of messages. Raises PromptRefused; a medium that can't be read now ends the sample."""
        if self.media is None or not media_of(messages):
            return
        try:
            await self.media.prepare(messages, self.media_owner)
        except MediaUnavailable as unavailable:
            raise self.end(Outcome.MEDIA_ERROR, str(unavailable)) from unavailable
        except MediaRefused as refused:
            raise PromptRefused(str(refused), Outcome.MEDIA_ERROR) from refused

    def fill_placeholders(self, rendered: Rendered, messages: Sequence[Message]) -> Rendered:
        """Expand each media placeholder to the tokens of its medium. Raises PromptRefused for a placeholder in text."""
        if self.media is None:
            return rendered
        try:
            return self.media.fill_placeholders(rendered, messages)
        except MediaRefused as refused:
            raise PromptRefused(str(refused), Outcome.MEDIA_ERROR) from refused

    def engine_failed(self, error: Exception) -> SessionEnded:
        """End the sample because of an error that `generate` raised; return the SessionEnded to raise."""
        return self.end(Outcome.ENGINE_ERROR, f"{type(error).__name__}: {error}")

    @contextmanager
    def watched(self, deadline: asyncio.Timeout, own_time_s: float) -> Iterator[None]:
        """Make `paused` stop this deadline of the environment's `run`."""
        self.deadline, self.own_time_s = deadline, own_time_s
        try:
            yield
        finally:
            self.deadline = None

    def trajectory(self) -> Trajectory:
        """Return the trajectory of the sample, which must be over."""
        # Unused branches were never shown to the policy: an environment's `run` may start with a prompt of its own.
        shown = [branch for branch in self.branches if branch.used] or self.branches[:1]
        messages = tuple(message for branch in shown for message in branch.messages[branch.shared :])
        self.branches.clear()  # breaks the reference cycle between sample and branches
        info = {**self.info, "error": self.error} if self.error else self.info
        return Trajectory(
            messages, self.response, tuple(self.forest), self.outcome, tuple(self.step_rewards), info, self.newest,
            tuple(self.step_turns), tuple(self.states), tuple(self.contexts) if any(self.contexts) else (),
            {"queue": self.queued_s, "generate": self.generate_s, "environment": self.environment_s},
        )  # fmt: skip


def _fault(error: Exception) -> str:
    return str(error) if isinstance(error, ConfigError | WrongShape) else f"{said(error)} ({innermost(error)})"


class Branch:
    """One conversation of a sample: the `Session` of an environment's `run`, or the state of the turn loop.

        begin (renders messages into the forest) -> ask -> take (adds the turn to the forest) -> append -> begin ...

    Invariants:
    - `_tokens` and `_media` belong to the path from a root to `_leaf`. Before the first rendering `_leaf` is None.
    - The first `_num_rendered` of `messages` are rendered, or belong to the prompt; the rest waits for the next turn.
    - A row never exceeds the model's context: messages that leave no room for a turn are not rendered.
    """

    def __init__(self, sample: Sample, prompt: str | tuple[Message, ...], rendered: Rendered | None, seed: int) -> None:
        self.sample, self._prompt, self._rendered, self._seed = sample, prompt, rendered, seed
        self._raw = isinstance(prompt, str)
        """True if the prompt is a bare string; later messages are then appended as bare text, without a template."""
        self.messages = [Message("user", prompt)] if isinstance(prompt, str) else list(prompt)
        self.shared = 0
        """Number of leading messages that this branch shares with the branch from which it was forked."""
        self.used = False
        """True once a turn has begun on this branch, or another branch was forked from it."""
        self._num_rendered = len(self.messages)
        self._tokens: tuple[int, ...] = ()
        self._media: tuple[str, ...] = ()
        self._leaf: int | None = None
        self._turn = self._forks = 0
        self._tools = sample.tools
        self._context = ""
        """Name of the context of this branch's turns for credit assignment; empty for none."""
        self._state = ""
        """The environment's name for the state in which the next turn begins; empty for none."""
        self._newest_turn = -1
        """Index in the sample of this branch's newest turn; before its first turn, its parent's newest turn; -1: none."""
        sample.branches.append(self)

    @property
    def media(self) -> tuple[MediaKind, ...]:
        return () if self.sample.media is None else self.sample.media.kinds

    async def generate(
        self, max_new_tokens: int | None = None, stop: tuple[str, ...] = (), on_partial: OnPartial | None = None
    ) -> Action:
        """Let the policy take a turn.

        Raises SessionEnded if the sample is over, or ends during this call, and PromptRefused if the messages can't be
        rendered.
        """
        sample = self.sample
        try:
            known = self._leaf is not None or self._rendered is not None
            await sample.prepare(self.messages[self._num_rendered :] if known else self.messages)
            with sample.charged(refuses=True):
                checked(max_new_tokens, int | None, "generate: max_new_tokens")
                checked(stop, tuple[str, ...], "generate: stop")
                request = self.begin(max_new_tokens, tuple(stop))
            if on_partial is not None:
                with sample.charged():
                    on_partial(Action("", (), prompt_tokens=len(request.prompt)))
                request.watch = self._reporting(on_partial, request)
            await sample.ask(request)
            with sample.charged():
                return self.take(request, max_new_tokens)
        except (SessionEnded, PromptRefused):
            raise
        except Exception as error:
            sample.broken = error
            raise

    def begin(self, max_new_tokens: int | None = None, stop: tuple[str, ...] = ()) -> PendingRequest:
        """Render the new messages and return the request for the policy's next turn.

        Raises SessionEnded if the sample is over, or a limit leaves no room for a turn. An error of the rendering leaves
        the branch unused.
        """
        sample, limits = self.sample, self.sample.limits
        if not sample.outcome.judged:
            raise SessionEnded(sample.error)
        if limits.max_turns and len(sample.states) >= limits.max_turns:
            raise sample.end(Outcome.TRUNCATED, "")
        said = self.messages[self._num_rendered :]
        state = state_key(self._state, said if self._leaf is not None else self.messages, self._tokens)
        added = Rendered(())
        if self._leaf is None:
            self._start(_text(said) if self._raw else "", bool(said))
        elif said and self._raw:
            added = Rendered(sample.family.encode(_text(said)))
        elif said:
            appended = sample.family.delta(self.messages[: self._num_rendered], said, self._tokens[-1])
            added = sample.fill_placeholders(appended, said)
        self.used = True
        room = limits.max_new_tokens if max_new_tokens is None else min(max_new_tokens, limits.max_new_tokens)
        if limits.token_budget:
            room = min(room, limits.token_budget - sample.num_tokens - len(added.tokens))
        if limits.max_context:
            room = min(room, limits.max_context - len(self._tokens) - len(added.tokens))
        if room <= 0:
            raise sample.end(Outcome.TRUNCATED, "")
        if added.tokens:
            self._grow(Node(self._leaf, added.tokens, sampled=False, media=added.media))
        self._media += added.media
        self._num_rendered = len(self.messages)
        self._newest_turn, self._state = len(sample.states), ""
        sample.states.append(state)
        sample.contexts.append(self._context)
        self._turn += 1
        seed = turn_seed(self._seed, self._turn - 1)
        return self._request(room, stop or limits.stop, seed, sample.sampling, sample.place)

    def begin_answers(self, seeds: Sequence[int], samplings: Sequence[SamplingParams]) -> list[PendingRequest]:
        """Begin the only turn of several samples that share this branch's prompt; return a request for each seed.

        The samples differ in seed, sampling parameters and place. Raises as `begin` does.
        """
        first = self.begin()
        others = enumerate(zip(seeds[1:], samplings[1:], strict=True), 1)
        return [first] + [
            self._request(first.max_new_tokens, first.stop, turn_seed(seed, 0), sampling, place)
            for place, (seed, sampling) in others
        ]

    def _request(
        self, room: int, stop: tuple[str, ...], seed: int, sampling: SamplingParams, place: int
    ) -> PendingRequest:
        """Return the request for a turn of at most `room` tokens."""
        family, routing = self.sample.family, sampling.routing
        return PendingRequest(
            self._tokens, room, seed, sampling, family.stop_tokens, stop, self._media, place,
            watch_for(stop, family.decode), routed_experts=None if routing is None else RoutedExperts(routing),
        )  # fmt: skip

    def answer(self, request: PendingRequest, failure: Exception | None) -> Trajectory:
        """Return the trajectory of a sample whose only turn is a request of `begin_answers`.

        `failure`: the error that `generate` raised for all requests.
        """
        sample, family, messages = self.sample, self.sample.family, tuple(self.messages)
        text, forest = "", list(sample.forest)
        newest: dict[int, int] = {}
        outcome, error = _ended(request)
        if failure is not None:
            outcome, error = Outcome.ENGINE_ERROR, f"{type(failure).__name__}: {failure}"
        if outcome.judged:
            try:
                end = stop_end(request.tokens, request.stop, family.decode) if request.stop else None
                if request.finish == "length" and end is None:
                    outcome = Outcome.TRUNCATED
                tokens = tuple(request.tokens[:end])
                if tokens:
                    forest.append(_completion(request, tokens, self._leaf, self._newest_turn, newest))
                if request.routed_experts is not None:
                    leaf = len(forest) - 1 if tokens else self._leaf
                    _visit(forest, leaf, len(self._tokens) + len(tokens), request.routed_experts)
                text, calls, _ = family.parse(tokens, sample.tools, request.prompt)
                messages = (*messages, Message("assistant", text, calls))
            except Exception as fault:
                if isinstance(fault, RelaxError) and not isinstance(fault, ConfigError):
                    raise
                outcome, error = Outcome.ENVIRONMENT_ERROR, _fault(fault)
        return Trajectory(
            messages, text, tuple(forest), outcome, (), {"error": error} if error else {}, newest, (),
            tuple(sample.states), (),
            {"queue": request.queued_s, "generate": request.generate_s, "environment": 0.0},
        )  # fmt: skip

    def take(self, request: PendingRequest, max_new_tokens: int | None = None) -> Action:
        """Add the completion of a request from `begin` as a turn. Raises SessionEnded if the engine failed."""
        sample, family = self.sample, self.sample.family
        sample.queued_s += request.queued_s
        sample.generate_s += request.generate_s
        outcome, error = _ended(request)
        if not outcome.judged:
            raise sample.end(outcome, error)
        end = stop_end(request.tokens, request.stop, family.decode)
        truncated = request.finish == "length" and end is None
        if truncated and request.max_new_tokens != max_new_tokens:
            sample.end(Outcome.TRUNCATED, "")
        tokens = tuple(request.tokens[:end])
        if tokens:
            self._grow(_completion(request, tokens, self._leaf, self._newest_turn, sample.newest))
        if request.routed_experts is not None:
            _visit(sample.forest, self._leaf, len(self._tokens), request.routed_experts)
        text, calls, error = family.parse(tokens, self._tools, request.prompt)
        known = {tool.name for tool in self._tools} if calls else frozenset[str]()
        if wrong := [call.name for call in calls if call.name not in known]:
            error = error or f"there is no tool {wrong[0]!r}; there are {', '.join(sorted(known))}"
        sample.response = text
        # Messages that the environment's `run` appended while the turn was sampled come after the turn.
        self.messages.insert(self._num_rendered, Message("assistant", text, calls))
        self._num_rendered += 1
        return Action(text, tokens, calls, error, truncated, len(request.prompt))

    def observe(self, observation: Observation | str) -> None:
        checked(observation, Observation | str, "observe")
        self.append(self.sample.format(observation), state_of(observation))

    def append(self, messages: tuple[Message, ...], state: str = "") -> None:
        """Append messages for the policy, to be rendered when its next turn begins.

        `state` is the environment's name for the state in which that turn begins. Raises WrongShape, also for messages
        that can't travel to rewards.
        """
        self.messages += _checked_messages(messages, "messages to append")
        self._state = checked(state, str, "state") or self._state

    def fork(self, name: str = "") -> Branch:
        checked(name, str, "fork: name")
        branch = Branch(self.sample, self._prompt, self._rendered, self._other_seed(name))
        branch._tools, branch._context, self.used = self._tools, self._context, True
        branch.messages, branch._num_rendered = list(self.messages), self._num_rendered
        branch.shared = len(self.messages)
        branch._tokens, branch._media, branch._leaf = self._tokens, self._media, self._leaf
        branch._newest_turn, branch._state = self._newest_turn, self._state
        return branch

    def restart(
        self,
        prompt: str | tuple[Message, ...],
        tools: tuple[Tool, ...] | None = None,
        name: str = "",
        context: str | None = None,
    ) -> Branch:
        checked(prompt, str | tuple[Message, ...], "restart: prompt")
        prompt = without_halves(prompt) if isinstance(prompt, str) else _checked_messages(prompt, "restart: prompt")
        checked(tools, tuple[Tool, ...] | None, "restart: tools")
        checked(name, str, "restart: name")
        checked(context, str | None, "restart: context")
        branch = Branch(self.sample, prompt, None, self._other_seed(name))
        branch._newest_turn = self._newest_turn
        branch._tools = self._tools if tools is None else tuple(tools)
        branch._context = self._context if context is None else context
        return branch

    def discard(self, reason: str) -> None:
        checked(reason, str, "discard: reason")
        forest, at = self.sample.forest, self._leaf
        if at is not None and forest[at].sampled:
            forest[at] = replace(forest[at], discarded=reason)

    def reward(self, value: float) -> None:
        self.sample.step_rewards.append(reward_number(value, "reward"))
        self.sample.step_turns.append(self._newest_turn)

    def note(self, info: Mapping[str, Any]) -> None:
        """Add facts to the sample's `info`. Raises WrongShape for facts that can't travel to rewards."""
        checked(info, Mapping[str, Any], "info")
        if not all(map(_is_plain, (*info, *info.values()))):
            _check_travels(dict(info), "info")
        self.sample.info.update(info)

    def _reporting(self, on_partial: OnPartial, request: PendingRequest) -> Watch:
        """Return a watch that also reports the partial text of the turn to `on_partial`.

        Each report decodes the whole turn again, so the reports of a turn become rarer as it grows.
        """
        family, known, prompt, until = self.sample.family, 0, request.prompt, request.watch

        def watch(tokens: Sequence[int]) -> bool:
            nonlocal known
            if until is not None and until(tokens):
                return True
            if len(tokens) - known > known // REPORT_SHARE:
                known = len(tokens)
                try:
                    text = family.parse_beginning(tuple(tokens), self._tools, prompt)
                    on_partial(Action(text, (), prompt_tokens=len(prompt)))
                except Exception as error:  # the router calls this watch and must not fail
                    self.sample.unreadable(error)
                    return True
            return False

        return watch

    def _other_seed(self, name: str) -> int:
        """Return the seed of a new branch, derived from its name, or from the number of unnamed branches before it."""
        self._forks += not name
        return branch_seed(self._seed, self._turn, _digest("branch", name) if name else self._forks)

    def _start(self, raw_text: str, more: bool) -> None:
        """Render the prompt with the messages before the policy's first turn, and find or create its root.

        `more`: True if messages follow the prompt, which `_rendered` lacks. `raw_text`: their text if the prompt is a
        bare string.
        """
        sample, family, rendered = self.sample, self.sample.family, self._rendered
        if rendered is None or (more and not self._raw):
            prompt = self._prompt if self._raw else tuple(self.messages)
            tools = self._tools or (() if rendered is None else sample.row_tools)  # None: not the task's own prompt
            rendered = sample.fill_placeholders(family.start(prompt, tools), () if self._raw else self.messages)
        if self._raw and not self._prompt:
            rendered = family.start(raw_text)
        elif raw_text:
            rendered = replace(rendered, tokens=rendered.tokens + family.encode(raw_text))
        tokens = rendered.tokens
        if rendered in sample.roots:
            self._leaf, self._tokens = sample.roots[rendered], tokens
        else:
            sample.roots[rendered] = self._grow(Node(None, tokens, sampled=False, media=rendered.media))
        self._media, self._num_rendered = rendered.media, len(self.messages)

    def _grow(self, node: Node) -> int:
        """Add a node after the leaf; return its index."""
        self._leaf = len(self.sample.forest)
        self.sample.forest.append(node)
        self.sample.num_tokens += len(node.tokens)
        self._tokens += node.tokens
        return self._leaf


def _ended(request: PendingRequest) -> tuple[Outcome, str]:
    """Return the outcome of an ended request, and its error."""
    if request.finish not in ("error", "abort", "deadline"):
        return Outcome.FINISHED, ""
    outcome = Outcome.ENGINE_TIMEOUT if request.finish == "deadline" else Outcome.ENGINE_ERROR
    return outcome, request.error or f"generation ended with {request.finish}"


def _completion(
    request: PendingRequest, tokens: tuple[int, ...], parent: int | None, turn: int, newest: dict[int, int]
) -> Node:
    """Return the node of a request's first tokens; record in `newest` the newest step by incarnation."""
    count = len(tokens)
    for incarnation, step in request.newest(count):
        newest[incarnation] = max(step, newest.get(incarnation, step))
    log_probs, versions = tuple(request.log_probs[:count]), tuple(request.oldest_cache[:count])
    return Node(parent, tokens, True, log_probs, versions, turn)


def _visit(forest: list[Node], leaf: int | None, stop: int, experts: RoutedExperts) -> None:
    """Add routed experts to the nodes up to a leaf that lack some. `stop`: number of the branch's tokens."""
    while leaf is not None:
        node = forest[leaf]
        stop -= len(node.tokens)
        if (experts_and_valid := filled(node, stop, experts)) is not None:
            forest[leaf] = replace(node, routed_experts=experts_and_valid[0], routed_valid=experts_and_valid[1])
        leaf = node.parent


def state_of(observation: Observation | str | None) -> str:
    """Return the environment's name for the state that an observation shows; empty for none."""
    return observation.state if isinstance(observation, Observation) else ""


def _checked_messages(messages: Any, where: str) -> tuple[Message, ...]:
    """Return messages whose text is whole characters: halves of surrogate pairs become replacement characters.

    Raises WrongShape for another type, and for values that can't travel to rewards.
    """
    found: tuple[Message, ...] = checked(messages, tuple[Message, ...], where)
    return tuple(_travelling(message, where) for message in found)


def _travelling(message: Message, where: str) -> Message:
    content = message.content
    if not (message.tool_calls or message.extra) and all(map(_is_plain, (message.role, content, message.name))):
        return message
    if isinstance(content, str):
        content = without_halves(content)
    else:
        content = tuple(replace(part, text=without_halves(part.text)) for part in content)
    message = replace(message, content=content, name=without_halves(message.name))
    _check_travels(message, where)
    return message


def _is_plain(value: object) -> bool:
    """Return True for a value that certainly travels: ASCII text, a small whole number, or another number or None."""
    if type(value) is str:
        return value.isascii()
    return type(value) in (bool, float, NoneType) or (type(value) is int and value.bit_length() < 64)


def _check_travels(value: Any, where: str) -> None:
    """Raise WrongShape for a value that can't travel to rewards and logs."""
    try:
        wire.decode(wire.encode(value))
    except Exception as error:
        raise WrongShape(f"{where}: got {shown(value)}; {message_of(error)}") from error


def _text(messages: Sequence[Message]) -> str:
    return "".join(message.text for message in messages)


# -- keys of states: turns of a task's samples have equal keys if they began in the same state -----------------------


def state_key(name: str, shown: Sequence[Message], tokens: Sequence[int]) -> int:
    """Return the key of a state, a signed 64-bit hash.

    The hash is of the environment's `name` for the state, else of the messages `shown` since the policy's last turn,
    else of all `tokens`. Equal messages are the same state even after different tokens. A medium counts by its reference.
    """
    if name:
        return _digest("name", name)
    if not shown:
        return _digest("tokens", array("q", tokens).tobytes())
    texts: list[str] = []
    for message in shown:
        content = message.content
        parts = [("", content)] if isinstance(content, str) else [
            (part.media.kind, part.media.reference) if part.media else ("", part.text) for part in content
        ]  # fmt: skip
        texts += (message.role, message.name, str(len(parts)), *chain.from_iterable(parts))
        for key, value in message.extra.items():
            texts += () if key == "tool_call_id" else (key, str(value))
    return _digest("shown", *texts)


def _digest(*texts: str | bytes) -> int:
    digest = blake2b(digest_size=8)
    for text in texts:
        encoded = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return int.from_bytes(digest.digest(), "big", signed=True)


# -- seeds: pure functions of run seed, group, sample, attempt and turn, mixed with splitmix64's finalizer -----------

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def sample_seeds(run_seed: int, group: int, samples: Iterable[int], retry: int = 0) -> list[int]:
    """Return the seeds of attempts of a group, below 2**63; `samples` are their indices in the group."""
    state = _mix(_mix(0, run_seed), group)
    return [_mix(_mix(state, sample), retry) >> 1 for sample in samples]


def turn_seed(sample_seed: int, turn: int) -> int:
    """Return the seed of one turn of a sample, below 2**63."""
    return _mix(_mix(1, sample_seed), turn) >> 1


def branch_seed(seed: int, turn: int, branch: int) -> int:
    """Return the seed of a branch's turns. The seed does not depend on the order in which branches run."""
    return _mix(_mix(_mix(2, seed), turn), branch) >> 1


def _mix(state: int, value: int) -> int:
    z = (state + _GAMMA + (value & _MASK)) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
