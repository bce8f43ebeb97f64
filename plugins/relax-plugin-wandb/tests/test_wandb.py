# SPDX-License-Identifier: Apache-2.0
"""What lies in the files of an offline run, read with the messages of wandb."""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from relax_plugin_wandb.sink import WandbOptions, WeightsAndBiases

from relax_core.api import ConfigError
from relax_core.testing.sink import CONFIG, MEDIA, SAMPLES, SinkSuite, metrics, with_media

OFFLINE = {"mode": "offline"}
BLOCK, HEADER = 32768, 7


def records(folder: Path) -> Iterator[Any]:
    """Yield the records of all starts. A file is a log of LevelDB: blocks with parts of records, and 7 bytes before all."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        data, at, record = path.read_bytes(), 7, b""
        while at + HEADER <= len(data):
            if BLOCK - at % BLOCK < HEADER:  # too little is left of the block
                at += BLOCK - at % BLOCK
                continue
            _, size, part = struct.unpack("<IHB", data[at : at + HEADER])
            record += data[at + HEADER : at + HEADER + size]
            at += HEADER + size
            if part in (1, 4):  # a whole record, or the last part of one
                yield Record.FromString(record)
                record = b""


def logged(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of all calls of `log`, in order."""
    rows = []
    for record in records(folder):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


class TestWandb(SinkSuite):
    component = "wandb"
    options = OFFLINE
    deadline_s = 120.0

    @classmethod
    def read_back(cls, run_dir: Path) -> Mapping[str, Mapping[int, float]]:
        found: dict[str, dict[int, float]] = {}
        for row in logged(run_dir):
            for key, value in row.items():
                if isinstance(value, float | int) and not key.startswith("_"):
                    found.setdefault(key, {})[int(row["step"])] = value
        return found


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was resumed once."""
    folder = tmp_path_factory.mktemp("run")
    sample = with_media(folder)
    for steps in ((1, 2), (3,)):
        sink = WeightsAndBiases(WandbOptions(mode="offline", project="maths", tags=("tiny",)))
        sink.open(str(folder), "my-run", CONFIG)
        for step in steps:
            sink.samples(step, SAMPLES)
            sink.metrics(step, metrics(step))
        if 3 in steps:
            sink.samples(4, [sample])
        sink.close()
    return folder


def test_both_starts_are_one_run_with_its_configuration(resumed):
    runs = [record.run for record in records(resumed) if record.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.display_name, run.project, tuple(run.tags)) for run in runs} == {
        ((resumed / "wandb" / "run-id").read_text(), "my-run", "maths", ("tiny",))
    }
    assert len(list((resumed / "wandb").glob("offline-run-*"))) == 2
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["steps"] == 4 and config["model"] == {"path": "models/tiny"}


def test_a_late_evaluation_is_kept_under_its_step(tmp_path):
    sink = WeightsAndBiases(WandbOptions(mode="offline"))
    sink.open(str(tmp_path), "run", CONFIG)
    sink.metrics(2, metrics(2))
    sink.metrics(1, {"eval/a/mean": 0.5})
    sink.close()
    assert [(row["step"], row.get("eval/a/mean")) for row in logged(tmp_path)] == [(2, None), (1, 0.5)]
    defined = [record.metric for record in records(tmp_path) if record.WhichOneof("record_type") == "metric"]
    assert ("*", "step") in {(metric.glob_name, metric.step_metric) for metric in defined}


def test_transcripts_are_tables(resumed):
    tables = [row["transcripts/path"] for row in logged(resumed) if row.get("transcripts/_type") == "table-file"]
    assert len(tables) == 4
    (path, *_) = resumed.glob(f"wandb/offline-run-*/files/{tables[0]}")
    table = json.loads(path.read_text())
    assert table["columns"] == ["task", "prompt", "response", "reward", "outcome"]
    assert table["data"] == [
        ["t-1", "user: What is <b>2 + 2</b>?", "4\n", 1.0, "finished"],
        ["t-2", "user: [image] π?\n\nassistant: 3\n\nuser: more", "3.1", 0.5, "finished"],
        ["t-3", "", None, None, "reward_timeout"],
    ]


def test_media_of_transcripts_are_files_with_captions(resumed):
    (row,) = [row for row in logged(resumed) if row["step"] == 4]
    kinds = {"media/image-1": "image-file", "media/audio-2": "audio-file", "media/video-3": "video-file"}
    assert {key: row[f"{key}/_type"] for key in kinds} == kinds
    for key, (name, data) in zip(kinds, MEDIA.items(), strict=True):
        files = [*resumed.glob(f"wandb/offline-run-*/files/{row[f'{key}/path']}")]
        assert files and {file.read_bytes() for file in files} == {data}, name
        assert row[f"{key}/caption"] == "t-4"
    shown = [row["step"] for row in logged(resumed) if row.get("media/image-1/_type")]
    assert shown == [1, 2, 3, 4]


def test_online_without_a_key_is_refused_with_the_fix(tmp_path, monkeypatch):
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    online = WeightsAndBiases()
    with pytest.raises(
        ConfigError, match=r"sinks\.wandb: got no API key for https://api\.wandb\.ai; run `wandb login`"
    ):
        online.check()
    WeightsAndBiases(WandbOptions(mode="offline")).check()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    online.check()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
    with pytest.raises(ConfigError, match="wandb.example"):
        online.check()
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    online.check()
