# SPDX-License-Identifier: Apache-2.0
"""The environment `agent`: a program or a Python function plays the sample and calls the policy over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt, field_validator, model_validator

from relax_core.api import Environment, Options, ProgramEnd, SandboxLimits, Session, Task, load_function
from relax_core.api.reward import LARGEST_REWARD
from relax_plugin_agents.boxed import AGENT_S, describe_end, read_copies, run_agent, run_judge
from relax_plugin_agents.forward import GATEWAY
from relax_plugin_agents.gateway import AgentSession, Gateway
from relax_plugin_agents.history import Call
from relax_plugin_agents.program import ModelAccess, run_program

MAX_BOXED_BYTES = 1 << 30
"""Maximum bytes of all requests of a sample from its box, so that a program in the box cannot fill the run's memory."""
BOX_LIMITS = ("box_memory_mb", "box_pids", "box_disk_mb", "box_output_kb")


class AgentOptions(Options):
    """Options of the environment `agent`. Its `timeout_s` limits the agent's own time, without waits for the policy."""

    command: tuple[str, ...] = ()
    """The agent's program with its arguments, started for each sample. Its environment variables include
    `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY`, `RELAX_MODEL`, `RELAX_TASK` (path of
    the task as JSON), `RELAX_SEED` and, if the agent may report its reward, `RELAX_REPORT_URL` and
    `RELAX_REPORT_KEY`."""
    function: str | Path = ""
    """A Python function instead of a program: `module:name` or `file.py:name`. The function is called with the task and
    a `ModelAccess`, and returns the reward, or a dictionary of rewards by context. An `async` function shares the event
    loop of its process with many samples, so it must not block; a synchronous function runs in a thread."""
    reward: Literal["", "reported", "rewards"] = ""
    """Source of the reward. `reported`: the agent returns or reports a number. `rewards`: the run's `[[rewards]]` judge
    the last answer. Empty: `judge` if set, else `reported`. A sandbox without a judge needs an explicit value, because
    every program in the box could report a reward."""
    sandbox: bool = False
    """Run the program in a box of the run's sandbox, from which only the policy can be reached. Use a sandbox for an
    agent that runs the policy's code, or that you have not read. `python` is the box's interpreter, without packages."""
    copies: dict[str, Path] = {}
    """Files and folders that are copied into each box: path in the box = path on this machine. A task's column `files`
    (path to text) adds files to its boxes."""
    judge: tuple[str, ...] = ()
    """Program that judges the files which the agent left in its box (`$RELAX_WORK`), after the agent ended or failed.
    The judge starts in a new folder, reads the first line of standard input as KEY, and prints
    `{"reward": NUMBER, "key": KEY}` as its last line."""
    judge_copies: dict[str, Path] = {}
    """Files and folders that are copied into the judge's folder after the agent has ended: path in the folder = path on
    this machine. A task's column `judge_files` (path to text) adds files."""
    judge_s: PositiveFloat = 30.0
    """Time limit of the judge in seconds; the environment's `timeout_s` limits the judge too."""
    judge_range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest reward that the judge may give; a reward outside this range fails the sample."""
    box_memory_mb: PositiveInt = 1024
    """Memory limit in MB of all processes in a box, of the agent and then of the judge."""
    box_pids: PositiveInt = 128
    """Maximum number of processes and threads in a box at once."""
    box_disk_mb: PositiveInt = 256
    """Maximum size in MB of all files in a box."""
    box_output_kb: PositiveInt = 1024
    """Maximum output in KB of the program, which is killed beyond; the judge has the same limit."""
    directory: Path | None = None
    """Directory in which the program starts; None: the directory in which the run was started."""
    env: dict[str, str] = {}
    """Further environment variables of the program. Outside of a sandbox, the program also inherits the run's `PATH`,
    `HOME`, `LANG`, `LC_ALL`, `TMPDIR`, `VIRTUAL_ENV`, `PYTHONPATH`, and the variables of certificates and package indexes
    (`SSL_CERT_FILE`, `SSL_CERT_DIR`, `REQUESTS_CA_BUNDLE`, `CURL_CA_BUNDLE`, `PIP_*`, `UV_*`) without credentials."""
    model: str = "policy"
    """Model name of the policy that the agent receives. A request with any name outside of `models` reaches the policy."""
    models: tuple[str, ...] = ()
    """Pools of `[[engines]]` that agents may call by model name. The pools' answers are counted and never trained."""

    @field_validator("directory", mode="before")
    @classmethod
    def _here(cls, directory: Any) -> Any:
        return str(Path.cwd()) if directory is None else directory

    @model_validator(mode="after")
    def _plays_one_way(self) -> AgentOptions:
        if bool(self.command) == bool(self.function):
            raise ValueError("set either command or function, and not both")
        if self.model in self.models or len(set(self.models)) < len(self.models):
            raise ValueError("models: list each pool once, and do not list the policy's own name (option model)")
        if self.sandbox:
            self._plays_in_a_box()
            return self
        for name in ("copies", "judge", "judge_copies", "judge_s", "judge_range", *BOX_LIMITS):
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"{name} has no effect outside of a sandbox: set sandbox = true, or remove {name}")
        return self

    def _plays_in_a_box(self) -> None:
        if self.function:
            raise ValueError("function runs in the environment's process and cannot run in a sandbox: set command")
        if self.judge and self.reward:
            raise ValueError(f'both judge and reward = "{self.reward}" are set: remove one')
        if not self.judge and not self.reward:
            who = (
                'set judge, or reward = "rewards", or reward = "reported" if no program in the box would forge a reward'
            )
            raise ValueError(f"with sandbox = true the source of the reward is required: {who}")
        if self.judge_copies and not self.judge:
            raise ValueError("judge_copies has no effect without judge: set judge, or remove judge_copies")
        low, high = self.judge_range
        if not (low <= high and math.isfinite(low) and math.isfinite(high)):
            raise ValueError(f"judge_range: got {low:g}, {high:g}; give the lowest reward, then the highest")


