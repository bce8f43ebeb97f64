# SPDX-License-Identifier: Apache-2.0
"""`hub.push_to`: each export of a run is sent to the Hub, and a Hub that fails or is slow costs the run nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from relax_plugin_hub import plugin, uploads
from relax_plugin_hub.hub import _said
from relax_plugin_hub.table import HubTable
from relax_plugin_hub.uploads import UploadQueue, Uploads, answer, send_in_child

from relax_core.api.errors import InfrastructureError
from relax_core.api.events import ExportSaved, RunFinished, RunOpened
from tests.unit.roles.virtual_time import run_virtual

from .test_hub import Hub, hub  # noqa: F401 fixture

TABLE = HubTable(push_to="ada/maths", timeout_s=60.0)
Lines = Callable[[], list[tuple[str, str]]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """Return the level and the end of each line that the uploads logged."""
    caplog.set_level(logging.INFO)

    def said() -> list[tuple[str, str]]:
        start = "hub.push_to: the model of "
        return [
            (one.levelname, one.getMessage().removeprefix(start))
            for one in caplog.records
            if one.name == uploads.__name__
        ]

    return said


def exported(root: Path, step: int, final: bool = False) -> ExportSaved:
    folder = root / ("export" if final else f"step-{step:06d}")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(f"{step}")
    return ExportSaved(step, str(folder), final)


class ScriptedHub:
    """Each upload takes its seconds, then reads the folder; `fails` are the numbers of the uploads that fail."""

    def __init__(self, *seconds: float, fails: tuple[int, ...] = ()) -> None:
        self._seconds, self._fails, self.number = iter(seconds), fails, 0
        self.received: list[tuple[str, str]] = []

    async def __call__(self, folder: Path, repository: str, message: str) -> str:
        self.number += 1
        number = self.number
        await asyncio.sleep(next(self._seconds))
        if number in self._fails:
            raise InfrastructureError(f"the Hub failed; the model is in {folder}")
        self.received.append((message, (folder / "config.json").read_text()))
        return f"https://hub/{repository}"


def pushed(hub: ScriptedHub, scene: Callable[[UploadQueue], Awaitable[bool]]) -> None:  # noqa: F811
    """Upload in virtual time; a scene returns False if its end stops the uploads."""

    async def played() -> None:
        queue = UploadQueue(TABLE, "run", hub)
        serving = asyncio.create_task(queue.serve())
        if await scene(queue):
            queue.end()
        else:
            serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving

    run_virtual(played(), 1e4)


def test_the_newest_export_is_sent_next_also_after_a_failure_and_a_slow_hub(tmp_path: Path, lines: Lines) -> None:
    hub = ScriptedHub(10.0, 100.0, 1.0, fails=(1,))  # noqa: F811

    async def scene(queue: UploadQueue) -> bool:
        for step in (2, 4, 6):
            queue.give(exported(tmp_path, step))
            await asyncio.sleep(4.0)  # the first upload ends after the third export
        await asyncio.sleep(100.0)
        queue.give(exported(tmp_path, 10))
        return True

    pushed(hub, scene)
    failed, replaced, late, last = sorted(lines(), key=lambda line: int(line[1].split()[1]))
    assert failed == ("WARNING", f"step 2 was not sent: the Hub failed; the model is in {tmp_path}/step-000002")
    assert replaced == ("INFO", "step 4 was not sent, because a newer export exists")
    assert late == ("WARNING", "step 6 was not sent within hub.timeout_s (60 s)")
    assert last == ("INFO", "step 10 was sent to https://hub/ada/maths")
    assert hub.received == [("Step 10 of run", "10")]


def test_an_export_that_the_run_deletes_meanwhile_is_sent_whole(tmp_path: Path, lines: Lines) -> None:
    hub, export = ScriptedHub(10.0), exported(tmp_path, 2)  # noqa: F811

    async def scene(queue: UploadQueue) -> bool:
        queue.give(export)
        while not hub.number:  # the links exist before the upload begins
            await asyncio.sleep(0.001)
        shutil.rmtree(export.path)
        return True

    pushed(hub, scene)
    assert lines() == [("INFO", "step 2 was sent to https://hub/ada/maths")]
    assert hub.received == [("Step 2 of run", "2")] and list(tmp_path.iterdir()) == []


def test_the_end_of_the_run_stops_an_upload_and_names_the_command(tmp_path: Path, lines: Lines) -> None:
    export = exported(tmp_path, 2)

    async def scene(queue: UploadQueue) -> bool:
        queue.give(export)
        await asyncio.sleep(1.0)
        return False

    pushed(ScriptedHub(10.0), scene)
    command = f"`hf upload ada/maths {export.path}`"
    assert lines() == [("WARNING", f"step 2 was not sent, because the run ended: {command}")]


@pytest.mark.parametrize("status", ["finished", "stopped"])
def test_a_run_gives_its_exports_and_only_if_it_finished_its_final_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    hub, first = ScriptedHub(0.0, 0.0), threading.Event()  # noqa: F811

    async def send(folder: Path, repository: str, message: str) -> str:
        address = await hub(folder, repository, message)
        first.set()
        return address

    opened = RunOpened("a name", str(tmp_path / "run"), {"hub": TABLE.model_dump()}, str)
    monkeypatch.setattr(Uploads.__init__, "__defaults__", (send,))
    work = plugin.relax_run_opened(opened)
    assert work is not None and (work.what, work.timeout_s) == ("the upload of the final model", 130.0)
    plugin.relax_export_saved(exported(tmp_path, 2))
    assert first.wait(60)
    plugin.relax_export_saved(exported(tmp_path, 7, final=True))
    plugin.relax_run_finished(RunFinished(status, {}))
    assert work.done.wait(60)
    plugin.relax_run_closed()
    final = [("Step 7 of run", "7")] if status == "finished" else []
    assert hub.received == [("Step 2 of run", "2"), *final]


def test_a_run_that_fails_ends_its_upload_at_once(tmp_path: Path, lines: Lines) -> None:
    begun = threading.Event()

    async def send(folder: Path, repository: str, message: str) -> str:
        begun.set()
        await asyncio.sleep(3600)
        return ""

    export, ended = exported(tmp_path, 2), Uploads(TABLE, "run", send)
    ended.saved(export)
    assert begun.wait(60) and not ended.work.done.is_set()
    ended.close()
    assert ended.work.done.is_set()
    assert [text.partition(":")[0] for _, text in lines()] == ["step 2 was not sent, because the run ended"]
    ended.close()


def test_a_run_without_a_model_of_the_hub_uploads_nothing(tmp_path: Path) -> None:
    assert plugin.relax_run_opened(RunOpened("run", str(tmp_path), {"steps": 4}, str)) is None
    plugin.relax_export_saved(exported(tmp_path, 2))
    plugin.relax_run_finished(RunFinished("finished", {}))
    plugin.relax_run_closed()


@pytest.mark.process
def test_the_process_of_an_upload_says_where_the_model_is(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    folder = Path(exported(tmp_path, 2).path)
    for name, value in (
        ("HF_ENDPOINT", hub.url), ("HF_HOME", str(tmp_path)), ("HF_HUB_DISABLE_XET", "1"), ("HF_HUB_OFFLINE", "0"),
        ("TRANSFORMERS_OFFLINE", "0"), ("NO_PROXY", "127.0.0.1"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    assert asyncio.run(send_in_child(folder, "ada/maths", "Step 2 of run")) == f"{hub.url}/ada/maths"
    assert [one["visibility"] for one in hub.created] == ["private"] and len(hub.commits) == 1


def test_an_upload_that_the_hub_refuses_says_why(hub: Hub, tmp_path: Path) -> None:  # noqa: F811
    hub.account = None
    said = answer(exported(tmp_path, 2).path, "ada/absent", "Step 2 of run")["error"]
    assert "the Hugging Face Hub failed: " in said and "404 Not Found" in said and "hf_secret" not in said


def test_a_process_without_an_answer_is_an_error_and_a_signature_is_not_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(InfrastructureError, match="ended with exit code 1"):
        asyncio.run(send_in_child(tmp_path, "ada/maths", "Step 2"))
    assert _said(ValueError("403 for\n https://h/x?X-Signature=abc of x")) == "403 for https://h/x of x"
