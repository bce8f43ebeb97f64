# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of environments: result types, reproducible episodes, independent samples."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from relax_core.api.environment import Action, Environment, Observation, Step, Tool
from relax_core.api.task import Message, Task
from relax_core.config.run_config import DEFAULT_SANDBOX
from relax_core.testing.direct_sandbox import DirectSandbox
from relax_core.testing.number import is_finite
from relax_core.testing.suite import Suite

SEED = 7


class EnvironmentSuite(Suite):
    """The suite of an environment; a subclass sets `component`, and `tasks` and `turns` that suit it."""

    kind = "environment"
    tasks: ClassVar[Sequence[Task]] = (Task("one", "Say a number.", "4"), Task("two", "Say a number.", "5"))
    turns: ClassVar[Sequence[str | Action]] = ("4", "5", "")
    """Turns of the policy, taken in order until the environment is done; use an Action for a turn with tool calls."""
    sandbox: ClassVar[str] = DEFAULT_SANDBOX
    """Name of the sandbox for an environment that needs one."""

    @classmethod
    def exercise(cls, component: Any) -> Any:
        return cls.played(component)

    @classmethod
    def played(cls, component: Any) -> list[Any]:
        """Play every task's episode, one after another; return the observations of each episode."""

        async def all_alone() -> list[Any]:
            opened = await _opened(component)
            return [await _episode(cls, component, opened, task) for task in cls.tasks]

        return asyncio.run(all_alone())

    def test_writes_step_or_run(self) -> None:
        target: Any = self.target()
        stepped = target.step is not Environment.step and target.reset is not Environment.reset
        assert target.drives() or stepped, "the class implements neither `reset` and `step` nor `run`"

    def test_methods_are_async(self) -> None:
        target: Any = self.target()
        plain = [
            n for n in ("open", "reset", "step", "run", "close") if not inspect.iscoroutinefunction(getattr(target, n))
        ]
        assert plain == [], "these methods must be defined with `async def`"

    def test_samples_do_not_touch_each_other(self, made: Any) -> None:
        async def side_by_side() -> list[Any]:
            opened = await _opened(made)
            return list(await asyncio.gather(*(_episode(type(self), made, opened, task) for task in self.tasks)))

        assert asyncio.run(side_by_side()) == self.played(made), (
            "concurrent samples influence each other; keep a sample's state on self, not on the class"
        )

    def test_close_is_safe_before_reset(self, made: Any) -> None:
        asyncio.run(_fresh(type(self), made, ((), None)).close())

    def test_observations_become_messages(self, made: Any) -> None:
        for observation in ("text", Observation("text", role="tool")):
            messages = made.format_observation(observation)
            assert messages and all(isinstance(message, Message) for message in messages)

    def test_tools_are_well_formed(self, made: Any) -> None:
        tools, _ = asyncio.run(_opened(made))
        assert all(isinstance(tool, Tool) for tool in tools)
        assert len({tool.name for tool in tools}) == len(tools), "two tools have the same name"


Opened = tuple[tuple[Tool, ...], object]
"""The tools of a run, and the object that `open` returned."""


async def _opened(component: Any) -> Opened:
    return tuple(await type(component).find_tools(component.options)), await type(component).open(component.options)


async def _episode(suite: type[EnvironmentSuite], component: Any, opened: Opened, task: Task) -> list[Any]:
    environment = _fresh(suite, component, opened)
    session = ScriptedSession(suite.turns)
    try:
        if environment.drives():
            await environment.run(task, SEED, session)
            return session.heard
        return await _stepped(environment, task, suite.turns)
    finally:
        await environment.close()


async def _stepped(environment: Any, task: Task, turns: Sequence[str | Action]) -> list[Any]:
    first = await environment.reset(task, SEED)
    assert first is None or isinstance(first, (Observation, str)), (
        f"reset() returned {type(first).__name__}; return an Observation or None"
    )
    heard: list[Any] = [_words(first)]
    for turn in turns:
        await asyncio.sleep(0)
        step = await environment.step(_action(turn))
        _check(step)
        heard.append([_words(step.observation), step.done, step.reward])
        if step.done:
            break
    return heard


def _fresh(suite: type[EnvironmentSuite], component: Any, opened: Opened) -> Any:
    environment = type(component)(component.options)
    environment.tools, environment.shared = opened
    if environment.needs_sandbox is not None:
        environment.sandbox = DirectSandbox.of(suite.sandbox, environment.needs_sandbox, suite.files)
    return environment


def _check(step: Any) -> None:
    assert isinstance(step, Step), f"step() returned {type(step).__name__}; return a Step"
    assert isinstance(step.observation, (str, Observation)), "Step.observation must be a string or an Observation"
    assert isinstance(step.done, bool), f"Step.done is {step.done!r}; it must be True or False"
    if step.reward is not None:
        assert is_finite(step.reward), f"Step.reward is {step.reward!r}; it must be a finite number or None"


def _action(said: str | Action) -> Action:
    return Action(said, tuple(said.encode())) if isinstance(said, str) else said


def _words(observation: Any) -> str:
    return repr(observation)


class ScriptedSession:
    """A session whose policy takes scripted turns, for environments that implement `run`."""

    media = ()

    def __init__(self, turns: Sequence[str | Action], heard: list[Any] | None = None) -> None:
        self._turns = list(turns)
        self.heard: list[Any] = [] if heard is None else heard

    async def generate(
        self,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        on_partial: Callable[[Action], None] | None = None,
    ) -> Action:
        await asyncio.sleep(0)
        action = _action(self._turns.pop(0) if self._turns else "")
        if on_partial is not None:
            on_partial(Action(action.text[:1], ()))
        return action

    def observe(self, observation: Observation | str) -> None:
        assert isinstance(observation, (str, Observation)), "session.observe() takes a string or an Observation"
        self.heard.append(_words(observation))

    def fork(self, name: str = "") -> ScriptedSession:
        return ScriptedSession(self._turns, self.heard)

    def restart(
        self,
        prompt: str | tuple[Message, ...],
        tools: tuple[Tool, ...] | None = None,
        name: str = "",
        context: str | None = None,
    ) -> ScriptedSession:
        self.heard.append(repr(prompt))
        return ScriptedSession(self._turns, self.heard)

    def discard(self, reason: str) -> None:
        assert reason, "session.discard() needs a reason"

    def reward(self, value: float) -> None:
        assert is_finite(value), f"session.reward() got {value!r}; it must be a finite number"
        self.heard.append(value)

    def note(self, info: Mapping[str, Any]) -> None:
        json.dumps(info)  # raises for an `info` that cannot be sent to another process or recorded
