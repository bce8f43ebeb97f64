# SPDX-License-Identifier: Apache-2.0
"""The environment `agent`: a program or a Python function plays the sample and asks the policy as it would ask any model."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt, field_validator, model_validator

from relax_core.api import Environment, Options, ProgramEnd, SandboxLimits, Session, Task, load_function
from relax_plugin_agents.boxed import AGENT_S, read_copies, run_agent, run_judge, told_end
from relax_plugin_agents.forward import GATEWAY
from relax_plugin_agents.gateway import AgentSession, Gateway
from relax_plugin_agents.history import Call
from relax_plugin_agents.program import run_program

MAX_BOXED_BYTES = 1 << 30
"""Of all requests of one sample from a box: what the policy started there could fill the memory of the run with them."""
BOX_LIMITS = ("box_memory_mb", "box_pids", "box_disk_mb", "box_output_kb")


class AgentOptions(Options):
    """Options of `agent`. Its own time, in which no turn is sampled, is bounded by the environment's `timeout_s`."""

    command: tuple[str, ...] = ()
    """The agent's program with its arguments, started for each sample. In its environment stand `OPENAI_BASE_URL`,
    `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY`, `RELAX_MODEL`, `RELAX_TASK` (a file: the task as JSON),
    `RELAX_SEED` and, where it reports its reward, `RELAX_REPORT_URL` and `RELAX_REPORT_KEY`."""
    function: str | Path = ""
    """Instead of a program: a Python function, `module:name` or `file.py:name`, called with the task and a `ModelAccess`. It
    returns the reward, or rewards by context. An `async` one shares its process with other samples, another one has a thread
    of its own."""
    reward: Literal["", "reported", "rewards"] = ""
    """Who judges: the agent, which returns or reports a number, or the run's `[[rewards]]`, which see the last answer. Empty:
    `judge` where there is one, else the agent; in a sandbox that must be said, since whatever runs there can report, too."""
    sandbox: bool = False
    """Run the program in a box of the run's sandbox, where it reaches the policy and nothing else: for an agent that runs
    what the policy writes, or that you have not read. `python` is the box's own interpreter, without packages."""
    copies: dict[str, Path] = {}
    """Files and folders that are put into each box: their path there, and on this machine. A task's column `files`, which
    maps paths to text, adds its own."""
    judge: tuple[str, ...] = ()
    """A program that judges what the agent left in its box (`$RELAX_WORK`) when that has ended, also where it failed. It
    begins in a folder of its own, reads a key from standard input and prints `{"reward": NUMBER, "key": KEY}` last."""
    judge_copies: dict[str, Path] = {}
    """Like `copies`, put into the judge's folder when the agent has ended; the task's column is `judge_files`."""
    judge_s: PositiveFloat = 30.0
    """Longest time of the judge; the environment's `timeout_s` bounds it as well."""
    judge_range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest reward that the judge may give; another one is no verdict."""
    box_memory_mb: PositiveInt = 1024
    """Memory of the program in a box with all that it starts; of the judge, too."""
    box_pids: PositiveInt = 128
    """Processes and threads that it has at once."""
    box_disk_mb: PositiveInt = 256
    """Files in a box."""
    box_output_kb: PositiveInt = 1024
    """What the program prints, and again the judge; more ends it."""
    directory: Path | None = None
    """Directory in which the program starts; without one that in which the run was started."""
    env: dict[str, str] = {}
    """Further variables of the program. It has the path, the home and the language of the run, and nothing else of it."""
    model: str = "policy"
    """The name by which agents are told to ask for the model. Any other is served too, but those of `models`."""
    models: tuple[str, ...] = ()
    """Pools of `[[engines]]` that agents may ask, by their names as models; what they say is counted, and never trained."""

    @field_validator("directory", mode="before")
    @classmethod
    def _here(cls, directory: Any) -> Any:
        return str(Path.cwd()) if directory is None else directory

    @model_validator(mode="after")
    def _plays_one_way(self) -> AgentOptions:
        if bool(self.command) == bool(self.function):
            raise ValueError("name either the command of a program or a function")
        if self.model in self.models or len(set(self.models)) < len(self.models):
            raise ValueError("models: names of pools, each once, and none of them the policy's own")
        if self.sandbox:
            self._plays_in_a_box()
            return self
        for name in ("copies", "judge", "judge_copies", "judge_s", "judge_range", *BOX_LIMITS):
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"{name} has no effect outside of a sandbox: set sandbox = true, or drop it")
        return self

    def _plays_in_a_box(self) -> None:
        if self.function:
            raise ValueError("a function runs in the environment's process, and in no sandbox: name a command")
        if self.judge and self.reward:
            raise ValueError(f'reward = "{self.reward}" and a judge: drop one of them')
        if not self.judge and not self.reward:
            who = 'name a judge, or set reward = "rewards", or reward = "reported" if nothing in the box would forge it'
            raise ValueError(f"nobody judges what is left in the sandbox: {who}")
        if self.judge_copies and not self.judge:
            raise ValueError("judge_copies has no effect without a judge")
        low, high = self.judge_range
        if not (low <= high and math.isfinite(low) and math.isfinite(high)):
            raise ValueError(f"judge_range: got {low:g}, {high:g}; name the lowest reward, then the highest")


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """The address and the key by which a function asks the policy, for its sample alone."""

    url: str
    """Base URL of Anthropic's clients."""
    key: str = field(repr=False)
    name: str
    seed: int

    @property
    def openai_url(self) -> str:
        """Base URL of OpenAI's clients."""
        return f"{self.url}/v1"


