# SPDX-License-Identifier: Apache-2.0
"""As much of `verifiers` 0.4.0 as its host asks of it, with the shapes that the real one was seen to have, whose packages are
half a gigabyte. What is played is a question, asked over HTTP with the key from the variable that the client's settings
name."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from contextlib import asynccontextmanager
from types import SimpleNamespace as Space
from typing import Any


class Given:
    """Settings by name, as its own models are made of them."""

    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)


ModelContext = EvalClientConfig = SamplingConfig = Given


class SumData(Given):
    @classmethod
    def model_validate(cls, data: dict[str, Any]) -> SumData:
        return cls(**data)

    def model_dump(self, mode: str) -> dict[str, Any]:
        return dict(vars(self))


class SumTask:
    def __init__(self, data: SumData, config: Any) -> None:
        self.data = data

    @staticmethod
    def data_type() -> type[SumData]:
        return SumData


class Taskset:
    bounded = True

    @staticmethod
    def task_type() -> type[SumTask]:
        return SumTask

    def __iter__(self) -> Any:
        for at in range(3):
            yield SumTask(SumData(idx=at, id=None, name=None, prompt=f"What is {at} + 1?", answer=str(at + 1)), None)


class Environment:
    def __init__(self, config: Any) -> None:
        self.config, self.taskset = config, Taskset()

    @asynccontextmanager
    async def serving(self) -> Any:
        print("a library prints this")
        yield

    def slots(self, task: SumTask) -> list[SumTask]:
        return [task]

    async def run_slot(self, slot: SumTask, context: Any, gate: Any) -> Any:
        if slot.data.prompt == "die":
            print("out of everything", file=sys.stderr)
            os._exit(3)
        if slot.data.prompt == "hang":
            hang()
        said = await asyncio.to_thread(asked, context, slot.data.prompt)
        if said == "raise":
            error = Space(type="TaskError", message="task SumTask scoring: RuntimeError: scoring broke")
            return Space(errors=[], traces=[Space(errors=[error])])
        value = None if said == "unjudged" else float(slot.data.answer in said)
        rewards = {"right": None if value is None else Space(value=value), "style": Space(value=0.25)}
        trace = Space(
            errors=[], rewards=rewards, metrics={"length": float(len(said))}, stop_condition="agent_completed"
        )
        return Space(errors=[], traces=[trace] * (2 if said == "both" else 1))


def hang() -> None:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    time.sleep(1000)


def asked(context: Any, prompt: str) -> str:
    body = {"model": context.model, "messages": [{"role": "user", "content": prompt}]}
    headers = {"authorization": f"Bearer {os.environ[context.client.api_key_var]}", "content-type": "application/json"}
    request = urllib.request.Request(f"{context.client.base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.loads(answer.read())["choices"][0]["message"]["content"])


def resolve_env_config(data: dict[str, Any]) -> Any:
    if data["taskset"]["id"] != "sums":
        raise ModuleNotFoundError(f"taskset {data['taskset']['id']!r} not found")
    assert data["agent"]["harness"]["id"] == "null" and data["agent"]["runtime"]["type"] == "subprocess"
    return Space(taskset=Space(task=None, **data["taskset"]))


def load_taskset(config: Any) -> Taskset:
    return Taskset()


load_environment = Environment
for name in ("clients", "configs", "configs.client", "types", "utils", "utils.loaders"):
    sys.modules[f"{__name__}.{name}"] = sys.modules[__name__]
