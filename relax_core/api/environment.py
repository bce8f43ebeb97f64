# SPDX-License-Identifier: Apache-2.0
"""Environments: what answers the policy. Write `reset` and `step`, or `run` for agents that branch.

One instance serves one sample, in a killable worker. The core renders observations, parses tool calls,
masks environment tokens, and always calls `close`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol

from relax_core.api.component import Configurable, OptionsT
from relax_core.api.engine import NO_ENGINES, ModelClient
from relax_core.api.sandbox import NO_SANDBOX, SandboxClient, SandboxLimits
from relax_core.api.task import Message, Part, Task, ToolCall


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the policy may call; parameters map names to types or JSON schemas, or are one whole JSON schema, whose `type`
    is the text `object`."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""
    source: str = ""
    """Names what it comes from, such as a server; for people."""


def tools_digest(tools: Sequence[Tool]) -> str:
    """Name tools by all that a prompt shows of them, in their order: `sha256:` and 64 digits."""
    shown = [[tool.name, tool.description, tool.parameters] for tool in tools]
    text = json.dumps(shown, sort_keys=True, separators=(",", ":"), default=repr)
    return f"sha256:{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()}"


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
    cut: bool = False
    """It was ended by a limit on its tokens, and not by the policy."""
    prompt_tokens: int = 0
    """Tokens before it."""


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's answer; `reward` is credited to this turn."""

    observation: Observation | str
    done: bool
    reward: float | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


class Session(Protocol):
    """The interface of one sample to the policy, for environments that write `run`."""

    async def generate(
        self,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        told: Callable[[Action], None] | None = None,
    ) -> Action:
        """Let the policy take a turn at this branch.

        `told`: called again and again with the text of the turn as far as it is sampled, without what a later token could
        take back; long turns are told in larger pieces."""

    def observe(self, observation: Observation | str) -> None:
        """Append what the environment says; its tokens are masked from the loss."""

    def fork(self, name: str = "") -> Session:
        """A branch that shares all tokens so far; each branch becomes a row.

        `name`, unique here: branches draw by it, whatever the order in which they begin; empty: by their order."""

    def restart(
        self,
        prompt: str | tuple[Message, ...],
        tools: tuple[Tool, ...] | None = None,
        name: str = "",
        context: str | None = None,
    ) -> Session:
        """A new root of the same sample: compaction or a sub-agent. `tools`: those it may call; None: as here. `name`: as in
        `fork`. `context`: a name under which its turns, and those of its forks, may be credited apart; None: as here."""

    def discard(self, reason: str) -> None:
        """Never train this branch's newest turn, on which nothing was built: its tokens are counted under the reason."""

    def reward(self, value: float) -> None:
        """Credit the sample, for this branch's newest turn."""

    def note(self, info: Mapping[str, Any]) -> None:
        """Add facts to the sample's `info`, which rewards and viewers read; later ones win."""


class Environment(Configurable[OptionsT], Generic[OptionsT]):
    """Answers the policy turn by turn, or drives it with `run`."""

    kind: ClassVar[str] = "environment"
    tools: tuple[Tool, ...] = ()
    """What the policy may call: written in the class, or what `find_tools` found for the run, the same for all samples."""
    needs_columns: ClassVar[tuple[str, ...]] = ()
    gives_reward: ClassVar[bool] = False
    """True where its steps or `run` judge the sample, so that a run needs no `[[rewards]]`."""
    in_process: ClassVar[bool] = False
    """True only for code that can't block or crash; everything else runs in a killable worker."""

    needs_engines: tuple[str, ...] = ()
    """Pools of `[[engines]]` that it asks; set by `__init__` where an option names them."""
    engines: Mapping[str, ModelClient] = NO_ENGINES
    """A client for each of them, from `reset` or `run` on."""
    needs_sandbox: SandboxLimits | None = None
    """Bounds of the boxes in which it runs programs; set by `__init__` where options say so. Not with `in_process`."""
    sandbox: SandboxClient = NO_SANDBOX
    """A client of the run's sandbox, from `reset` or `run` on. Programs that run count against the deadline of a call;
    waiting for a place does not, in `run`."""

    @classmethod
    async def find_tools(cls, options: Any) -> tuple[Tool, ...]:
        """The tools of a run, where the class can't know them: asked for once, before the first prompt is rendered, in a
        process that ends afterwards. Raise ConfigError for options that can't give any."""
        return cls.tools

    @classmethod
    async def open(cls, options: Any) -> object:
        """Shared set-up, once a worker; handed to instances as `self.shared`."""
        return None

    @classmethod
    async def shut(cls, shared: Any) -> None:
        """Release what `open` took and returned, once a worker, within 5 s. A process that is killed, because it fell silent or
        its run died, has no time for it: nothing may depend on it."""

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

    @classmethod
    def shuts(cls) -> bool:
        """Tell whether the class wrote `shut`."""
        return cls.shut.__func__ is not Environment.shut.__func__  # type: ignore[attr-defined]

    @classmethod
    def finds_tools(cls) -> bool:
        """Tell whether the class wrote `find_tools`."""
        return cls.find_tools.__func__ is not Environment.find_tools.__func__  # type: ignore[attr-defined]