class Agent(Environment[AgentOptions]):
    """Lets an agent play the sample, and gives it the reward that the agent reports."""

    gives_reward: ClassVar[bool] = True

    def __init__(self, options: AgentOptions | None = None) -> None:
        super().__init__(options)
        self.needs_engines = self.options.models
        if self.options.sandbox:
            limits = {name.removeprefix("box_"): getattr(self.options, name) for name in BOX_LIMITS}
            self.needs_sandbox = SandboxLimits(wall_s=AGENT_S, **limits)

    @classmethod
    async def open(cls, options: AgentOptions) -> _Shared:
        """Start the server of this process."""
        gateway = Gateway(options.model)
        await gateway.start(local=options.sandbox)
        copies = read_copies(options.copies, "copies"), read_copies(options.judge_copies, "judge_copies")
        function = load_function("environment.function", str(options.function)) if options.function else None
        return _Shared(gateway, function, *copies)

    @classmethod
    async def shut(cls, shared: Any) -> None:
        """End the server, and the folder of its socket with it."""
        await shared.gateway.stop()

    async def run(self, task: Task, seed: int, session: Session) -> None:
        shared, options = self.shared, self.options
        assert isinstance(shared, _Shared)
        max_bytes = MAX_BOXED_BYTES if options.sandbox else None
        pools = {name: self.engines[name] for name in options.models}
        async with shared.gateway.session(session, max_bytes, pools) as agent, _unhidden(agent), noted(session, agent):
            model = ModelAccess(shared.gateway.url, agent.agent_key, options.model, seed)
            if shared.function is not None:
                result = await _called(shared.function, task, model)
            elif options.sandbox:
                result = await self._boxed(shared, agent, task, model)
            else:
                env = {**options.env, "RELAX_REPORT_KEY": agent.reporter_key}
                await run_program(options.command, options.directory, env, task, model)
                result = agent.reported
            await agent.close()
        self._judge(agent, result)

    async def _boxed(self, shared: _Shared, agent: AgentSession, task: Task, model: ModelAccess) -> Any:
        """Let a program play in a box, then have it judged there; give the reward, or those by context."""
        options, env, reports = self.options, dict(self.options.env), self.options.reward == "reported"
        if reports:
            env |= {"RELAX_REPORT_URL": f"{GATEWAY}/report", "RELAX_REPORT_KEY": agent.reporter_key}
        assert self.needs_sandbox is not None
        async with self.sandbox.open(replace(self.needs_sandbox, socket=shared.gateway.socket)) as box:
            ended = await run_agent(box, options.command, shared.copies, env, task, model, trusted=reports)
            await agent.close()
            if options.judge and read_calls(agent):
                bounds = options.judge_range
                return await run_judge(box, options.judge, shared.judge_copies, options.judge_s, bounds, task, ended)
            if ended.end is not ProgramEnd.OK:
                raise RuntimeError(f"the agent's program {told_end(ended)}")
            return agent.reported

    def _judge(self, agent: AgentSession, result: Any) -> None:
        read = read_calls(agent)
        if not read:
            raise RuntimeError("the agent has read no answer of the policy: there is nothing to train")
        if self.options.reward == "rewards":
            return
        given = dict(result) if isinstance(result, Mapping) else {} if result is None else {"": result}
        if not given:
            fix = 'return one, post it to $RELAX_REPORT_URL, or set reward = "rewards" and let [[rewards]] judge'
            raise RuntimeError(f"the agent reported no reward; {fix}")
        for context, reward in given.items():
            calls = [call for call in read if call.context == context] if context else read
            if not isinstance(reward, int | float) or not math.isfinite(reward):
                raise TypeError(f"the agent returned {reward!r} as its reward; it is a finite number")
            if not calls:
                raise ValueError(
                    f"the agent returned a reward for the context {context!r}, of which it has read no answer"
                )
            calls[-1].branch.reward(float(reward))


@contextlib.asynccontextmanager
async def noted(session: Session, agent: AgentSession) -> AsyncIterator[None]:
    """Note how the agent's calls went, however it ends."""
    try:
        yield
    finally:
        beside = agent.side_calls.summary()
        session.note({"agent": {**agent.history.summary(), **({"side_calls": beside} if beside else {})}})


@contextlib.asynccontextmanager
async def _unhidden(agent: AgentSession) -> AsyncIterator[None]:
    """Fail with a pool that could not be asked: what the agent did without its answer says nothing of the policy."""
    try:
        yield
    except Exception:
        if agent.side_calls.failure is not None:
            raise agent.side_calls.failure from None
        raise
    if agent.side_calls.failure is not None:
        raise agent.side_calls.failure


@dataclass(frozen=True, slots=True)
class _Shared:
    """The server, the function and the files that the samples of one process share."""

    gateway: Gateway
    function: Callable[[Task, ModelAccess], Any] | None
    copies: Mapping[str, bytes] = field(default_factory=dict)
    judge_copies: Mapping[str, bytes] = field(default_factory=dict)


def read_calls(agent: AgentSession) -> list[Call]:
    """List the calls whose answer the agent has read."""
    return [call for call in agent.history.calls if call.delivered or call.calls_after]


async def _called(function: Callable[[Task, ModelAccess], Any], task: Task, model: ModelAccess) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(task, model)
    return await asyncio.to_thread(function, task, model)
