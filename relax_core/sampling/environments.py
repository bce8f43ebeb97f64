# SPDX-License-Identifier: Apache-2.0
"""The pool of environments, which gives each sample an environment instance of its own.

An instance runs in this process if its class sets `in_process`, a promise that its code never blocks or crashes.
Otherwise many instances share a killable process, where `EnvironmentHost` runs them.

Errors and missed deadlines of an instance are returned as data, so they affect only its own sample. A process that does
not answer a call is killed, and all its samples are played again. Samples that may have caused the failure are each
played alone in a new process, so that no sample gets an outcome that another sample caused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from relax_core.api.component import Chosen
from relax_core.api.engine import ModelClient
from relax_core.api.environment import Action, Environment, Observation, PromptRefused, Tool
from relax_core.api.errors import PluginError, RelaxError
from relax_core.api.sandbox import SandboxLimits
from relax_core.api.task import MediaKind, Message, Task
from relax_core.api.trajectory import Outcome, Trajectory
from relax_core.engines.model_rpc import ModelRpcClient, model_handlers
from relax_core.registry.error_text import authored
from relax_core.registry.shapes import checked, returned_by, reward_number
from relax_core.rpc.isolated_host import IsolatedHost, ParentChannel
from relax_core.rpc.isolated_pool import (
    END_S,
    Handler,
    IsolatedPool,
    IsolatedSession,
    ItemCrash,
    ItemTimeout,
    PoolSettings,
    ProcessStarter,
    SessionLost,
    untrusted,
)
from relax_core.rpc.messages import register
from relax_core.sampling.episode import (
    EnvironmentFailed,
    EnvironmentHandle,
    InProcess,
    ResetResult,
    SingleTurn,
    StepResult,
    error_text,
    guarded,
    late_text,
    reset,
    step,
)
from relax_core.sampling.session import Branch, OnPartial, SessionEnded, state_of
from relax_core.sampling.tools import check_tools, writable_folders
from relax_core.sandboxes.pool import SandboxPool, SandboxRpcClient

if TYPE_CHECKING:  # importing the configuration would slow down the start of each environment process
    from relax_core.config.run_config import EnvironmentChoice

T = TypeVar("T")
SESSION = "session"
"""Name of the parent's handler for `Session` requests of environments that implement `run`."""
DOUBT = 0.1
"""Share of a deadline. If the event loop was blocked for a larger share, a second sample may have caused the delay."""
ENVIRONMENT_OUTCOMES = (Outcome.ENVIRONMENT_ERROR, Outcome.ENVIRONMENT_TIMEOUT)
Retried = Callable[[str, str], Awaitable[None]]
"""Callback for a sample that is played again; takes (name of the environment, reason)."""


# -- messages between an environment's process and its parent ----------------------------------------------------------

Doubt = Literal["", "blocked", "out of memory"]
"""Reason to doubt that a sample caused its failure: a blocked event loop, or a process at its memory limit."""


@register
@dataclass(frozen=True, slots=True)
class CallFailed:
    """The answer to a call of `EnvironmentHost` that failed, or to a `TakeTurn` whose messages were refused."""

    outcome: Literal["environment_error", "environment_timeout", "media_error"]
    message: str
    doubt: Doubt = ""


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """A request of an environment that executes `run`, for one branch of its sample."""

    branch: int


@register
@dataclass(frozen=True, slots=True)
class TakeTurn(SessionRequest):
    """Let the policy take a turn; `listens`: the environment also asks for partial text of the turn."""

    max_new_tokens: int | None
    stop: tuple[str, ...]
    listens: bool


@register
@dataclass(frozen=True, slots=True)
class Listen(SessionRequest):
    """Wait until the text of the turn in progress has more than `known` characters."""

    known: int


@register
@dataclass(frozen=True, slots=True)
class Observe(SessionRequest):
    """Append messages, which begin a state with this name."""

    messages: tuple[Message, ...]
    state: str


