# SPDX-License-Identifier: Apache-2.0
"""The environment `verifiers`: runs environments of PrimeIntellect's `verifiers` in a separate interpreter.

The interpreter calls the policy over HTTP like an agent. Training uses the policy's sampled tokens, and the sum of the
taskset's rewards is the sample's reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat

from relax_core.api import ConfigError, Environment, Options, Session, Task
from relax_core.api.role import PROGRAM_ENV, visible_environment
from relax_plugin_agents import verifiers_host
from relax_plugin_agents.environment import noted, read_calls
from relax_plugin_agents.gateway import Gateway
from relax_plugin_agents.program import MARK, QUOTED_BYTES

COLUMN = "verifiers"
"""Column of the task file that holds the data of a verifiers task."""
MAX_LINE = 1 << 24
"""Maximum number of bytes of a line of the interpreter's standard output."""


class VerifiersOptions(Options):
    """Options of `verifiers`."""

    python: Path
    """Interpreter with `verifiers` 0.4 and the taskset's package, such as `venvs/verifiers/bin/python`."""
    taskset: str = Field(min_length=1)
    """Id of the taskset, which is the name of its package."""
    settings: dict[str, Any] = {}
    """Further settings of verifiers' table `env`: `agent`, `taskset`, `timeout`, `retries`. The default `agent` is the
    harness `null` in a subprocess on this machine."""
    env: dict[str, str] = {}
    """Further environment variables of the interpreter, which inherits from the run only `PATH`, `HOME`, `LANG`, `LC_ALL`,
    `TMPDIR`, `VIRTUAL_ENV`, and the variables of certificates and package indexes (`SSL_CERT_FILE`, `SSL_CERT_DIR`,
    `REQUESTS_CA_BUNDLE`, `CURL_CA_BUNDLE`, `PIP_*`, `UV_*`) without credentials."""
    reward: Literal["verifiers", "rewards"] = "verifiers"
    """Source of the reward. `verifiers`: the taskset. `rewards`: the run's `[[rewards]]`, which judge the last
    answer."""
    start_s: PositiveFloat = 180.0
    """Maximum time in seconds in which the interpreter must load the environment."""
    model: str = "policy"
    """Model name that verifiers sends in its requests to the policy."""

    def table(self) -> dict[str, Any]:
        """Return verifiers' table `env`: the settings, with defaults and the taskset's id."""
        agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
        return {"agent": agent, **self.settings, "taskset": {**self.settings.get("taskset", {}), "id": self.taskset}}


class Verifiers(Environment[VerifiersOptions]):
    """An environment in which an environment of verifiers plays the sample; its taskset gives the reward."""

    gives_reward: ClassVar[bool] = True
    needs_columns: ClassVar[tuple[str, ...]] = (COLUMN,)
    writes_anywhere = True

    @classmethod
    async def open(cls, options: VerifiersOptions) -> _Serving:
        """Start the gateway and the interpreter of this process."""
        gateway = Gateway(options.model)
        await gateway.start(local=False)
        host = HostProcess(options)
        await host.start()
        return _Serving(gateway, host)

    async def run(self, task: Task, seed: int, session: Session) -> None:
        serving = self.shared
        assert isinstance(serving, _Serving)
        data = task.metadata.get(COLUMN)
        if not isinstance(data, Mapping):
            fix = "write the task file with relax-verifiers-tasks"
            raise ValueError(f"task {task.id}: column {COLUMN} is {data!r}, not the data of a verifiers task; {fix}")
        async with serving.gateway.session(session, None) as agent, noted(session, agent):
            asked = {"url": f"{serving.gateway.url}/v1", "key": agent.agent_key, "model": self.options.model}
            answer = await serving.host.run({"task": data, **asked})
            await agent.close()
        if errors := answer["errors"]:
            raise RuntimeError(f"verifiers: {errors[-1]}")
        read = read_calls(agent)
        if not read:
            raise RuntimeError(
                "the verifiers environment has read no answer of the policy, so the sample has no turn to train"
            )
        rewards = answer["rewards"]
        session.note({"verifiers": {name: answer[name] for name in ("rewards", "metrics", "stop")}})
        if self.options.reward == "rewards":
            return
        if not rewards or not all(isinstance(one, int | float) and math.isfinite(one) for one in rewards.values()):
            fix = 'give the task a @vf.reward, or set reward = "rewards" and let [[rewards]] judge'
            raise RuntimeError(f"verifiers: the task was not judged; its rewards are {rewards}; {fix}")
        session.reward(float(sum(rewards.values())))


