# SPDX-License-Identifier: Apache-2.0
"""Runs of an agent's program outside of a sandbox: its variables, start, end, and output for error texts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_core.api import Task
from relax_core.api.role import PROGRAM_ENV, visible_environment
from relax_core.api.task import Message
from relax_plugin_agents.verifiers_host import MARK, end_marked

QUOTED_BYTES = 2000
"""Number of bytes at the end of a failed program's output that an error quotes."""


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """The address, key and model name with which an agent calls the policy for one sample."""

    url: str
    """Base URL for Anthropic's clients."""
    key: str = field(repr=False)
    name: str
    seed: int

    @property
    def openai_url(self) -> str:
        """Base URL for OpenAI's clients."""
        return f"{self.url}/v1"


async def run_program(
    command: Sequence[str], directory: Path | None, env: Mapping[str, str], task: Task, model: ModelAccess
) -> None:
    """Run a program until it ends or the call is cancelled, then kill all processes that the program started.

    Raises RuntimeError if the program cannot be started or exits with an error.
    """
    mark = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="relax-agent-") as folder:
        described = await asyncio.to_thread(_written, folder, task)
        known = visible_environment(os.environ, PROGRAM_ENV)
        added = {**variables(model, model.url, str(described)), "RELAX_REPORT_URL": f"{model.url}/report", MARK: mark}
        # With a pipe made by asyncio, `wait` would also wait for every process that inherited the pipe.
        heard, speaks = os.pipe()
        try:
            program = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=speaks, stderr=speaks, cwd=directory,
                env={**known, **env, **added},
            )  # fmt: skip
        except OSError as error:
            os.close(heard)
            raise RuntimeError(f"environment.command: {command[0]} can't be started: {error}; correct it") from error
        finally:
            os.close(speaks)
        said = bytearray()
        reading = asyncio.create_task(_keep_end(heard, said))
        try:
            code = await program.wait()
        finally:
            await asyncio.to_thread(end_marked, mark)
            with contextlib.suppress(ProcessLookupError):
                program.kill()
            await program.wait()
            await asyncio.wait([reading], timeout=1.0)
            reading.cancel()
        if code:
            quoted = said.decode(errors="replace").strip()
            raise RuntimeError(f"the agent's program exited with {code}: {quoted or 'no output'}")


def variables(model: ModelAccess, url: str, described: str) -> dict[str, str]:
    """Return the environment variables from which an agent's program reads the policy's address and its task."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": model.key, "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": model.key, "CLAUDE_CODE_ATTRIBUTION_HEADER": "0", "RELAX_MODEL": model.name,
        "RELAX_TASK": described, "RELAX_SEED": str(model.seed),
    }  # fmt: skip


def describe(task: Task) -> dict[str, Any]:
    """Return the task as data for a program: `id`, `prompt` (a string or messages), `answer` and further columns."""
    prompt = task.prompt if isinstance(task.prompt, str) else [_message(message) for message in task.prompt]
    return {**task.metadata, "id": task.id, "prompt": prompt, "answer": task.answer}


def _message(message: Message) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": message.role, "content": message.content}
    parts = [
        {"type": "text", "text": part.text} if part.media is None
        else {"type": part.media.kind, "source": part.media.source}
        for part in message.content
    ]  # fmt: skip
    return {"role": message.role, "content": parts}


def _written(folder: str, task: Task) -> Path:
    """Write the task as JSON; return the path of the file."""
    described = Path(folder, "task.json")
    described.write_text(json.dumps(describe(task), ensure_ascii=False, default=str), encoding="utf-8")
    return described


async def _keep_end(pipe: int, end: bytearray) -> None:
    """Read the program's output to its end, and keep its last `QUOTED_BYTES` in `end`."""
    output = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(output), os.fdopen(pipe, "rb", buffering=0)
    )
    try:
        while chunk := await output.read(1 << 16):
            end += chunk
            del end[:-QUOTED_BYTES]
    finally:
        transport.close()
