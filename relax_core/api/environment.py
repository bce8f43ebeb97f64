# SPDX-License-Identifier: Apache-2.0
"""The contract of environments, which answer the policy. Implement `reset` and `step`, or `run` for branching agents.

One instance serves one sample, in a killable worker process. The core renders observations, parses tool calls, masks
the environment's tokens, and always calls `close`.
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
from relax_core.api.task import MediaKind, Message, Part, Task, ToolCall
from relax_core.api.trajectory import Outcome


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the policy may call."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """name -> type or JSON schema of each parameter, or one JSON schema whose `type` is `object`."""
    description: str = ""
    source: str = ""
    """Origin of the tool, such as the name of a server; not shown to the policy."""


@dataclass(frozen=True, slots=True)
class RowTool(Tool):
    """A tool of a row. Unlike the tools of an environment, its description reaches the template as it was written."""

    schema: Mapping[str, Any] = field(default_factory=dict)
    """`{"type": "function", "function": {"name": ..., ...}}` with all fields of the row."""


def tools_digest(tools: Sequence[Tool]) -> str:
    """Return a digest of the tools as prompts show them, in their order: `sha256:` and 64 hexadecimal digits."""
    shown = [[tool.name, tool.description, tool.parameters] for tool in tools]
    text = json.dumps(shown, sort_keys=True, separators=(",", ":"), default=repr)
    return f"sha256:{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Observation:
    """The next input of the policy: one message of text or parts, or several messages."""

    content: str | tuple[Part, ...] = ""
    role: str = "user"
    messages: tuple[Message, ...] = ()
    state: str = ""
    """Name of the task's state. Algorithms with step credit compare the turns of samples that reach the same state.
    Empty: the shown content identifies the state."""


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the policy."""

    text: str
    tokens: tuple[int, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    parse_error: str = ""
    """Reason why tool calls could not be parsed; empty if all were parsed."""
    cut: bool = False
    """True: a token limit ended the turn, not the policy."""
    prompt_tokens: int = 0
    """Number of tokens in the branch before the turn."""


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's answer to one turn."""

    observation: Observation | str
    done: bool
    reward: float | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    """Facts to add to the sample's `info`, which rewards and viewers read."""


class PromptRefused(Exception):
    """Messages that the policy can't take, for example roles in an order that the chat template refuses.

    `Session.generate` raises this error before it samples. If the environment catches it, the sample continues on its
    other branches; else the sample ends with `outcome`.
    """

    def __init__(self, message: str, outcome: Outcome = Outcome.ENVIRONMENT_ERROR) -> None:
        super().__init__(message)
        self.outcome = outcome


class Session(Protocol):
    """One branch of a sample, through which an environment's `run` talks to the policy."""

    @property
    def media(self) -> tuple[MediaKind, ...]:
        """Kinds of media that messages to the policy may contain; empty if the policy takes only text."""

    async def generate(
        self,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        on_partial: Callable[[Action], None] | None = None,
    ) -> Action:
        """Sample the policy's next turn on this branch.

        `on_partial`: callback that gets the partial turn once the messages are rendered, with an empty text, and
        repeatedly during sampling. The partial text has only characters that later tokens can't change. During a long turn,
        the calls become less frequent. Raises PromptRefused for messages that can't be rendered.
        """

    def observe(self, observation: Observation | str) -> None:
        """Append an observation; its tokens are masked from the loss."""

    def fork(self, name: str = "") -> Session:
        """Return a new branch that shares all tokens so far; each branch becomes a row.

        `name`: sets the new branch's seed, so that the seed does not depend on the order of the forks; unique in this
        branch. Empty: the order of the forks sets the seed.
        """

    def restart(
        self,
        prompt: str | tuple[Message, ...],
        tools: tuple[Tool, ...] | None = None,
        name: str = "",
        context: str | None = None,
    ) -> Session:
        """Return a new branch that starts from its own prompt, for compaction or a sub-agent of the same sample.

        `tools`: tools of the branch; None: those of this branch. `name`: as in `fork`. `context`: name under which
        algorithms may credit the turns of the branch and its forks separately; None: this branch's name.
        """

    def discard(self, reason: str) -> None:
        """Exclude the newest turn, at the branch's end, from training; metrics count its tokens under `reason`."""

    def reward(self, value: float) -> None:
        """Add a reward for this branch's newest turn.

        If neither this branch nor the branches that it stems from have had a turn, the reward is for the whole sample.
        """

    def note(self, info: Mapping[str, Any]) -> None:
        """Add facts to the sample's `info`, which rewards and viewers read; a later value replaces an earlier one."""


class Environment(Configurable[OptionsT], Generic[OptionsT]):
    """An environment: answers the policy turn by turn, or drives the whole sample in `run`."""

    kind: ClassVar[str] = "environment"
    tools: tuple[Tool, ...] = ()
    """Tools that the policy may call, the same for all samples: set in the class, or by the core from `find_tools`."""
    needs_columns: ClassVar[tuple[str, ...]] = ()
    """Columns of the task file that the environment reads."""
    gives_reward: ClassVar[bool] = False
    """True: `step` or `run` gives rewards, so a run does not need `[[rewards]]`."""
    in_process: ClassVar[bool] = False
    """True: runs in the rollout's process; only for code that can't block or crash. False: in a killable worker."""

    writes_anywhere: bool = False
    """True: the processes may change every file that you may change, except in the run directory; for classes that run
    programs of yours, and that run nothing of the policy's. `__init__` may set it. False: only files in `writable`."""
    needs_engines: tuple[str, ...] = ()
    """Names of the auxiliary pools (`[[engines]]`) that the environment calls; `__init__` may set the names."""
    engines: Mapping[str, ModelClient] = NO_ENGINES
    """pool -> client, for each pool of `needs_engines`; set by the core before `reset` or `run`."""
    needs_sandbox: SandboxLimits | None = None
    """Default limits of the environment's boxes; `__init__` may set them. None: no sandbox, as `in_process` needs."""
    sandbox: SandboxClient = NO_SANDBOX
    """A client of the run's sandbox, set by the core before `reset` or `run`. The run time of programs counts against
    the deadline of a call. In `run`, time in the queue for a program slot does not count."""

    @classmethod
    async def find_tools(cls, options: Any) -> tuple[Tool, ...]:
        """Return the run's tools, if they are known only at run time, such as the tools of a server.

        Called once, before the first prompt, in its own process. Raise ConfigError if the options give no tools.
        """
        return cls.tools

    @classmethod
    async def open(cls, options: Any) -> object:
        """Set up and return the resources of a worker, once per worker; each instance gets them as `self.shared`."""
        return None

    @classmethod
    async def shut(cls, shared: Any) -> None:
        """Release what `open` returned, once per worker, within 5 s.

        A killed process never calls `shut`, so nothing may depend on this call.
        """

    shared: object = None

    async def reset(self, task: Task, seed: int) -> Observation | None:
        """Start the task; return the first observation, or None to show the task's prompt alone."""
        raise NotImplementedError

    async def step(self, action: Action) -> Step:
        """Answer one turn of the policy."""
        raise NotImplementedError

    async def run(self, task: Task, seed: int, session: Session) -> None:
        """Drive the whole sample through `session`; implement `run` in place of `reset` and `step`."""
        raise NotImplementedError

    async def close(self) -> None:
        """Release the resources of the sample; always called."""

    def format_observation(self, observation: Observation | str) -> tuple[Message, ...]:
        """Return the messages to append for an observation."""
        if isinstance(observation, str):
            return (Message("user", observation),)
        return observation.messages or (Message(observation.role, observation.content),)

    @classmethod
    def drives(cls) -> bool:
        """Return True if the class implements `run`."""
        return cls.run is not Environment.run

    @classmethod
    def shuts(cls) -> bool:
        """Return True if the class implements `shut`."""
        return cls.shut.__func__ is not Environment.shut.__func__  # type: ignore[attr-defined]

    @classmethod
    def finds_tools(cls) -> bool:
        """Return True if the class implements `find_tools`."""
        return cls.find_tools.__func__ is not Environment.find_tools.__func__  # type: ignore[attr-defined]
