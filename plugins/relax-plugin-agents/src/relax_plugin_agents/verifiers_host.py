# SPDX-License-Identifier: Apache-2.0
"""A program for an interpreter that has PrimeIntellect's `verifiers` (0.4), and nothing of Relax: it holds one environment of
it and plays the tasks that it is asked to.

`python verifiers_host.py serve SETTINGS`: the settings are JSON, the table `env` of verifiers. It says `{"ready": true}` or
`{"failed": WHY}`, and then answers lines of JSON on standard input, each with a line when its episode has ended:

    {"run": 7, "task": {...}, "url": "http://127.0.0.1:1/v1", "key": "...", "model": "policy"}   {"cancel": 7}

It ends with its input, and with all that it started. `python verifiers_host.py tasks SETTINGS` writes task files' rows instead.
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
"""Variable whose value all processes that it started have."""
STOPPED_S = 5.0


class Host:
    """An environment and the episodes that are played in it, by number."""

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
        """Hand on what is asked; in a thread, which notices the end of the input also where an episode blocks the loop."""
        for line in sys.stdin:
            loop.call_soon_threadsafe(self._take, json.loads(line))
        loop.call_soon_threadsafe(self._ended.set)
        threading.Event().wait(STOPPED_S)
        end_marked()
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
        os.environ[key] = asked["key"]  # where its clients look for keys; what it starts inherits no name with API_KEY
        try:
            client = EvalClientConfig(base_url=asked["url"], api_key_var=key)
            context = ModelContext(client=client, model=asked["model"], sampling=SamplingConfig())
            (slot,) = environment.slots(task)
            episode = await environment.run_slot(slot, context, None)
        finally:
            del os.environ[key]
        return told(episode)


def told(episode: Any) -> dict[str, Any]:
    """The end of an episode as plain data: errors of it and its traces, and what its only trace is worth."""
    errors = [f"{error.type}: {error.message}" for error in episode.errors]
    errors += [f"{error.type}: {error.message}" for trace in episode.traces for error in trace.errors]
    if not errors and len(episode.traces) != 1:
        errors = [f"{len(episode.traces)} agents have played; an environment of one agent can be trained"]
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
    """Write each task of the taskset as a row: `id`, `prompt` and `verifiers`, its data."""
    from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

    taskset = load_taskset(resolve_env_config(settings).taskset)
    if not taskset.bounded:
        raise ValueError(f"taskset {settings['taskset']['id']} has no end; give it a table with one")
    for at, task in enumerate(taskset):
        data = task.data.model_dump(mode="json")
        row = {
            "id": str(data.get("id") or data.get("name") or at),
            "prompt": data.get("prompt") or "",
            "verifiers": data,
        }
        out.write(json.dumps(row, ensure_ascii=False) + "\n")


def end_marked() -> None:
    """Kill every other process that has this one's mark."""
    wanted = f"{MARK}={os.environ.get(MARK)}".encode()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
            if int(entry) != os.getpid() and MARK in os.environ and wanted in file.read().split(b"\0"):
                os.kill(int(entry), signal.SIGKILL)


def main() -> None:
    what, settings = sys.argv[1], json.loads(sys.argv[2])
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
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
    end_marked()


if __name__ == "__main__":
    main()
