# SPDX-License-Identifier: Apache-2.0
"""One sample while it happens: branches that take turns with the policy, growing one forest of tokens.

Nothing here knows engines or environments: turns are asked of `Generate`. Seeds and keys of states are pure functions at the
end of the file.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any

from relax_core.api.environment import Action, Observation, Tool
from relax_core.api.errors import ConfigError, InfrastructureError, PoolFailed
from relax_core.api.family import ModelFamily, Rendered
from relax_core.api.task import Message
from relax_core.api.trajectory import Node, Outcome, Trajectory
from relax_core.data.placeholders import MediaRefused, media_of
from relax_core.engines.requests import Completion, Generate, GenerateCall, Routes, Watch, cut, filled, watch_for

if TYPE_CHECKING:  # environments in processes of their own have no use for the pipeline
    from relax_core.data.media_pipeline import MediaPipeline

ENGINE_FAILS = (InfrastructureError, ValueError)
"""Errors that `generate` raises where an engine fails, or refuses."""
Format = Callable[[Observation | str], tuple[Message, ...]]
Told = Callable[[Action], None]
TOLD_SHARE = 64
"""Part of a turn by which it has grown when it is told again."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a sample; 0 is no limit, except for a turn's own."""

    max_new_tokens: int
    """Tokens of one turn."""
    max_turns: int = 1
    token_budget: int = 0
    """All tokens of the sample, prompt and observations included; branches that run side by side may each use what
    was left when they began."""
    max_context: int = 0
    """Tokens of one branch, with everything that was said to it."""
    stop: tuple[str, ...] = ()


class SessionEnded(Exception):
    """The sample's tokens or turns are used up, or its engine failed. Let it pass: nobody listens any more."""


@dataclass(slots=True)
class Sample:
    """State that all branches of a sample share.

        running -> finished | truncated | failed (an engine, a medium, the environment) -> trajectory

    Invariants:
    - sampled ids go into the forest as they came and are never made from text again; messages are rendered once, as what
      they append;
    - a node's parent comes before it, branches that start with the same tokens share their root, and nodes only change by
      learning which experts their tokens visited;
    - the first outcome that can't be judged stays; after it no turn begins.
    """

    family: ModelFamily
    generate: Generate
    limits: Limits
    format: Format
    """The environment's `format_observation`."""
    tools: tuple[Tool, ...] = ()
    media: MediaPipeline | None = None
    """None: every message is text."""
    media_owner: Hashable = None
    """Media are kept in the store as long as their owner needs them."""
    forest: list[Node] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    outcome: Outcome = Outcome.FINISHED
    error: str = ""
    response: str = ""
    states: list[int] = field(default_factory=list)
    """Keys of the states in which turns began, in that order [turns]."""
    contexts: list[str] = field(default_factory=list)
    """Names of the contexts in which they were taken [turns]."""
    num_tokens: int = 0
    step_rewards: list[float] = field(default_factory=list)
    step_turns: list[int] = field(default_factory=list)
    """The turn that each reward was given for."""
    newest: dict[int, int] = field(default_factory=dict)
    """By incarnation of the weights that sampled its tokens, their newest step."""
    info: dict[str, Any] = field(default_factory=dict)
    roots: dict[Rendered, int] = field(default_factory=dict)
    """Branches that start with the same tokens share their root."""
    is_driven: bool = False
    """Its environment says what prompts and which roles there are: what a template refuses of them is its fault."""
    broken: Exception | None = None
    """A fault that is neither the sample's nor its environment's, even when it passed through the author's code."""
    waits: int = 0
    """Reasons for which the own time of its environment stands still now."""
    deadline: asyncio.Timeout | None = None
    own_time_s: float = 0.0
    """Time until then that its environment has from the end of each turn."""
    began: float = 0.0
    total_s: float = math.inf
    """Longest own time of its environment in all."""
    queued_s: float = 0.0
    generate_s: float = 0.0
    environment_s: float = 0.0
    """Time of the environment, without `waited_s`."""
    waited_s: float = 0.0
    """Time in which that of the environment stood still."""
    _waits_since: float = 0.0

    def end(self, outcome: Outcome, error: str) -> SessionEnded:
        """Note why the sample is over, unless something worse was noted before."""
        if self.outcome.judged:
            self.outcome, self.error = outcome, error
        return SessionEnded(error)

    async def ask(self, call: GenerateCall) -> Completion:
        """Ask for one turn of the policy; an engine that fails ends the sample. The environment's own time stands still.

        Raises PoolFailed where no engine is left, which is not the sample's outcome: another start may have some."""
        with self.paused():
            try:
                return await self.generate(call)
            except PoolFailed:
                raise
            except ENGINE_FAILS as error:
                raise self.engine_failed(error) from error

    @property
    def time_left_s(self) -> float:
        """Own time that its environment has left in all; of no meaning while that stands still."""
        return self.total_s - (asyncio.get_running_loop().time() - self.began - self.waited_s)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the own time of the environment that drives stand still, while others work for it or it waits for a place."""
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
        """Have the media of messages processed; one that can't be read ends the sample."""
        if self.media is None or not media_of(messages):
            return
        try:
            await self.media.prepare(messages, self.media_owner)
        except MediaRefused as refused:
            raise self.end(Outcome.MEDIA_ERROR, str(refused)) from refused

    def fill_placeholders(self, rendered: Rendered, messages: Sequence[Message]) -> Rendered:
        """Expand a rendering to the tokens that its media take. A text that looks like a medium ends the sample."""
        if self.media is None:
            return rendered
        try:
            return self.media.fill_placeholders(rendered, messages)
        except MediaRefused as refused:
            raise self.end(Outcome.MEDIA_ERROR, str(refused)) from refused

    def engine_failed(self, error: Exception) -> SessionEnded:
        """End the sample with the error that `generate` raised."""
        return self.end(Outcome.ENGINE_ERROR, f"{type(error).__name__}: {error}")

    @contextmanager
    def watched(self, deadline: asyncio.Timeout, own_time_s: float) -> Iterator[None]:
        """Let the deadline of an environment that drives count only the time in which no turn is being sampled."""
        self.deadline, self.own_time_s = deadline, own_time_s
        try:
            yield
        finally:
            self.deadline = None

    def trajectory(self) -> Trajectory:
        """Give the sample, which is over."""
        # A prompt that nothing went on from was not shown: an environment that drives began with one of its own.
        shown = [branch for branch in self.branches if branch.used] or self.branches[:1]
        messages = tuple(message for branch in shown for message in branch.messages[branch.shared :])
        self.branches.clear()  # each holds its sample: a ring that only the collector would find
        info = {**self.info, "error": self.error} if self.error else self.info
        return Trajectory(
            messages, self.response, tuple(self.forest), self.outcome, tuple(self.step_rewards), info, self.newest,
            tuple(self.step_turns), tuple(self.states), tuple(self.contexts) if any(self.contexts) else (),
            {"queue": self.queued_s, "generate": self.generate_s, "environment": self.environment_s},
        )  # fmt: skip


