# SPDX-License-Identifier: Apache-2.0
"""Program that loads one environment of PrimeIntellect's `verifiers` (0.4) and plays tasks in it on request.

It runs in an interpreter without Relax, as `python verifiers_host.py serve SETTINGS`, where SETTINGS is verifiers'
table `env` as JSON. The program first prints `{"ready": true}` or `{"failed": WHY}`. Then it reads requests as lines of
JSON from standard input, and prints one line of JSON for each run when the run's episode has ended. The two requests:

    {"run": 7, "task": {...}, "url": "http://127.0.0.1:1/v1", "key": "...", "model": "policy"}   {"cancel": 7}

When its input closes, the program kills all processes that it started, and ends. `python verifiers_host.py tasks
SETTINGS` only prints the tasks, as rows of a task file.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

MARK = "RELAX_SAMPLE"
"""Environment variable with a random value that all processes of a sample, or of this program, inherit."""
STOPPED_S = 5.0
"""Seconds after the end of standard input until the program kills its processes and exits."""


class Host:
    """An environment and its running episodes, by the number of the request."""

    def __init__(self, environment: Any, out: Any) -> None:
        self._environment, self._out = environment, out
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ended = asyncio.Event()

    async def serve(self) -> None:
        async with self._environment.serving():
            self.say({"ready": True})
            loop = asyncio.get_running_loop()
            threading.Thread(target=self._listen, args=(loop,), daemon=True).start()
            await self._ended.wait()
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    def say(self, answer: dict[str, Any]) -> None:
        self._out.write(json.dumps(answer) + "\n")
        self._out.flush()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Pass requests to the loop. Runs in a thread, to see the input's end even if an episode blocks the loop."""
        for line in sys.stdin:
            loop.call_soon_threadsafe(self._take, json.loads(line))
        loop.call_soon_threadsafe(self._ended.set)
        threading.Event().wait(STOPPED_S)
        end_marked(os.environ[MARK])
        os._exit(0)

    def _take(self, asked: dict[str, Any]) -> None:
        if "cancel" in asked:
            if running := self._running.get(asked["cancel"]):
                running.cancel()
            return
        number = asked["run"]
        self._running[number] = asyncio.ensure_future(self._run(number, asked))
        self._running[number].add_done_callback(lambda _: self._running.pop(number, None))

    async def _run(self, number: int, asked: dict[str, Any]) -> None:
        try:
            self.say({"run": number, **await self._played(number, asked)})
        except Exception as error:
            self.say({"run": number, "errors": [f"{type(error).__name__}: {error}"]})

    async def _played(self, number: int, asked: dict[str, Any]) -> dict[str, Any]:
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig
        from verifiers.v1.types import SamplingConfig

        environment, key = self._environment, f"RELAX_API_KEY_{number}"
        kind = type(environment.taskset).task_type()
        task = kind(kind.data_type().model_validate(asked["task"]), environment.config.taskset.task)
        os.environ[key] = asked["key"]  # verifiers' clients read keys here, and pass no *API_KEY* on to programs
        try:
            client = EvalClientConfig(base_url=asked["url"], api_key_var=key)
            context = ModelContext(client=client, model=asked["model"], sampling=SamplingConfig())
            (slot,) = environment.slots(task)
            episode = await environment.run_slot(slot, context, None)
        finally:
            del os.environ[key]
        return result_of(episode)


def result_of(episode: Any) -> dict[str, Any]:
    """Return the result of an episode as plain data: its errors, or the rewards and metrics of its only trace."""
    errors = [f"{error.type}: {error.message}" for error in episode.errors]
    errors += [f"{error.type}: {error.message}" for trace in episode.traces for error in trace.errors]
    if not errors and len(episode.traces) != 1:
        errors = [f"{len(episode.traces)} agents have played; choose an environment with one agent"]
    if errors:
        return {"errors": errors}
    (trace,) = episode.traces
    return {
        "errors": [],
        "rewards": {name: None if one is None else one.value for name, one in trace.rewards.items()},
        "metrics": dict(trace.metrics),
        "stop": trace.stop_condition,
    }


def write_tasks(settings: dict[str, Any], out: Any) -> None:
    """Write each task of the taskset as a row with `id`, `prompt` and the task's data under `verifiers`."""
    from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

    taskset = load_taskset(resolve_env_config(settings).taskset)
    if not taskset.bounded:
        raise ValueError(f"taskset {settings['taskset']['id']} is endless; bound it in the settings' table taskset")
    for at, task in enumerate(taskset):
        data = task.data.model_dump(mode="json")
        row = {
            "id": str(data.get("id") or data.get("name") or at),
            "prompt": data.get("prompt") or "",
            "verifiers": data,
        }
        out.write(json.dumps(row, ensure_ascii=False) + "\n")


def end_marked(mark: str) -> None:
    """Kill every other process with this mark in its environment, even if the process left its session or parent."""
    wanted, found = f"{MARK}={mark}".encode(), True
    while found:
        found = False
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
                if int(entry) != os.getpid() and wanted in file.read().split(b"\0"):
                    os.kill(int(entry), signal.SIGKILL)
                    found = True


def main() -> None:
    what, settings = sys.argv[1], json.loads(sys.argv[2])
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # send output of libraries to stderr, so that it does not mix with answers
    if what == "tasks":
        write_tasks(settings, out)
        out.flush()
        return

    async def serve() -> None:
        try:
            from verifiers.v1.utils.loaders import load_environment, resolve_env_config

            host = Host(load_environment(resolve_env_config(settings)), out)
        except Exception as error:
            out.write(json.dumps({"failed": f"{type(error).__name__}: {error}"}) + "\n")
            out.flush()
            return
        await host.serve()

    asyncio.run(serve())
    end_marked(os.environ[MARK])


if __name__ == "__main__":
    main()