class HostProcess:
    """The interpreter that runs verifiers: `new -> started -> (run -> answer)* -> ended`; a later run restarts it.

    Invariants: each run gets one answer, or fails if the interpreter ends first. The interpreter ends when its standard
    input closes, so it also ends when this process dies.
    """

    def __init__(self, options: VerifiersOptions) -> None:
        self._options = options
        self._numbers, self._waiting = count(1), dict[int, asyncio.Future[dict[str, Any]]]()
        self._said = bytearray()
        self._program: asyncio.subprocess.Process
        self._tasks: list[asyncio.Task[None]] = []
        self._starting = asyncio.Lock()  # held during a start, so that concurrent runs wait for the new interpreter

    async def start(self) -> None:
        """Start the interpreter and wait until the environment is loaded. Raises ConfigError with its last output."""
        options = self._options
        self._tasks, self._said = [], bytearray()
        known = visible_environment(os.environ, [name for name in PROGRAM_ENV if name != "PYTHONPATH"])
        known["PATH"] = (
            f"{options.python.absolute().parent}:{known.get('PATH', os.defpath)}"  # harnesses run the venv's own uv
        )
        try:
            self._program = await asyncio.create_subprocess_exec(
                str(options.python), verifiers_host.__file__, "serve", json.dumps(options.table()), limit=MAX_LINE,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                env={**known, **options.env, MARK: secrets.token_hex(16)}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            fix = "name the interpreter of a virtual environment with verifiers 0.4"
            raise ConfigError("environment.python", f"{options.python}: {error.strerror}", fix) from error
        assert self._program.stdout is not None
        self._tasks.append(asyncio.create_task(self._keep_end()))
        line, late = b"", ""
        try:
            async with asyncio.timeout(options.start_s):
                line = await self._program.stdout.readline()
        except TimeoutError:
            late = f"not loaded within start_s = {options.start_s:g} s"
        ready = json.loads(line) if line else {}
        if not ready.get("ready"):
            why = late or ready.get("failed") or self._quoted()
            await self.stop()
            fix = f"install verifiers==0.4.0 and the taskset's package there, or correct settings: {options.python}"
            raise ConfigError("environment.taskset", f"{options.taskset}, which verifiers can't load: {why}", fix)
        self._tasks.append(asyncio.create_task(self._hear()))

    async def run(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Play an episode; return its errors, rewards and metrics. Raises RuntimeError if the interpreter ends first."""
        number, answered = next(self._numbers), asyncio.get_running_loop().create_future()
        async with self._starting:
            if self._tasks[-1].done():
                await self.stop()
                await self.start()
        self._waiting[number] = answered
        try:
            await self._tell({"run": number, **asked})
            answer: dict[str, Any] = await answered
            return answer
        except asyncio.CancelledError:
            await self._tell({"cancel": number})
            raise
        finally:
            self._waiting.pop(number, None)

    async def stop(self) -> None:
        """Stop the interpreter and all processes that it started; kill it if it does not stop in time."""
        if self._program.stdin is not None:
            self._program.stdin.close()
        try:
            async with asyncio.timeout(2 * verifiers_host.STOPPED_S):
                await self._program.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._program.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _tell(self, asked: Mapping[str, Any]) -> None:
        assert self._program.stdin is not None
        with contextlib.suppress(ConnectionError):  # `_hear` fails all waiting runs when the interpreter ends
            self._program.stdin.write(json.dumps(asked, default=str).encode() + b"\n")
            await self._program.stdin.drain()

    async def _hear(self) -> None:
        """Pass each answer to the run that waits for it; fail all waiting runs when the interpreter ends."""
        assert self._program.stdout is not None
        try:
            while line := await self._program.stdout.readline():
                answer = json.loads(line)
                waiting = self._waiting.get(answer["run"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(RuntimeError(f"verifiers: the interpreter has ended: {self._quoted()}"))

    async def _keep_end(self) -> None:
        assert self._program.stderr is not None
        while chunk := await self._program.stderr.read(1 << 16):
            self._said += chunk
            del self._said[:-QUOTED_BYTES]

    def _quoted(self) -> str:
        return self._said.decode(errors="replace").strip() or "no output"


@dataclass(frozen=True, slots=True)
class _Serving:
    """The gateway and the interpreter that the samples of one process share."""

    gateway: Gateway
    host: HostProcess


def write_tasks() -> None:
    """Print the tasks of a taskset as rows of a task file: `relax-verifiers-tasks PYTHON TASKSET [SETTINGS]`."""
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: relax-verifiers-tasks PYTHON TASKSET [SETTINGS as JSON] > tasks.jsonl")
    options = VerifiersOptions(
        python=Path(sys.argv[1]), taskset=sys.argv[2], settings=json.loads(sys.argv[3]) if len(sys.argv) == 4 else {}
    )
    command = [str(options.python), verifiers_host.__file__, "tasks", json.dumps(options.table())]
    os.execv(command[0], command)
