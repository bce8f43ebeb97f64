# SPDX-License-Identifier: Apache-2.0
"""What Trackio's pages read: the storage of its local folder."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_plugin_trackio.sink import Trackio, TrackioOptions
from trackio.sqlite_storage import SQLiteStorage
from trackio.utils import MEDIA_DIR

from relax_core.testing.sink import CONFIG, MEDIA, SAMPLES, SinkSuite, metrics, with_media


def write(folder: Path, *starts: tuple[int, ...], **options: Any) -> str:
    """Write a run; return its name in the project."""
    for steps in starts:
        sink = Trackio(TrackioOptions(**options))
        sink.open(str(folder), "my-run", CONFIG)
        for step in steps:
            sink.samples(step, SAMPLES)
            sink.metrics(step, metrics(step))
        sink.close()
    return (folder / "trackio" / "run-name").read_text()


def logged(run: str, project: str = "relax") -> list[dict[str, Any]]:
    return list(SQLiteStorage.get_logs(project, run))


class TestTrackio(SinkSuite):
    component = "trackio"
    deadline_s = 120.0

    @classmethod
    def read_back(cls, run_dir: Path) -> Mapping[str, Mapping[int, float]]:
        found: dict[str, dict[int, float]] = {}
        for row in logged((run_dir / "trackio" / "run-name").read_text()):
            for key, value in row.items():
                if isinstance(value, float | int) and key != "step":
                    found.setdefault(key, {})[row["step"]] = value
        return found


def test_a_resumed_run_continues_in_its_run_of_the_project(tmp_path):
    run = write(tmp_path, (1, 2), (2, 3), project="maths", group="sweep")
    rewards = [(row["step"], row["reward/mean"]) for row in logged(run, "maths") if "reward/mean" in row]
    assert rewards == [(1, 0.125), (2, 0.25), (2, 0.25), (3, 0.375)]
    assert [record["name"] for record in SQLiteStorage.get_run_records("maths")] == [run]
    config = SQLiteStorage.get_run_config("maths", run)
    assert config is not None
    assert (config["steps"], config["model"], config["_Group"]) == (4, {"path": "models/tiny"}, "sweep")


def test_two_runs_of_one_name_stay_apart(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    runs = [write(folder, (1,), project="two") for folder in folders]
    assert all(run.startswith("my-run-") for run in runs)
    assert {record["name"] for record in SQLiteStorage.get_run_records("two")} == set(runs)


def test_transcripts_are_tables(tmp_path):
    (table,) = [row["transcripts"] for row in logged(write(tmp_path, (1,))) if "transcripts" in row]
    assert table["_type"] == "trackio.table"
    assert [tuple(row.values()) for row in table["_value"]] == [
        ("t-1", "user: What is <b>2 + 2</b>?", "4\n", 1.0, "finished"),
        ("t-2", "user: [image] π?\n\nassistant: 3\n\nuser: more", "3.1", 0.5, "finished"),
        ("t-3", "", None, None, "reward_timeout"),
    ]


def test_media_of_transcripts_are_files_with_captions(tmp_path):
    sink = Trackio()
    sink.open(str(tmp_path), "run", CONFIG)
    sink.samples(4, [with_media(tmp_path)])
    sink.close()
    (row,) = logged((tmp_path / "trackio" / "run-name").read_text())
    keys = ("media/image-1", "media/audio-2", "media/video-3")
    assert [(row[key]["_type"], row[key]["caption"]) for key in keys] == [
        ("trackio.image", "t-4"), ("trackio.audio", "t-4"), ("trackio.video", "t-4"),
    ]  # fmt: skip
    assert [(MEDIA_DIR / row[key]["file_path"]).read_bytes() for key in keys] == list(MEDIA.values())


def test_numbers_that_are_not_finite_are_kept_and_nothing_is_printed(tmp_path, capsys):
    sink = Trackio()
    sink.open(str(tmp_path), "run", CONFIG)
    sink.metrics(1, {"mine/nan": math.nan, "mine/inf": math.inf})
    sink.close()
    (row,) = logged((tmp_path / "trackio" / "run-name").read_text())
    assert math.isnan(row["mine/nan"]) and row["mine/inf"] == math.inf
    assert capsys.readouterr().out == ""
