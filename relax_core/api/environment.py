# SPDX-License-Identifier: Apache-2.0
"""Environments: what answers the policy. Write `reset` and `step`, or `run` for agents that branch.

One instance serves one sample, in a killable worker. The core renders observations, parses tool calls,
masks environment tokens, and always calls `close`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol

from relax_core.api.component import Configurable, OptionsT
from relax_core.api.engine import NO_ENGINES, ModelClient
from relax_core.api.task import Message, Part, Task, ToolCall


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the policy may call; parameters map names to types or JSON schema."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""


@dataclass(frozen=True, slots=True)
class Observation:
    """The next input of the policy: text or parts under a role, or whole messages."""

    content: str | tuple[Part, ...] = ""
    role: str = "user"
    messages: tuple[Message, ...] = ()
    state: str = ""
    """Names the state that the task is in, where samples of one task may come to the same one: their turns from there are
    compared (step credit). Empty: the state is what is shown."""


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the policy."""

    text: str
    tokens: tuple[int, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    parse_error: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's answer; `reward` is credited to this turn."""

    observation: Observation | str
    done: bool
    reward: float | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


class Session(Protocol):
    """One sample's hand on the policy, for environments that write `run`."""

    async def generate(self, max_new_tokens: int | None = None, stop: tuple[str, ...] = ()) -> Action:
        """Let the policy take a turn at this branch."""

    def observe(self, observation: Observation | str) -> None:
        """Append what the environment says; its tokens are masked from the loss."""

    def fork(self) -> Session:
        """A branch that shares all tokens so far; each branch becomes a row."""

    def restart(self, prompt: str | tuple[Message, ...]) -> Session:
        """A new root of the same sample: compaction or a sub-agent."""

    def reward(self, value: float) -> None:
        """Credit the sample, for this branch's newest turn."""


class Environment(Configurable[OptionsT], Generic[OptionsT]):
    """Answers the policy turn by turn, or drives it with `run`."""

    kind: ClassVar[str] = "environment"
    tools: ClassVar[tuple[Tool, ...]] = ()
    needs_columns: ClassVar[tuple[str, ...]] = ()
    gives_reward: ClassVar[bool] = False
    """True where its steps or `run` judge the sample, so that a run needs no `[[rewards]]`."""
    in_process: ClassVar[bool] = False
    """True only for code that can't block or crash; everything else runs in a killable worker."""

    needs_engines: tuple[str, ...] = ()
    """Pools of `[[engines]]` that it asks; set by `__init__` where an option names them."""
    engines: Mapping[str, ModelClient] = NO_ENGINES
    """A hand on each of them, from `reset` or `run` on."""

    @classmethod
    async def open(cls, options: Any) -> object:
        """Shared set-up, once a worker; handed to instances as `self.shared`."""
        return None

    shared: object = None

    async def reset(self, task: Task, seed: int) -> Observation | None:
        """Start the task. None when the task's prompt is all there is to see."""
        raise NotImplementedError

    async def step(self, action: Action) -> Step:
        """Answer one turn."""
        raise NotImplementedError

    async def run(self, task: Task, seed: int, session: Session) -> None:
        """Instead of reset / step: drive the whole sample."""
        raise NotImplementedError

    async def close(self) -> None:
        """Release what the sample held; always runs."""

    def format_observation(self, observation: Observation | str) -> tuple[Message, ...]:
        """Messages appended for an observation."""
        if isinstance(observation, str):
            return (Message("user", observation),)
        return observation.messages or (Message(observation.role, observation.content),)

    @classmethod
    def drives(cls) -> bool:
        """Tell whether the class wrote `run`, and so branches by itself."""
        return cls.run is not Environment.run