@register
@dataclass(frozen=True, slots=True)
class Fork(SessionRequest):
    """Fork the branch; the fork gets the number `other`."""

    other: int
    name: str


@register
@dataclass(frozen=True, slots=True)
class Restart(SessionRequest):
    """Start a branch with a prompt of its own; it gets the number `other`."""

    other: int
    prompt: str | tuple[Message, ...]
    tools: tuple[Tool, ...] | None
    name: str
    context: str | None


@register
@dataclass(frozen=True, slots=True)
class Discard(SessionRequest):
    """Discard the newest turn of the branch."""

    reason: str


@register
@dataclass(frozen=True, slots=True)
class GiveReward(SessionRequest):
    """Reward the newest turn of the branch."""

    value: float


@register
@dataclass(frozen=True, slots=True)
class Note(SessionRequest):
    """Add facts to the sample."""

    info: dict[str, Any]


@register
@dataclass(frozen=True, slots=True)
class RunEnded(SessionRequest):
    """The last request; its answer shows that the parent has performed all requests before it."""


# -- in the run's process ----------------------------------------------------------------------------------------------


class EnvironmentPool:
    """The instances of one environment of a run's configuration.

    Invariants:
    - A handle is closed when its sample ends, also after an error.
    - A broken process decides the outcome only of a sample that was alone in it. Samples that shared it are played
      again, at most `retries` times each.
    - `_driven` maps session numbers to the samples whose environment is executing `run`.
    """

    def __init__(
        self, choice: EnvironmentChoice, starter: ProcessStarter, *, build: Callable[[Chosen], Any],
        models: Mapping[str, ModelClient] | None = None, retried: Retried | None = None,
        sandboxes: SandboxPool | None = None, tools: tuple[Tool, ...] | None = None,
    ) -> None:  # fmt: skip
        """Build the prototype of the instances; start no process yet.

        `models`: clients of auxiliary pools by name. `sandboxes`: the pool in which programs run. `tools`: the tools
        found for this run; None for the class's own. Raises PluginError for an `in_process` class that needs a sandbox.
        """
        self._retried, self._sandboxes = retried, sandboxes or SandboxPool(None, starter)
        self._name, self._retries, self._models = choice.known_as, choice.retries, models or {}
        self._timeouts = choice.timeout_s, choice.total_timeout_s
        self._prototype: Environment = build(choice.chosen)
        if tools is not None:
            self._prototype.tools = tools
        check_tools(choice.known_as, self._prototype.tools)
        self._in_process = self._prototype.in_process and choice.isolation == "auto"
        if self._in_process and self._prototype.needs_sandbox is not None:
            fix = "code that waits for programs can block: remove `in_process` from the class"
            raise PluginError(f"environment {choice.name}", f"the class sets in_process and needs a sandbox; {fix}")
        self._shared: object = None
        self._opened = False
        """True between `open` and `shut` of the environment class in this process."""
        self._driven: dict[int, _DrivenSample] = {}
        names = [f"environment-{choice.known_as}-{number}" for number in range(choice.workers)]
        self._processes = IsolatedPool(
            [] if self._in_process else names,
            untrusted(
                choice.chosen, "relax_core.sampling.environments:EnvironmentHost", memory_mb=choice.memory_mb,
                inherit_env=choice.inherit_env, writable=writable_folders(choice, self._prototype),
            ),
            starter,
            PoolSettings(
                timeout_s=choice.timeout_s, opened=self._handlers, open_args=(tools,),
                one_session_each=choice.isolation == "sample",
            ),
        )  # fmt: skip

    @property
    def answers_once(self) -> bool:
        """True if the class is `SingleTurn` and not a subclass: then a sample is one turn and needs no instance."""
        return type(self._prototype) is SingleTurn

    async def start(self) -> None:
        """Start the processes and run the class's shared `open` in each; raise the error of a failing `open`."""
        if self._in_process:
            with authored(f"environment {self._name}"):
                self._shared = await type(self._prototype).open(self._prototype.options)
            self._opened = True
        await self._processes.start()

    async def stop(self) -> None:
        """Run the class's `shut` in each process, then end the processes."""
        await self._processes.stop()
        if self._opened:
            self._opened = False
            with suppress(EnvironmentFailed):
                await guarded(type(self._prototype).shut(self._shared), END_S, "shut")

    async def play(self, episode: Callable[[EnvironmentHandle], Awaitable[Trajectory]]) -> Trajectory:
        """Play one sample in its own instance and return its trajectory.

        If the sample's process broke, play the sample again from the start, at most `retries` times. A repeat is alone
        in a new process if this sample may have broken the process, or if the repeat is the last.
        """
        again, alone = self._retries, False
        while True:
            async with self.instance(alone) as environment:
                trajectory = await episode(environment)
            lost = environment.lost
            if lost is None or not again or trajectory.outcome not in ENVIRONMENT_OUTCOMES:
                return trajectory
            if self._retried is not None:
                await self._retried(f"environment-{self._name}", str(lost))
            again -= 1
            alone = lost.suspect or not again

    @asynccontextmanager
    async def instance(self, alone: bool = False) -> AsyncIterator[EnvironmentHandle]:
        """Open an environment for one sample, with `alone` in a new process of its own; close it at the end."""
        async with AsyncExitStack() as stack:
            handle: EnvironmentHandle
            if self._in_process:
                with authored(f"environment {self._name}"):
                    instance = type(self._prototype)(self._prototype.options)
                instance.shared, instance.tools = self._shared, self._prototype.tools
                instance.engines = {name: self._models[name] for name in instance.needs_engines}
                handle = InProcess(instance, *((0.0,) if getattr(instance, "never_waits", False) else self._timeouts))
            else:
                session = await stack.enter_async_context(self._processes.session(alone))
                handle = RemoteEnvironment(session, self._prototype, self._timeouts, self._driven)
            stack.push_async_callback(handle.close)
            yield handle

    def _handlers(self, opened: Any) -> dict[str, Handler]:
        needs, limits = checked(opened, tuple[tuple[str, ...], SandboxLimits | None], "start")
        handlers = model_handlers(self._models, f"environment {self._name}", needs)
        handlers |= self._sandboxes.handlers(limits, self._waiting)
        return {**handlers, SESSION: self._request} if self._prototype.drives() else handlers

    async def _request(self, number: int, request: SessionRequest) -> object:
        """Perform a request of an instance in a process; return None if its sample has ended."""
        sample = self._driven.get(number)
        return None if sample is None else await sample.apply(request)

    def _waiting(self, number: int) -> AbstractContextManager[None]:
        """Stop the environment clock of a sample while the sample's program waits for its start in the sandbox."""
        sample = self._driven.get(number)
        return nullcontext() if sample is None else sample.paused()


