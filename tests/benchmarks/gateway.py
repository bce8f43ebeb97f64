# SPDX-License-Identifier: Apache-2.0
"""Gateway: what a turn costs an agent that is a program and asks over HTTP, beside one that asks through its session.

Many samples at once, each a conversation of several turns, in one process of the environment, as in a run. The policy
takes the same time for each turn and costs nothing; what is left of a turn, as its agent sees it, lies between them.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from relax_core.api import Message, Task
from relax_core.engines.requests import PendingRequest
from relax_core.sampling.environments import EnvironmentPool
from relax_core.sampling.episode import Limits
from tests.benchmarks import report
from tests.unit.sampling.environment_pool import environment_pool
from tests.unit.sampling.toy_policy import Completion, completion, play

PROGRAM = """
import http.client, json, os, random, sys, time, urllib.parse
turns, folder, stream = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "stream"
where, key = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"]), os.environ["OPENAI_API_KEY"]
head = {"authorization": "Bearer " + key, "content-type": "application/json"}
connection = http.client.HTTPConnection(where.hostname, where.port)
messages, took = [{"role": "user", "content": "begin"}], []
time.sleep(random.random())  # samples of a run do not ask in step
for turn in range(turns):
    began = time.perf_counter()
    body = json.dumps({"messages": messages, "stream": stream})
    connection.request("POST", where.path + "/chat/completions", body, head)
    said = connection.getresponse().read()
    took.append(time.perf_counter() - began)
    messages += [{"role": "assistant", "content": "an answer"}, {"role": "user", "content": "go on"}]
open(os.path.join(folder, str(os.getpid())), "w").write(json.dumps(took))
connection.request("POST", "/report", json.dumps({"reward": 1.0}),
                   {**head, "authorization": "Bearer " + os.environ["RELAX_REPORT_KEY"]})
connection.getresponse().read()
"""
PLAIN = """
import asyncio, json, os, random, time
from relax_core.api import Environment, Options

class PlainOptions(Options):
    turns: int
    folder: str

class Plain(Environment[PlainOptions]):
    async def run(self, task, seed, session):
        took = []
        await asyncio.sleep(random.random())
        for turn in range(self.options.turns):
            began = time.perf_counter()
            await session.generate()
            took.append(time.perf_counter() - began)
            session.observe("go on")
        with open(os.path.join(self.options.folder, f"{seed}"), "w") as file:
            file.write(json.dumps(took))
"""


def thinking(seconds: float) -> Callable[[PendingRequest], Awaitable[Completion]]:
    async def generate(call: PendingRequest) -> Completion:
        await asyncio.sleep(seconds)
        return completion("an answer")

    return generate


async def played(name: str, options: dict[str, Any], plugins: list[str], samples: int, policy_s: float) -> None:
    """Play samples side by side; their agents write down how long their turns took."""
    task, limits = Task("t", (Message("user", "begin"),)), Limits(100, 1000)

    async def one(pool: EnvironmentPool, seed: int) -> None:
        trajectory = await pool.play(lambda environment: play(environment, thinking(policy_s), task, limits, seed))
        assert trajectory.outcome.judged, trajectory.info

    async with environment_pool(name, options, 600, plugins) as pool:
        await asyncio.gather(*(one(pool, seed) for seed in range(samples)))


def measure(samples: int, turns: int, policy_s: float) -> list[report.Row]:
    rows: list[report.Row] = []
    with tempfile.TemporaryDirectory() as base:
        program, plain = Path(base, "agent.py"), Path(base, "plain.py")
        program.write_text(PROGRAM)
        plain.write_text(PLAIN)
        for what in ("session", "whole", "stream"):
            folder = Path(base, what)
            folder.mkdir()
            if what == "session":
                asyncio.run(played("plain", {"turns": turns, "folder": str(folder)}, [str(plain)], samples, policy_s))
            else:
                command = [sys.executable, "-I", str(program), str(turns), str(folder), what]
                asyncio.run(played("agent", {"command": command}, [], samples, policy_s))
            took = [turn for file in folder.iterdir() for turn in json.loads(file.read_text())]
            added = sorted((turn - policy_s) * 1e3 for turn in took)
            p50, p95 = statistics.median(added), added[int(0.95 * len(added))]
            rows.append({"what": what, "turns": len(added), "p50 ms": p50, "p95 ms": p95})
    return rows


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--samples", type=int, default=64, help="at once")
    parser.add_argument("--turns", type=int, default=20, help="of each sample")
    parser.add_argument("--policy-s", type=float, default=1.0, help="seconds that the policy takes for a turn")
    options = parser.parse_args()
    set_up = report.begin(options)
    rows = measure(options.samples, options.turns, options.policy_s)
    report.finish("gateway", set_up, rows, options)
