# SPDX-License-Identifier: Apache-2.0
"""Runs of an agent's program in a box of the run's sandbox, and of a judge in the same box after the agent has ended.

The agent can reach only the policy, through the box's socket. The judge starts after all agent processes have ended.
Its files are written then, to a folder with a random name, and its verdict must contain a random key. So files that the
agent left cannot forge a verdict.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_core.api import Box, ProgramEnd, ProgramResult, Task
from relax_plugin_agents.forward import GATEWAY
from relax_plugin_agents.program import QUOTED_BYTES, ModelAccess, describe, variables

AGENT_S = 7 * 86400.0
"""Time limit of an agent's program in seconds; in practice the environment's deadline ends the program earlier."""
FORWARD = Path(__file__).with_name("forward.py")
TASK = ".relax/task.json"
FILES, JUDGE_FILES = "files", "judge_files"
"""Columns of a task that map paths of files to their text."""
ENTER = 'export RELAX_WORK="$PWD"; cd -- "$0" || exit; export HOME="$PWD" TMPDIR="$PWD" RELAX_TASK="$PWD/task.json"; exec "$@"'
"""Shell script that starts the judge in its own folder, away from modules and settings that an agent left."""


def read_copies(copies: Mapping[str, Path], option: str) -> dict[str, bytes]:
    """Read the files to copy into boxes; return their bytes by path in the box. Raises FileNotFoundError."""
    found: dict[str, bytes] = {}
    for name, path in copies.items():
        if path.is_dir():
            files = (file for file in sorted(path.rglob("*")) if file.is_file())
            found |= {f"{name}/{file.relative_to(path).as_posix()}": file.read_bytes() for file in files}
        elif path.is_file():
            found[name] = path.read_bytes()
        else:
            raise FileNotFoundError(f"environment.{option}: got {str(path)!r}, which does not exist; correct the path")
    return found


async def run_agent(
    box: Box, command: Sequence[str], files: Mapping[str, bytes], env: Mapping[str, str], task: Task,
    model: ModelAccess, trusted: bool,
) -> ProgramResult:  # fmt: skip
    """Run an agent's program in a box until it ends.

    Only a `trusted` program gets the task's answer, because every program that it starts can read the task's file.
    """
    await _write(box, "", {**files, **_column(task, FILES), TASK: _described(task, answer=trusted)})
    words = [box.python, "-I", "-S", "-c", FORWARD.read_text(encoding="utf-8"), *_program(box, command)]
    return await box.run(words, env={**env, **variables(model, GATEWAY, TASK)}, socket=True)


async def run_judge(
    box: Box, command: Sequence[str], files: Mapping[str, bytes], wall_s: float, bounds: tuple[float, float],
    task: Task, ended: ProgramResult,
) -> float:  # fmt: skip
    """Run the judge in a box after the agent; return the judge's reward. Raises RuntimeError if it gives none."""
    folder, key = f".judge-{secrets.token_hex(16)}", secrets.token_hex(16)
    await _write(box, folder + "/", {**files, **_column(task, JUDGE_FILES), "task.json": _described(task, answer=True)})
    words = ["/bin/sh", "-c", ENTER, folder, *_program(box, command)]
    result = await box.run(words, f"{key}\n".encode(), {"RELAX_AGENT_END": ended.end.value}, wall_s)
    if result.end is not ProgramEnd.OK:
        raise RuntimeError(f"the judge program gave no verdict: it {describe_end(result)}")
    return _verdict(result.stdout, key, bounds)


def describe_end(result: ProgramResult) -> str:
    """Describe in words how a program ended, and quote the end of its output."""
    said = (result.stderr or result.stdout)[-QUOTED_BYTES:].decode(errors="replace").strip()
    how = f"exited with {result.code}" if result.end is ProgramEnd.EXIT else f"was ended by its limit ({result.end})"
    if result.end is ProgramEnd.SIGNAL:
        how = f"was ended by signal {-result.code}"
    return f"{how}: {said or 'no output'}"


def _verdict(output: bytes, key: str, bounds: tuple[float, float]) -> float:
    last = output.strip().rpartition(b"\n")[2]
    fix = 'print {"reward": NUMBER, "key": "the first line of standard input"} as the last line'
    try:
        said: Any = json.loads(last)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or said.get("key") != key:
        raise RuntimeError(f"the judge gave no verdict: its last line is {last[-200:]!r}; {fix}")
    reward, (low, high) = said.get("reward"), bounds
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not low <= reward <= high:
        raise RuntimeError(f"the judge's reward is {reward!r}; environment.judge_range allows {low:g} to {high:g}")
    return float(reward)


def _column(task: Task, name: str) -> dict[str, bytes]:
    files = task.column(name) or {}
    if not isinstance(files, Mapping) or not all(isinstance(text, str) for text in files.values()):
        raise TypeError(f"task {task.id}: column {name}: got {files!r:.200}; write an object that maps paths to text")
    return {str(path): text.encode(errors="surrogatepass") for path, text in files.items()}


async def _write(box: Box, folder: str, files: Mapping[str, bytes]) -> None:
    for path, content in files.items():
        await box.write(folder + path, content)


def _program(box: Box, command: Sequence[str]) -> list[str]:
    """Return the command; the box's own interpreter replaces `python`."""
    return [box.python if command[0] == "python" else command[0], *command[1:]]


def _described(task: Task, answer: bool) -> bytes:
    hidden = {FILES, JUDGE_FILES, *(() if answer else ("answer",))}
    shown = {name: value for name, value in describe(task).items() if name not in hidden}
    return json.dumps(shown, default=str).encode()