class RemoteEnvironment(EnvironmentHandle):
    """A handle of an instance that runs in one of the pool's processes."""

    def __init__(
        self,
        session: IsolatedSession,
        prototype: Environment,
        timeouts: tuple[float, float],
        driven: dict[int, _DrivenSample],
    ) -> None:
        super().__init__(prototype, *timeouts)
        self._session, self._driven = session, driven

    async def reset(self, task: Task, seed: int) -> ResetResult:
        wanted = ResetResult | CallFailed
        return await self._answer("reset", self._session.call("reset", task, seed, self._timeout_s, wanted=wanted))

    async def step(self, action: Action) -> StepResult:
        wanted = StepResult | CallFailed
        return await self._answer("step", self._session.call("step", action, self._timeout_s, wanted=wanted))

    async def run(self, task: Task, seed: int, session: Branch) -> None:
        """Execute the environment's `run`; its deadline does not advance while the policy takes a turn."""
        sample = self._driven[self._session.number] = _DrivenSample(session)
        try:
            await guarded(self._drive(sample, task, seed), self._timeout_s, "run", session)
        except EnvironmentFailed as failure:
            if failure.outcome is Outcome.ENVIRONMENT_TIMEOUT:
                self._doubt(self._session.blocked_s() > DOUBT * self._timeout_s)
            raise
        finally:
            del self._driven[self._session.number]
            await sample.end()

    async def _close(self) -> None:
        await self._answer("close", self._session.call("close", self._timeout_s, wanted=None | CallFailed))

    async def _drive(self, sample: _DrivenSample, task: Task, seed: int) -> None:
        try:
            ended = self._session.long_call("run", task, seed, sample.media, wanted=None | CallFailed)
            await self._answer("run", ended)
        except EnvironmentFailed:
            if sample.failure is None:
                raise
        if sample.failure is not None:
            raise sample.failure

    async def _answer(self, method: str, answer: Awaitable[T | CallFailed]) -> T:
        """Return the answer of the environment's process to a call. Raises EnvironmentFailed if the call failed."""
        try:
            result = await answer
        except ItemTimeout as error:
            raise EnvironmentFailed(Outcome.ENVIRONMENT_TIMEOUT, late_text(method, self._timeout_s)) from error
        except (ItemCrash, SessionLost) as error:
            # A process may be killed from outside, so its end does not prove that a sample is at fault, even if alone.
            self.lost = error if isinstance(error, SessionLost) else SessionLost(str(error), suspect=True)
            raise EnvironmentFailed(Outcome.ENVIRONMENT_ERROR, f"{method}: the environment's {error}") from error
        except RelaxError as error:  # for example an argument that cannot be serialized
            raise EnvironmentFailed(Outcome.ENVIRONMENT_ERROR, f"{method}: {error}") from error
        if isinstance(result, CallFailed):
            self._doubt(bool(result.doubt))
            if result.doubt == "out of memory":  # the process would also fail the next call of any sample
                await self._session.discard()
            raise EnvironmentFailed(Outcome(result.outcome), result.message)
        return result

    def _doubt(self, doubt: bool) -> None:
        """Set `lost` if another sample may have caused the failure, because it used the same process."""
        if doubt and not self._session.alone:
            self.lost = SessionLost("other samples may have caused it", suspect=True)


