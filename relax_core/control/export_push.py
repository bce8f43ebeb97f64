# SPDX-License-Identifier: Apache-2.0
"""The uploads of a run's exports to the Hugging Face Hub, while the run trains (`export.push_to`).

Each upload is a child process of low priority, which ends with the controller:
`python -m relax_core.control.export_push FOLDER REPOSITORY MESSAGE`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, create_subprocess_exec
from collections.abc import Awaitable, Callable
from pathlib import Path

from relax_core.api.errors import InfrastructureError, RelaxError
from relax_core.api.events import Event, Logged
from relax_core.config.tables import ExportTable
from relax_core.control.hub import push
from relax_core.control.sink_process import lower_priority
from relax_core.observe.event_log import CONTROLLER
from relax_core.roles.exports import OURS

FIELD = "export.push_to"
Send = Callable[[Path, str, str], Awaitable[str]]
"""Uploads a folder to a repository with a message, and returns its address there. Raises RelaxError or OSError."""


async def send_in_child(folder: Path, repository: str, message: str) -> str:
    """Upload a folder in a child process, which is killed if this call is cancelled."""
    command = (
        "relax_core.runners.local.parent_death",
        "relax_core.control.export_push",
        f"{folder}",
        repository,
        message,
    )
    child = await create_subprocess_exec(
        sys.executable, "-m", *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True
    )
    assert child.stdout is not None
    try:
        *_, said = (await child.stdout.read()).splitlines() or [b""]
        code = await child.wait()
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
    try:
        answer = json.loads(said)
    except ValueError:
        raise InfrastructureError(f"the process of the upload ended with exit code {code}") from None
    if "error" in answer:
        raise InfrastructureError(answer["error"])
    return str(answer["address"])


class ExportPusher:
    """The uploads of one run, one at a time.

    An export: `waiting -> sent | not sent | replaced by a newer export`.

    Invariants:
    - `give` never waits. An upload that fails, or takes longer than `export.push_timeout_s`, is recorded as a warning,
      and the next export is sent all the same.
    - A regular export is uploaded from hard links to its files, because the run may delete it meanwhile.
    """

    def __init__(
        self, table: ExportTable, run: str, record: Callable[[Event], None], send: Send = send_in_child
    ) -> None:
        self._table, self._run, self._record, self._send = table, run, record, send
        self._waiting: tuple[int, Path] | None = None
        self._given, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()

    def give(self, step: int, folder: Path) -> None:
        """Upload the export of a step in place of one that still waits."""
        if self._waiting is not None:
            self._log("info", self._waiting[0], "was not sent, because a newer export is there")
        self._waiting = step, folder
        self._idle.clear()
        self._given.set()

    async def idle(self) -> None:
        """Wait until no export waits or is uploaded, which takes at most two uploads' time."""
        await self._idle.wait()

    async def serve(self) -> None:
        """Upload the exports until this call is cancelled."""
        while True:
            await self._given.wait()
            self._given.clear()
            while self._waiting is not None:
                (step, folder), self._waiting = self._waiting, None
                await self._upload(step, folder)
            self._idle.set()

    async def _upload(self, step: int, folder: Path) -> None:
        limit, linked = self._table.push_timeout_s, folder
        try:
            async with asyncio.timeout(limit):
                if OURS.fullmatch(folder.name):
                    linked = folder.with_name(f".{folder.name}.push")
                    await asyncio.to_thread(_link, folder, linked)
                address = await self._send(linked, self._table.push_to, f"Step {step} of {self._run}")
            self._log("info", step, f"was sent to {address}")
        except TimeoutError:
            self._log("warning", step, f"was not sent within export.push_timeout_s ({limit:g} s)")
        except (RelaxError, OSError) as error:
            self._log("warning", step, f"was not sent: {error}".replace(f"{linked}", f"{folder}"))
        except asyncio.CancelledError:
            self._log(
                "warning", step, f"was not sent, because the run ended: `hf upload {self._table.push_to} {folder}`"
            )
            raise
        finally:
            if linked is not folder:
                shutil.rmtree(linked, ignore_errors=True)

    def _log(self, level: str, step: int, what: str) -> None:
        self._record(Logged(level, CONTROLLER, f"{FIELD}: the model of step {step} {what}", {"step": step}))


def _link(folder: Path, copy: Path) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy, copy_function=os.link)


def main() -> None:
    """Upload the folder that the command line names; print the address, or the error, as JSON."""
    lower_priority()
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    folder, repository, message = sys.argv[1:]
    try:
        answer = {"address": push(Path(folder), repository, False, message, FIELD)}
    except RelaxError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
