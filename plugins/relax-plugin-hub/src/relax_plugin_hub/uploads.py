# SPDX-License-Identifier: Apache-2.0
"""The uploads of a run's exports to the Hugging Face Hub, while the run trains (`hub.push_to`).

Each upload is a child process of low priority, which ends with the run's process:
`python -m relax_plugin_hub.uploads FOLDER REPOSITORY MESSAGE`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import threading
from asyncio.subprocess import DEVNULL, PIPE, create_subprocess_exec
from collections.abc import Awaitable, Callable
from pathlib import Path

from relax_core.api.errors import InfrastructureError, RelaxError
from relax_core.api.events import ExportSaved, RunOpened, WorkAtEnd
from relax_plugin_hub.hub import push
from relax_plugin_hub.table import HubTable

FIELD = "hub.push_to"
LOG = logging.getLogger(__name__)
NICENESS = 5
END_S = 10.0
"""Seconds in which a stopped upload ends."""
Send = Callable[[Path, str, str], Awaitable[str]]
"""Uploads a folder to a repository with a message, and returns its address there. Raises RelaxError or OSError."""


async def send_in_child(folder: Path, repository: str, message: str) -> str:
    """Upload a folder in a child process, which is killed if this call is cancelled."""
    command = ("relax_plugin_hub.uploads", f"{folder}", repository, message)
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


class UploadQueue:
    """The uploads of one run, one at a time; every method belongs to one event loop.

    An export: `waiting -> sent | not sent | replaced by a newer export`.

    Invariants:
    - `give` never waits. An upload that fails, or takes longer than `hub.timeout_s`, is logged as a warning, and the
      next export is sent all the same.
    - A regular export is uploaded from hard links to its files, because the run may delete the export meanwhile.
    """

    def __init__(self, table: HubTable, run: str, send: Send = send_in_child) -> None:
        self._table, self._run, self._send = table, run, send
        self._waiting: ExportSaved | None = None
        self._ending = False
        self._changed = asyncio.Event()

    def give(self, export: ExportSaved) -> None:
        """Upload an export in place of the export that waits."""
        if self._waiting is not None:
            self._log(logging.INFO, self._waiting.step, "was not sent, because a newer export exists")
        self._waiting = export
        self._changed.set()

    def end(self) -> None:
        """Let `serve` return when no export waits or is uploaded, which takes at most the time of two uploads."""
        self._ending = True
        self._changed.set()

    async def serve(self) -> None:
        """Upload the exports until `end`, or until this call is cancelled."""
        while not self._ending:
            await self._changed.wait()
            self._changed.clear()
            while self._waiting is not None:
                export, self._waiting = self._waiting, None
                await self._upload(export)

    async def _upload(self, export: ExportSaved) -> None:
        limit, folder = self._table.timeout_s, Path(export.path)
        sent = folder if export.final else folder.with_name(f".{folder.name}.push")
        try:
            async with asyncio.timeout(limit):
                if sent is not folder:
                    await asyncio.to_thread(_link, folder, sent)
                address = await self._send(sent, self._table.push_to, f"Step {export.step} of {self._run}")
            self._log(logging.INFO, export.step, f"was sent to {address}")
        except TimeoutError:
            self._log(logging.WARNING, export.step, f"was not sent within hub.timeout_s ({limit:g} s)")
        except (RelaxError, OSError) as error:
            self._log(logging.WARNING, export.step, f"was not sent: {error}".replace(f"{sent}", f"{folder}"))
        except asyncio.CancelledError:
            command = f"`hf upload {self._table.push_to} {folder}`"
            self._log(logging.WARNING, export.step, f"was not sent, because the run ended: {command}")
            raise
        finally:
            if sent is not folder:
                shutil.rmtree(sent, ignore_errors=True)

    def _log(self, level: int, step: int, text: str) -> None:
        LOG.log(level, f"{FIELD}: the model of step {step} {text}")


class Uploads:
    """The thread of a run's uploads; the observer's thread makes all calls.

    Life cycle: `open -> finishing -> closed`, or `open -> closed` for a run that does not finish.
    """

    def __init__(self, table: HubTable, run: str, send: Send = send_in_child) -> None:
        self.work = WorkAtEnd("the upload of the final model", 2 * table.timeout_s + END_S)
        self._final: ExportSaved | None = None
        self._queue, self._loop = UploadQueue(table, run, send), asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._queue.serve())
        self._thread = threading.Thread(target=self._serve, name="relax-hub-uploads", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, event: RunOpened) -> Uploads:
        """Return the uploads of the run that was opened."""
        return cls(event.table("hub", HubTable), Path(event.run_dir).name)

    def saved(self, export: ExportSaved) -> None:
        """Upload a regular export, or keep the final model of a stage for the run's end."""
        if export.final:
            self._final = export
        else:
            self._loop.call_soon_threadsafe(self._queue.give, export)

    def finish(self, with_final: bool) -> None:
        """Upload the final model if `with_final`, and set `work.done` when no upload is left."""
        if with_final and self._final is not None:
            self._loop.call_soon_threadsafe(self._queue.give, self._final)
        self._loop.call_soon_threadsafe(self._queue.end)

    def close(self) -> None:
        """Stop the upload in progress, and end the thread."""
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(END_S)

    def _serve(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)
        self.work.done.set()


def _link(folder: Path, copy: Path) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy, copy_function=os.link)


def _end_with_parent() -> None:
    """Kill this process and its children when the parent closes standard input."""
    while os.read(0, 4096):  # not sys.stdin, whose lock would abort the interpreter at exit
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    """Upload the folder that the command line names; print the address, or the error, as JSON."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # the parent obeys them
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # a kernel without scheduling groups
        Path("/proc/self/autogroup").write_text(f"{NICENESS}")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    print(json.dumps(answer(*sys.argv[1:])))


def answer(folder: str, repository: str, message: str) -> dict[str, str]:
    """Upload a folder; return the address of the model, or the error."""
    try:
        return {"address": push(Path(folder), repository, False, message, FIELD)}
    except RelaxError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    main()