class _DrivenSample:
    """The parent's side of a sample whose environment executes `run` in another process.

    It holds the sample's branches by number and the turns that the policy is taking.
    """

    def __init__(self, session: Branch) -> None:
        self._branches, self.media = {0: session}, session.media
        self._partial: dict[int, _PartialTurn] = {}
        """Turns in progress whose partial text the environment asked for, by branch number."""
        self._turns: set[asyncio.Task[Any] | None] = set()
        self.failure: Exception | None = None
        """Error of the first request that failed, for example a restart from an invalid prompt."""

    def paused(self) -> AbstractContextManager[None]:
        return self._branches[0].sample.paused()

    async def apply(self, request: SessionRequest) -> Action | CallFailed | None:
        """Perform one request of the environment.

        Return the action of a turn, CallFailed if its messages were refused, or the partial action for a `Listen`; None
        once the sample or turn has ended. All remaining requests return None.
        """
        if isinstance(request, TakeTurn):
            return await self._take_turn(request)
        if isinstance(request, Listen):
            partial = self._partial.get(request.branch)
            return None if partial is None else await partial.after(request.known)
        try:
            branch = self._branches[request.branch]
            match request:
                case Observe():
                    branch.append(request.messages, request.state)
                case Fork():
                    self._branches[request.other] = branch.fork(request.name)
                case Restart():
                    rest = request.tools, request.name, request.context
                    self._branches[request.other] = branch.restart(request.prompt, *rest)
                case Discard():
                    branch.discard(request.reason)
                case GiveReward():
                    branch.reward(request.value)
                case Note():
                    branch.note(request.info)
        except Exception as error:
            self.failure = self.failure or error
        return None

    async def _take_turn(self, request: TakeTurn) -> Action | CallFailed | None:
        turn, number = asyncio.current_task(), request.branch
        self._turns.add(turn)
        try:
            on_partial = self._partial.setdefault(number, _PartialTurn()).tell if request.listens else None
            return await self._branches[number].generate(request.max_new_tokens, request.stop, on_partial)
        except PromptRefused as refused:
            return _failed(refused)
        except Exception:  # the sample has recorded the reason; the instance need not know it
            return None
        finally:
            self._turns.discard(turn)
            if number in self._partial:
                self._partial.pop(number).end()

    async def end(self) -> None:
        """Cancel the turns in progress, because the environment has ended."""
        turns = [turn for turn in self._turns if turn is not None]
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)