class Branch:
    """One line of a sample: `Session` for environments that drive, and the object of the turn loop for the others.

        begin (messages are rendered into the forest) -> ask -> take (the turn joins the forest) -> append -> begin ...

    Invariants:
    - `_tokens` and `_media` are those of the path from a root to `_leaf`; None: nothing is rendered yet;
    - the first `_num_rendered` of `messages` are rendered, or will be with the prompt; the others wait for the next turn;
    - a row is never longer than the model's context: messages that leave no room for a turn stay out.
    """

    def __init__(self, sample: Sample, prompt: str | tuple[Message, ...], rendered: Rendered | None, seed: int) -> None:
        self.sample, self._prompt, self._rendered, self._seed = sample, prompt, rendered, seed
        self._raw = isinstance(prompt, str)
        """A bare string goes on as bare text."""
        self.messages = [Message("user", prompt)] if isinstance(prompt, str) else list(prompt)
        self.shared = 0
        """Number of messages that it shares with the branch it was forked from."""
        self.used = False
        """A turn has begun on it, or another branch was forked from it."""
        self._num_rendered = len(self.messages)
        self._tokens: tuple[int, ...] = ()
        self._media: tuple[str, ...] = ()
        self._leaf: int | None = None
        self._turn = self._forks = 0
        self._tools = sample.tools
        self._context = ""
        """Name under which its turns may be credited apart."""
        self._state = ""
        """The environment's name for the state that the next turn begins in."""
        self._newest_turn = 0
        """Place of the newest turn among all turns of the sample; before the first, that of the branch it came from."""
        sample.branches.append(self)

    async def generate(
        self, max_new_tokens: int | None = None, stop: tuple[str, ...] = (), told: Told | None = None
    ) -> Action:
        """Let the policy take a turn. Raises SessionEnded when it can't."""
        try:
            known = self._leaf is not None or self._rendered is not None
            await self.sample.prepare(self.messages[self._num_rendered :] if known else self.messages)
            try:
                call = self.begin(max_new_tokens, stop)
            except ConfigError as error:  # the template refuses what was said
                if not self.sample.is_driven:
                    raise
                raise self.sample.end(Outcome.ENVIRONMENT_ERROR, str(error)) from error
            if told is not None:
                call = call._replace(watch=self._telling(told, call))
            return self.take(call, await self.sample.ask(call), max_new_tokens)
        except SessionEnded:
            raise
        except Exception as error:
            self.sample.broken = error
            raise

    def begin(self, max_new_tokens: int | None = None, stop: tuple[str, ...] = ()) -> GenerateCall:
        """Make the call for the policy's next turn. Raises SessionEnded when it can't take one."""
        sample, limits = self.sample, self.sample.limits
        if not sample.outcome.judged:
            raise SessionEnded(sample.error)
        if limits.max_turns and len(sample.states) >= limits.max_turns:
            raise sample.end(Outcome.TRUNCATED, "")
        self.used = True
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
        stops = stop or limits.stop
        watch = watch_for(stops, sample.family.decode)
        return GenerateCall(self._tokens, room, seed, sample.family.stop_tokens, stops, self._media, watch=watch)

    def take(self, call: GenerateCall, completion: Completion, max_new_tokens: int | None = None) -> Action:
        """Add the turn that `begin` asked for. Raises SessionEnded where the engine failed in it."""
        sample, family = self.sample, self.sample.family
        sample.queued_s += completion.queued_s
        sample.generate_s += completion.generate_s
        if completion.finish in ("error", "abort", "deadline"):
            outcome = Outcome.ENGINE_TIMEOUT if completion.finish == "deadline" else Outcome.ENGINE_ERROR
            raise sample.end(outcome, completion.error or f"generation ended with {completion.finish}")
        if call.stop:
            completion = cut(completion, call.stop, family.decode)
        if completion.finish == "length" and call.max_new_tokens != max_new_tokens:
            sample.end(Outcome.TRUNCATED, "")
        tokens, versions = completion.tokens, completion.versions
        if tokens:
            if completion.oldest_cache and completion.oldest_cache != versions:
                versions = tuple(map(min, versions, completion.oldest_cache))
            for incarnation, step in completion.newest():
                sample.newest[incarnation] = max(step, sample.newest.get(incarnation, step))
            self._grow(Node(self._leaf, tokens, True, completion.log_probs, versions, self._newest_turn))
        if completion.routes is not None:
            self._visit(completion.routes)
        text, calls, error = family.parse(tokens, self._tools, call.tokens)
        known = {tool.name for tool in self._tools}
        if wrong := [call.name for call in calls if call.name not in known]:
            error = error or f"there is no tool {wrong[0]!r}; there are {', '.join(sorted(known))}"
        sample.response = text
        # An environment that drives may have said something while the turn was sampled: that comes after the turn.
        self.messages.insert(self._num_rendered, Message("assistant", text, calls))
        self._num_rendered += 1
        return Action(text, tokens, calls, error, completion.finish == "length", len(call.tokens))

    def observe(self, observation: Observation | str) -> None:
        self.append(self.sample.format(observation), state_of(observation))

    def append(self, messages: tuple[Message, ...], state: str = "") -> None:
        """Say messages to the policy, rendered when its next turn begins. `state`: the environment's name for it."""
        self.messages += messages
        self._state = state or self._state

    def fork(self, name: str = "") -> Branch:
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
        branch = Branch(self.sample, prompt, None, self._other_seed(name))
        branch._newest_turn = self._newest_turn
        branch._tools = self._tools if tools is None else tools
        branch._context = self._context if context is None else context
        return branch

    def discard(self, reason: str) -> None:
        forest, at = self.sample.forest, self._leaf
        if at is not None and forest[at].sampled:
            forest[at] = replace(forest[at], discarded=reason)

    def reward(self, value: float) -> None:
        self.sample.step_rewards.append(float(value))
        self.sample.step_turns.append(self._newest_turn)

    def note(self, info: Mapping[str, Any]) -> None:
        self.sample.info.update(info)

    def _telling(self, told: Told, call: GenerateCall) -> Watch:
        """A watch that also tells how far the turn is. Its text is made anew each time, so long turns are told more rarely."""
        family, known = self.sample.family, 0

        def watch(tokens: Sequence[int]) -> bool:
            nonlocal known
            if call.watch is not None and call.watch(tokens):
                return True
            if len(tokens) - known > known // TOLD_SHARE:
                known = len(tokens)
                text = family.parse_beginning(tuple(tokens), self._tools, call.tokens)
                told(Action(text, (), prompt_tokens=len(call.tokens)))
            return False

        return watch

    def _other_seed(self, name: str) -> int:
        """Give the seed of another branch: by its name, else by the number of those before it."""
        self._forks += not name
        return branch_seed(self._seed, self._turn, _digest("branch", name) if name else self._forks)

    def _start(self, raw_text: str, more: bool) -> None:
        """Render the first prompt, with the messages before the policy's first turn, and find or make its root.

        `more`: messages came after the prompt, which are not in its rendering; `raw_text`: theirs, behind a bare string.
        """
        sample, family, rendered = self.sample, self.sample.family, self._rendered
        if rendered is None or (more and not self._raw):
            prompt = self._prompt if self._raw else tuple(self.messages)
            rendered = sample.fill_placeholders(family.start(prompt, self._tools), () if self._raw else self.messages)
        tokens = rendered.tokens + (family.encode(raw_text) if raw_text else ())
        root = Rendered(tokens, rendered.media)
        if root in sample.roots:
            self._leaf, self._tokens = sample.roots[root], tokens
        else:
            sample.roots[root] = self._grow(Node(None, tokens, sampled=False, media=root.media))
        self._media, self._num_rendered = root.media, len(self.messages)

    def _grow(self, node: Node) -> int:
        """Add a node behind the leaf, and give its number."""
        self._leaf = len(self.sample.forest)
        self.sample.forest.append(node)
        self.sample.num_tokens += len(node.tokens)
        self._tokens += node.tokens
        return self._leaf

    def _visit(self, routes: Routes) -> None:
        """Tell nodes which experts their tokens visited, as far as they did not know."""
        forest, at, stop = self.sample.forest, self._leaf, len(self._tokens)
        while at is not None:
            node = forest[at]
            stop -= len(node.tokens)
            if (told := filled(node, stop, routes)) is not None:
                forest[at] = replace(node, routes=told[0], routed=told[1])
            at = node.parent


