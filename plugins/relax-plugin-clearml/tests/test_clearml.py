# SPDX-License-Identifier: Apache-2.0
"""What lies in the offline sessions, in the files that `Task.import_offline_session` reads."""

import json
import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from relax_plugin_clearml.sink import ClearML, ClearMLOptions

from relax_core.testing.sink import CONFIG, MEDIA, SAMPLES, SinkSuite, metrics, with_media


def read(session: Path, name: str) -> str:
    with zipfile.ZipFile(session) as archive:
        return archive.read(name).decode() if name in archive.namelist() else ""


def events(run_dir: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a kind of all sessions, in order."""
    for session in sorted((run_dir / "clearml").glob("session-*.zip")):
        for line in read(session, "metrics.jsonl").splitlines():
            yield from (event for event in json.loads(line) if event["type"] == kind)


class TestClearML(SinkSuite):
    component = "clearml"
    deadline_s = 120.0

    @classmethod
    def read_back(cls, run_dir: Path) -> Mapping[str, Mapping[int, float]]:
        found: dict[str, dict[int, float]] = {}
        for event in events(run_dir, "training_stats_scalar"):
            found.setdefault(f"{event['metric']}/{event['variant']}", {})[event["iter"]] = event["value"]
        return found


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was resumed once."""
    folder = tmp_path_factory.mktemp("run")
    for steps in ((1, 2), (3,)):
        sink = ClearML(ClearMLOptions(project="maths", tags=("tiny",)))
        sink.open(str(folder), "my-run", CONFIG)
        for step in steps:
            sink.samples(step, SAMPLES)
            sink.metrics(step, metrics(step))
        sink.close()
    return folder


def test_each_start_is_one_session_with_its_configuration_and_no_code(resumed):
    assert sorted(path.name for path in (resumed / "clearml").iterdir()) == ["session-1.zip", "session-2.zip"]
    for number in (1, 2):
        task = json.loads(read(resumed / "clearml" / f"session-{number}.zip", "task.json"))
        assert (task["name"], task["project_name"], task["tags"]) == ("my-run", "maths", ["tiny"])
        assert "models/tiny" in task["configuration"]["relax"]["value"]
        assert not (task.get("script") or {}).get("diff")


def test_transcripts_are_tables(resumed):
    tables = [(event["iter"], json.loads(event["plot_str"])["data"][0]) for event in events(resumed, "plot")]
    assert [step for step, _ in tables] == [1, 2, 3]
    head, cells = tables[0][1]["header"]["values"], tables[0][1]["cells"]["values"]
    assert "reward" in head and len(cells) == len(head)
    assert any("2 + 2" in str(cell) for cell in cells[head.index("prompt")])


def test_media_of_transcripts_are_files_of_the_session(tmp_path):
    sink = ClearML()
    sink.open(str(tmp_path), "run", CONFIG)
    sink.samples(4, [with_media(tmp_path)])
    sink.close()
    shown = [event for event in events(tmp_path, "training_debug_image") if event["metric"] == "media"]
    with zipfile.ZipFile(tmp_path / "clearml" / "session-1.zip") as archive:
        files = {archive.read(name) for name in archive.namelist()}
    assert {(event["variant"], event["iter"]) for event in shown} == {("image-1", 4), ("audio-2", 4), ("video-3", 4)}
    assert set(MEDIA.values()) <= files


def test_numbers_that_are_not_finite_are_left_out_and_nothing_is_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CLEARML_CACHE_DIR", "before")
    sink = ClearML()
    sink.open(str(tmp_path), "run", CONFIG)
    sink.metrics(1, {"mine/nan": math.nan, "mine/inf": math.inf, "mine/zero": 0.0, "plain": 1.0})
    sink.close()
    assert {name: dict(values) for name, values in TestClearML.read_back(tmp_path).items()} == {
        "mine/zero": {1: 0.0}, "plain/plain": {1: 1.0},
    }  # fmt: skip
    assert capsys.readouterr().out == "" and os.environ["CLEARML_CACHE_DIR"] == "before"