class _PartialTurn:
    """The growing text of one turn while engines sample it: `tell ... -> end`."""

    def __init__(self) -> None:
        self._newest: Action | None = None
        self._ended, self._changed = False, asyncio.Event()

    def tell(self, partial: Action) -> None:
        self._newest = partial
        self._changed.set()

    def end(self) -> None:
        self._ended = True
        self._changed.set()

    async def after(self, known: int) -> Action | None:
        """Return the partial turn once its text exceeds `known` characters, or None once the turn has ended."""
        while not self._ended:
            if self._newest is not None and len(self._newest.text) > known:
                return self._newest
            self._changed.clear()
            await self._changed.wait()
        return None


# -- in the killable process ------------------------------------------------------------------------------------------


class EnvironmentHost(IsolatedHost):
    """The environment instances of one killable process, by session number.

    `reset` or `run` makes an instance; `close` removes it.
    """

    async def open(self, tools: tuple[Tool, ...] | None) -> tuple[tuple[str, ...], SandboxLimits | None]:
        """Build the prototype and run the class's shared `open`, once per process.

        `tools`: the tools found for this run; None for the class's own. Return the names of the auxiliary pools that
        the environment calls, and the limits of its sandbox (None if it has no sandbox).
        """
        self._prototype: Environment = self.build(self.component)
        if tools is not None:
            self._prototype.tools = tuple(tools)
        self._sandbox = SandboxRpcClient(self.parent)
        self._shared: object = await type(self._prototype).open(self._prototype.options)
        self.ends = self._prototype.shuts()
        self._instances: dict[int, Environment] = {}
        self._running: dict[int, asyncio.Task[Any]] = {}
        return tuple(self._prototype.needs_engines), self._prototype.needs_sandbox

    async def end(self) -> None:
        await type(self._prototype).shut(self._shared)

    async def reset(self, number: int, task: Task, seed: int, timeout_s: float) -> ResetResult | CallFailed:
        try:
            instance = self._make(number)
        except Exception as error:
            return _raised("the constructor", error)
        return await self._outcome(reset(instance, task, seed), timeout_s, "reset")

    async def step(self, number: int, action: Action, timeout_s: float) -> StepResult | CallFailed:
        return await self._outcome(step(self._instances[number], action), timeout_s, "step")

    async def run(self, number: int, task: Task, seed: int, media: Sequence[MediaKind]) -> CallFailed | None:
        """Execute an instance's `run`; return after the parent has handled all its requests."""
        running = asyncio.current_task()
        ended: CallFailed | None = None
        if running is not None:
            self._running[number] = running
        try:
            instance = self._make(number)
            await instance.run(task, seed, RemoteSession(self.parent, number, instance, tuple(media)))
        except SessionEnded:
            pass
        except PromptRefused as refused:
            ended = _failed(refused)
        except Exception as error:
            ended = _raised("run", error)
        await self.parent.call(SESSION, number, RunEnded(0))
        return ended

    async def close(self, number: int, timeout_s: float) -> CallFailed | None:
        instance = self._instances.pop(number, None)
        if running := self._running.pop(number, None):
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return None if instance is None else await self._outcome(instance.close(), timeout_s, "close")

    async def _outcome(self, work: Awaitable[T], timeout_s: float, method: str) -> T | CallFailed:
        """Await `work` under its deadline; return its result, or its failure."""
        with self.blocked.watched() as blocked_s:
            try:
                return await guarded(work, timeout_s, method)
            except EnvironmentFailed as failure:
                if isinstance(failure.__cause__, MemoryError):
                    return _raised(method, failure.__cause__)
                late = failure.outcome is Outcome.ENVIRONMENT_TIMEOUT and blocked_s() > DOUBT * timeout_s
                return _failed(failure, "blocked" if late else "")

    def _make(self, number: int) -> Environment:
        instance = type(self._prototype)(self._prototype.options)
        instance.shared, instance.tools = self._shared, self._prototype.tools
        instance.engines = {name: ModelRpcClient(self.parent, name) for name in instance.needs_engines}
        if instance.needs_sandbox is not None:
            instance.sandbox = self._sandbox.of(number)
        self._instances[number] = instance
        return instance