def state_of(observation: Observation | str | None) -> str:
    """The environment's name for the state that it shows."""
    return observation.state if isinstance(observation, Observation) else ""


def _text(messages: Sequence[Message]) -> str:
    return "".join(message.text for message in messages)


# -- keys of states: equal where turns of different samples of a task began in the same one --------------------------


def state_key(name: str, shown: Sequence[Message], tokens: Sequence[int]) -> int:
    """Name a state by a signed 64-bit number: the environment's own `name` for it, else what the policy was shown since it last
    spoke, else all that was said, `tokens`. It is no cache key of tokens: the same words are the same state whatever stands
    before them."""
    if name:
        return _digest("name", name)
    if shown:
        return _digest("shown", *(text for message in shown for text in _texts(message)))
    return _digest("tokens", array("q", tokens).tobytes())


def _texts(message: Message) -> tuple[str, ...]:
    """The texts that tell two messages apart; media by their references."""
    content = message.content
    parts = [("", content)] if isinstance(content, str) else [
        (part.media.kind, part.media.reference) if part.media else ("", part.text) for part in content
    ]  # fmt: skip
    return (message.role, message.name, str(len(parts)), *chain.from_iterable(parts))


def _digest(*texts: str | bytes) -> int:
    digest = blake2b(digest_size=8)
    for text in texts:
        encoded = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return int.from_bytes(digest.digest(), "big", signed=True)


# -- seeds: pure functions of names (run seed, group, sample, attempt, turn), splitmix64's finalizer over a running state --

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def sample_seed(run_seed: int, group: int, sample: int, retry: int = 0) -> int:
    """Give the seed of one attempt at one place of a group, below 2**63."""
    return _mix(_mix(_mix(_mix(0, run_seed), group), sample), retry) >> 1


def turn_seed(sample_seed: int, turn: int) -> int:
    """Give the seed of one turn of a sample, below 2**63."""
    return _mix(_mix(1, sample_seed), turn) >> 1


def branch_seed(seed: int, turn: int, branch: int) -> int:
    """Give the seed of a branch's turns, independent of the order in which branches happen to run."""
    return _mix(_mix(_mix(2, seed), turn), branch) >> 1


def _mix(state: int, value: int) -> int:
    z = (state + _GAMMA + (value & _MASK)) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
