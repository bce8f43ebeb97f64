# SPDX-License-Identifier: Apache-2.0
"""Scores written responses with one reward, in the same killable process that training would use."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from relax_core.api.clock import SystemClock
from relax_core.api.errors import ConfigError
from relax_core.api.task import Message, Task
from relax_core.api.trainer import Chosen
from relax_core.api.trajectory import Trajectory
from relax_core.options.layers import plugin_files
from relax_core.options.override import parse
from relax_core.plugins.catalogue import Catalogue
from relax_core.rollout.judge import Judge, RewardChoice
from relax_core.rollout.sample_record import sample_record
from relax_core.runners.local.workers import LocalWorkers


async def reward_trial(name: str, options: Sequence[str], data: Path, plugins: Sequence[str]) -> list[dict[str, Any]]:
    """One record a row of `data`: JSON lines with `prompt`, `response` and what the reward reads."""
    plugins = plugins or _plugins_beside(data)
    chosen = Chosen("reward", name, {".".join(o.path): o.value for o in map(parse, options)})
    Catalogue.load(plugins).build(chosen)
    workers = LocalWorkers(plugins)
    judge = Judge([RewardChoice(chosen)], workers, SystemClock())
    rows = list(_rows(data))
    try:
        await judge.start()
        judged = await judge.judge([(task, (trajectory,)) for task, trajectory in rows])
    finally:
        await judge.stop()
        await workers.close()
    return [sample_record(task, trajectory, one[0]) for (task, trajectory), one in zip(rows, judged, strict=True)]


def _plugins_beside(data: Path) -> Sequence[str]:
    """A failing sample lies in a run's folder, whose configuration names the plugin files that the reward may be in."""
    config = data.parent / "config.toml"
    return plugin_files([config]) if config.is_file() else ()


def _rows(data: Path) -> Iterator[tuple[Task, Trajectory]]:
    try:
        text = data.read_text()
    except OSError as error:
        raise ConfigError("--data", data, f"it can't be read ({error.strerror}); name a JSON lines file") from error
    lines = [text] if data.suffix == ".json" else text.splitlines()
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _row(line, f"{data}:{number}")


def _row(line: str, where: str) -> tuple[Task, Trajectory]:
    try:
        row = json.loads(line)
        row = {**row, **row.pop("task")} if isinstance(row.get("task"), dict) else row
        prompt, response = row.pop("prompt"), row.pop("response")
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError("--data", where, f"each row is a JSON object with prompt and response ({error})") from error
    asked = (
        (Message("user", prompt),)
        if isinstance(prompt, str)
        else tuple(Message(m["role"], m["content"]) for m in prompt)
    )
    task = Task(str(row.pop("id", where)), prompt if isinstance(prompt, str) else asked, row.pop("answer", None), row)
    return task, Trajectory((*asked, Message("assistant", response)), response, ())