class RemoteSession:
    """`api.Session` in an environment's process: forwards the requests of one branch to the parent."""

    def __init__(
        self, parent: ParentChannel, number: int, environment: Environment, media: tuple[MediaKind, ...]
    ) -> None:
        self._parent, self._number, self._environment, self.media = parent, number, environment, media
        self._branch = 0
        self._branches = count(1)

    async def generate(
        self, max_new_tokens: int | None = None, stop: tuple[str, ...] = (), on_partial: OnPartial | None = None
    ) -> Action:
        checked(stop, tuple[str, ...], "generate: stop")
        request = TakeTurn(self._branch, max_new_tokens, stop, on_partial is not None)
        asked = self._parent.call(SESSION, self._number, request)
        if on_partial is None:
            action: Action | CallFailed | None = await asked
        else:
            turn, listening = asyncio.ensure_future(asked), asyncio.create_task(self._listen(on_partial))
            try:
                action = await turn
            finally:
                turn.cancel()
                listening.cancel()
                await asyncio.gather(turn, listening, return_exceptions=True)
        if action is None:
            raise SessionEnded("the sample has ended")
        if isinstance(action, CallFailed):
            raise PromptRefused(action.message, Outcome(action.outcome))
        return action

    async def _listen(self, on_partial: OnPartial) -> None:
        known = -1
        while (partial := await self._parent.call(SESSION, self._number, Listen(self._branch, known))) is not None:
            known = len(partial.text)
            on_partial(partial)

    def observe(self, observation: Observation | str) -> None:
        checked(observation, Observation | str, "observe")
        messages = self._environment.format_observation(observation)
        checked(messages, tuple[Message, ...], returned_by(self._environment.format_observation))
        self._notify(Observe(self._branch, messages, state_of(observation)))

    def fork(self, name: str = "") -> RemoteSession:
        other = self._other()
        self._notify(Fork(self._branch, other._branch, name))
        return other

    def restart(
        self,
        prompt: str | tuple[Message, ...],
        tools: tuple[Tool, ...] | None = None,
        name: str = "",
        context: str | None = None,
    ) -> RemoteSession:
        other = self._other()
        self._notify(Restart(self._branch, other._branch, prompt, tools, name, context))
        return other

    def discard(self, reason: str) -> None:
        self._notify(Discard(self._branch, reason))

    def reward(self, value: float) -> None:
        self._notify(GiveReward(self._branch, reward_number(value, "reward")))

    def note(self, info: Mapping[str, Any]) -> None:
        self._notify(Note(self._branch, dict(checked(info, Mapping[str, Any], "info"))))

    def _other(self) -> RemoteSession:
        other = RemoteSession(self._parent, self._number, self._environment, self.media)
        other._branch, other._branches = next(self._branches), self._branches
        return other

    def _notify(self, request: SessionRequest) -> None:
        self._parent.notify(SESSION, self._number, request)


def _failed(failure: EnvironmentFailed | PromptRefused, doubt: Doubt = "") -> CallFailed:
    return CallFailed(failure.outcome.value, str(failure), doubt)  # type: ignore[arg-type]  # one of these outcomes


def _raised(method: str, error: BaseException) -> CallFailed:
    """Return the failure of a call in which the environment's code raised an exception."""
    doubt: Doubt = "out of memory" if isinstance(error, MemoryError) else ""
    return CallFailed("environment_error", error_text(method, error), doubt)
