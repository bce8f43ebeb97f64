# SPDX-License-Identifier: Apache-2.0
"""`export.push_to`: each export of a run is sent to the Hub, and a Hub that fails or is slow costs the run nothing."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from relax_core.api.errors import ConfigError, InfrastructureError
from relax_core.api.events import ExportSaved, StepFinished
from relax_core.config.tables import ExportTable
from relax_core.control import export_push, run
from relax_core.control.export_push import ExportPusher, send_in_child
from relax_core.control.hub import _said
from relax_core.control.prepare import Prepared, check_sinks
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc.waiting import attended
from tests.unit.control.conftest import configured
from tests.unit.control.test_conduct import ScriptedRunner, conducted
from tests.unit.control.test_hub import Hub, hub  # noqa: F401 fixture
from tests.unit.roles.virtual_time import run_virtual

TABLE = ExportTable(every=2, push_to="ada/maths", push_timeout_s=60.0)


def exported_folder(root: Path, step: int) -> Path:
    folder = root / f"step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(f"{step}")
    return folder


class ScriptedHub:
    """Each upload takes its seconds, then reads the folder; `fails` are the numbers of the uploads that fail."""

    def __init__(self, *seconds: float, fails: tuple[int, ...] = ()) -> None:
        self._seconds, self._fails, self.number = iter(seconds), fails, 0
        self.got: list[tuple[str, str]] = []

    async def __call__(self, folder: Path, repository: str, message: str) -> str:
        self.number += 1
        number = self.number
        await asyncio.sleep(next(self._seconds))
        if number in self._fails:
            raise InfrastructureError(f"the Hub failed; the model is in {folder}")
        self.got.append((message, (folder / "config.json").read_text()))
        return f"https://hub/{repository}"


def pushed(hub: ScriptedHub, scene: Callable[[ExportPusher], Awaitable[None]]) -> list[tuple[str, str]]:  # noqa: F811
    """Return the level and the end of each line that the uploads of a scene log."""
    lines: list[tuple[str, str]] = []

    def record(event: Any) -> None:
        lines.append((event.level, event.message.removeprefix("export.push_to: the model of ")))

    async def played() -> None:
        pusher = ExportPusher(TABLE, "run", record, hub)
        async with attended(pusher.serve()):
            await scene(pusher)

    run_virtual(played(), 1e4)
    return lines


def test_the_newest_export_is_sent_next_also_after_a_failure_and_a_slow_hub(tmp_path: Path) -> None:
    hub = ScriptedHub(10.0, 100.0, 1.0, fails=(1,))  # noqa: F811

    async def scene(pusher: ExportPusher) -> None:
        for step in (2, 4, 6):
            pusher.give(step, exported_folder(tmp_path, step))
            await asyncio.sleep(4.0)  # the first upload ends after the third export
        await pusher.idle()
        pusher.give(10, exported_folder(tmp_path, 10))
        await pusher.idle()

    failed, replaced, late, last = sorted(pushed(hub, scene), key=lambda line: int(line[1].split()[1]))
    assert failed == ("warning", f"step 2 was not sent: the Hub failed; the model is in {tmp_path}/step-000002")
    assert replaced == ("info", "step 4 was not sent, because a newer export is there")
    assert late == ("warning", "step 6 was not sent within export.push_timeout_s (60 s)")
    assert last == ("info", "step 10 was sent to https://hub/ada/maths")
    assert hub.got == [("Step 10 of run", "10")]


def test_an_export_that_the_run_deletes_meanwhile_is_sent_whole(tmp_path: Path) -> None:
    hub, folder = ScriptedHub(10.0), exported_folder(tmp_path, 2)  # noqa: F811

    async def scene(pusher: ExportPusher) -> None:
        pusher.give(2, folder)
        while not (tmp_path / ".step-000002.push").exists() or not hub.number:
            await asyncio.sleep(0.001)
        (folder / "config.json").unlink()
        folder.rmdir()
        await pusher.idle()

    assert pushed(hub, scene) == [("info", "step 2 was sent to https://hub/ada/maths")]
    assert hub.got == [("Step 2 of run", "2")] and list(tmp_path.iterdir()) == []


def test_the_end_of_the_run_stops_an_upload_and_names_the_command(tmp_path: Path) -> None:
    folder = exported_folder(tmp_path, 2)

    async def scene(pusher: ExportPusher) -> None:
        pusher.give(2, folder)
        await asyncio.sleep(1.0)

    command = f"`hf upload ada/maths {folder}`"
    assert pushed(ScriptedHub(10.0), scene) == [("warning", f"step 2 was not sent, because the run ended: {command}")]


@pytest.mark.parametrize("stop_after_s", [None, 5.0])
def test_a_run_gives_its_exports_and_its_final_model_and_waits_for_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_after_s: float | None
) -> None:
    """A stop of the run ends without the final model."""
    hub = ScriptedHub(0.5, 50.0)  # noqa: F811
    monkeypatch.setattr(run, "ExportPusher", partial(ExportPusher, send=hub))
    folder = tmp_path / "run" / "exports" / "step-000002"

    def before(_: Prepared) -> None:
        exported_folder(folder.parent, 2)
        (tmp_path / "run" / "export").mkdir()
        (tmp_path / "run" / "export" / "config.json").write_text("final")

    async def actor(runner: ScriptedRunner) -> None:
        await runner.run_status.emit(ExportSaved(2, str(folder), final=False))
        await runner.run_status.emit(StepFinished(3, {"reward/mean": 0.5}))
        if stop_after_s is None:
            await asyncio.sleep(3.0)
        else:
            await runner.run_status.commands("actor", 0, 100.0)

    layer: dict[str, Any] = {"export": {"every": 2, "push_to": "ada/maths"}, "steps": 7}
    summary, raised, seconds = conducted(tmp_path, {"actor": actor}, stop_after_s=stop_after_s, before=before, **layer)
    final = [("Step 7 of run", "final")] if stop_after_s is None else []
    assert raised is None and hub.got == [("Step 2 of run", "2"), *final]
    assert summary["status"] == ("stopped" if stop_after_s else "finished") and (seconds > 50.0) == bool(final)


def test_a_run_without_an_account_or_a_user_is_refused_before_it_starts(
    hub: Hub, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    catalogue = Catalogue.load()
    check_sinks(configured(catalogue, export={"push_to": "ada/maths"}), catalogue)
    with pytest.raises(ConfigError, match=r'export\.push_to: .*write "USER/NAME"'):
        check_sinks(configured(catalogue, export={"push_to": "maths"}), catalogue)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ConfigError, match=r"export\.push_to: got no token of the Hugging Face Hub"):
        check_sinks(configured(catalogue, export={"push_to": "ada/maths"}), catalogue)


@pytest.mark.process
def test_the_process_of_an_upload_says_where_the_model_is(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    folder = exported_folder(tmp_path, 2)
    for name, value in (
        ("HF_ENDPOINT", hub.url), ("HF_HOME", str(tmp_path)), ("HF_HUB_DISABLE_XET", "1"), ("HF_HUB_OFFLINE", "0"),
        ("TRANSFORMERS_OFFLINE", "0"), ("NO_PROXY", "127.0.0.1"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    assert asyncio.run(send_in_child(folder, "ada/maths", "Step 2 of run")) == f"{hub.url}/ada/maths"
    assert [one["visibility"] for one in hub.created] == ["private"] and len(hub.commits) == 1


def test_the_process_of_an_upload_says_why_the_hub_took_nothing(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]  # noqa: F811
) -> None:  # fmt: skip
    hub.account = None
    monkeypatch.setattr(export_push, "lower_priority", lambda: None)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setattr(sys, "argv", ["", str(exported_folder(tmp_path, 2)), "ada/absent", "Step 2 of run"])
    export_push.main()
    said = json.loads(capsys.readouterr().out)["error"]
    assert "the Hugging Face Hub failed: " in said and "404 Not Found" in said and "hf_secret" not in said


def test_a_process_without_an_answer_is_an_error_and_a_signature_is_not_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(InfrastructureError, match="ended with exit code 1"):
        asyncio.run(send_in_child(tmp_path, "ada/maths", "Step 2"))
    assert _said(ValueError("403 for\n https://h/x?X-Signature=abc of x")) == "403 for https://h/x of x"
    assert json.loads(TABLE.model_dump_json())["push_to"] == "ada/maths"