class Agent(Environment[AgentOptions]):
    """An environment in which an agent plays the sample; the agent, a judge or `[[rewards]]` give the reward."""

    gives_reward: ClassVar[bool] = True

    def __init__(self, options: AgentOptions | None = None) -> None:
        super().__init__(options)
        self.needs_engines = self.options.models
        self.writes_anywhere = not self.options.sandbox
        if self.options.sandbox:
            limits = {name.removeprefix("box_"): getattr(self.options, name) for name in BOX_LIMITS}
            self.needs_sandbox = SandboxLimits(wall_s=AGENT_S, **limits)

    @classmethod
    async def open(cls, options: AgentOptions) -> _Shared:
        """Start the gateway of this process, and read the files that are copied into boxes."""
        gateway = Gateway(options.model)
        await gateway.start(local=options.sandbox)
        copies = read_copies(options.copies, "copies"), read_copies(options.judge_copies, "judge_copies")
        function = load_function("environment.function", str(options.function)) if options.function else None
        return _Shared(gateway, function, *copies, ThreadPoolExecutor(thread_name_prefix="agent"))

    @classmethod
    async def shut(cls, shared: Any) -> None:
        """Stop the gateway."""
        shared.threads.shutdown(wait=False, cancel_futures=True)
        await shared.gateway.stop()

    async def run(self, task: Task, seed: int, session: Session) -> None:
        shared, options = self.shared, self.options
        assert isinstance(shared, _Shared)
        max_bytes = MAX_BOXED_BYTES if options.sandbox else None
        pools = {name: self.engines[name] for name in options.models}
        async with shared.gateway.session(session, max_bytes, pools) as agent, _unhidden(agent), noted(session, agent):
            model = ModelAccess(shared.gateway.url, agent.agent_key, options.model, seed)
            if shared.function is not None:
                if inspect.iscoroutinefunction(shared.function):
                    result = await shared.function(task, model)
                else:
                    loop = asyncio.get_running_loop()
                    result = await loop.run_in_executor(shared.threads, shared.function, task, model)
            elif options.sandbox:
                result = await self._boxed(shared, agent, task, model)
            else:
                env = {**options.env, "RELAX_REPORT_KEY": agent.reporter_key}
                await run_program(options.command, options.directory, env, task, model)
                result = agent.reported
            await agent.close()
        self._judge(agent, result)

    async def _boxed(self, shared: _Shared, agent: AgentSession, task: Task, model: ModelAccess) -> Any:
        """Run the program in a box, then the judge if one is set; return the reward, or rewards by context."""
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
                raise RuntimeError(f"the agent's program {describe_end(ended)}")
            return agent.reported

    def _judge(self, agent: AgentSession, result: Any) -> None:
        read = read_calls(agent)
        if not read:
            raise RuntimeError("the agent has read no answer of the policy, so the sample has no turn to train")
        if self.options.reward == "rewards":
            return
        given = dict(result) if isinstance(result, Mapping) else {} if result is None else {"": result}
        if not given:
            fix = 'return one, post it to $RELAX_REPORT_URL, or set reward = "rewards" and let [[rewards]] judge'
            raise RuntimeError(f"the agent reported no reward; {fix}")
        for context, reward in given.items():
            calls = [call for call in read if call.context == context] if context else read
            if not isinstance(reward, int | float) or not abs(reward) <= LARGEST_REWARD:
                raise TypeError(f"the agent returned {reward!r} as its reward; return a finite number from -1e9 to 1e9")
            if not calls:
                raise ValueError(
                    f"the agent returned a reward for the context {context!r}, but has read no answer in this context"
                )
            (calls[-1].branch if context else agent.history.root).reward(float(reward))


@contextlib.asynccontextmanager
async def noted(session: Session, agent: AgentSession) -> AsyncIterator[None]:
    """Add a summary of the agent's calls to the sample's `info` when the context ends, also after an error."""
    try:
        yield
    finally:
        side_calls = agent.side_calls.summary()
        session.note({"agent": {**agent.history.summary(), **({"side_calls": side_calls} if side_calls else {})}})


@contextlib.asynccontextmanager
async def _unhidden(agent: AgentSession) -> AsyncIterator[None]:
    """Raise the first failure of an auxiliary pool when the context ends, even if the agent caught the failure.

    Without the pool's answer, the agent's result does not measure the policy.
    """
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
    """The gateway, the function and the files that the samples of one process share."""

    gateway: Gateway
    function: Callable[[Task, ModelAccess], Any] | None
    copies: Mapping[str, bytes]
    judge_copies: Mapping[str, bytes]
    threads: Executor
    """Threads for synchronous functions. The event loop's own executor may run a call in the loop's thread (inline
    runner). There a function would wait forever for the gateway, which answers in the same thread."""


def read_calls(agent: AgentSession) -> list[Call]:
    """Return the calls whose answer the agent has read: a delivered answer, or one that a later call continues."""
    return [call for call in agent.history.calls if call.delivered or call.calls_after]
