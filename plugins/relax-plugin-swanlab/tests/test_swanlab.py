# SPDX-License-Identifier: Apache-2.0
"""What lies in the files of offline runs, read with the reader of `swanlab sync`."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from relax_plugin_swanlab.sink import SwanLab, SwanLabOptions
from swanlab.proto.swanlab.record.v1.record_pb2 import Record
from swanlab.sdk.internal.core_python.store import DataStoreReader

from relax_core.testing.sink import CONFIG, SAMPLES, SinkSuite, metrics, with_media


def starts(folder: Path) -> list[Path]:
    """Return the folders of the starts of a run, in order."""
    return sorted(
        (folder / "swanlab").glob("run-*"), key=lambda start: next(start.glob("*.swanlab")).stat().st_mtime_ns
    )


def records(folder: Path, kind: str) -> Iterator[Any]:
    """Yield the records of a kind of all starts."""
    for start in starts(folder):
        reader = DataStoreReader()
        reader.open(next(start.glob("*.swanlab")))
        for data in reader:
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == kind:
                yield getattr(record, kind)
        reader.close()


class TestSwanLab(SinkSuite):
    component = "swanlab"
    options = {"mode": "offline"}
    deadline_s = 120.0

    @classmethod
    def read_back(cls, run_dir: Path) -> Mapping[str, Mapping[int, float]]:
        found: dict[str, dict[int, float]] = {}
        for scalar in records(run_dir, "scalar"):
            found.setdefault(scalar.key, {})[scalar.step] = scalar.value.number
        return found


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was resumed once."""
    folder = tmp_path_factory.mktemp("run")
    for steps in ((1, 2), (3,)):
        sink = SwanLab(SwanLabOptions(mode="offline", project="maths", group="sweep", tags=("tiny",)))
        sink.open(str(folder), "my-run", CONFIG)
        for step in steps:
            sink.samples(step, SAMPLES)
            sink.metrics(step, metrics(step))
        sink.metrics(1, {f"eval/{steps[0]}/mean": 0.5})
        sink.close()
    return folder


def test_a_rollback_continues_in_another_run(tmp_path: Path):
    sink = SwanLab(SwanLabOptions(mode="offline"))
    sink.open(str(tmp_path), "my-run", CONFIG)
    first = (tmp_path / "swanlab" / "id").read_text()
    sink.metrics(2, metrics(2))
    sink.rewind(1, 2)
    sink.metrics(2, metrics(2, 1.0))
    sink.close()
    second = (tmp_path / "swanlab" / "id").read_text()
    assert [(start.id, start.name) for start in records(tmp_path, "start")] == [
        (first, "my-run"), (second, "my-run after step 1"),
    ]  # fmt: skip
    assert first != second
    assert [one.value.number for one in records(tmp_path, "scalar") if one.key == "reward/mean"] == [0.25, 1.25]


def test_both_starts_are_one_run_with_its_configuration(resumed):
    begun = list(records(resumed, "start"))
    assert [(start.id, start.name, start.project, start.group, list(start.tags)) for start in begun] == [
        ((resumed / "swanlab" / "id").read_text(), "my-run", "maths", "sweep", ["tiny"])
    ] * 2
    config = yaml.safe_load((starts(resumed)[0] / "files" / "config.yaml").read_text())
    assert config["steps"]["value"] == 4 and config["model"]["value"] == {"path": "models/tiny"}


def test_a_late_evaluation_is_kept_under_its_step(resumed):
    late = [(scalar.key, scalar.step) for scalar in records(resumed, "scalar") if scalar.key.startswith("eval/")]
    assert late == [("eval/1/mean", 1), ("eval/3/mean", 1)]


def test_transcripts_are_texts(resumed):
    first, *rest = [media for media in records(resumed, "media") if media.key == "transcripts"]
    assert [first.step, *(media.step for media in rest)] == [1, 2, 3]
    folder = starts(resumed)[0] / "media" / "text"
    assert [(item.caption, (folder / item.filename).read_text()) for item in first.value.items] == [
        ("t-1: reward 1.0 (finished)", "user: What is <b>2 + 2</b>?\n\nassistant: 4\n"),
        (
            "t-2: reward 0.5 (finished)",
            "user: [image] π?\n\nassistant: 3\n\nuser: more\n\nassistant: 3.1",
        ),
        ("t-3: reward None (reward_timeout)", "(empty)"),
    ]


def test_images_of_transcripts_are_pictures_and_other_media_are_left_out(tmp_path):
    sample = with_media(tmp_path)
    Image.new("RGB", (2, 2)).save(tmp_path / "media" / "previews" / "g.image", "GIF")
    sample["prompt"][0]["content"].append({"type": "image", "key": "g"})
    sink = SwanLab(SwanLabOptions(mode="offline"))
    sink.open(str(tmp_path), "run", CONFIG)
    sink.samples(4, [sample])
    sink.close()
    found = {media.key: media for media in records(tmp_path, "media") if media.key.startswith("media/")}
    assert {key: media.step for key, media in found.items()} == {"media/image-1": 4, "media/image-2": 4}
    sizes = []
    for media in found.values():
        (item,) = media.value.items
        (file,) = starts(tmp_path)[0].glob(f"media/*/{item.filename}")
        sizes.append(Image.open(file).size)
        assert item.caption == "t-4"
    assert sizes == [(4, 3), (2, 2)]


def test_numbers_that_are_not_finite_are_kept_and_nothing_is_printed(tmp_path, capsys):
    sink = SwanLab(SwanLabOptions(mode="offline"))
    sink.open(str(tmp_path), "run", CONFIG)
    sink.metrics(1, {"mine/nan": math.nan})
    sink.close()
    (scalar,) = records(tmp_path, "scalar")
    assert math.isnan(scalar.value.number)
    assert capsys.readouterr().out == ""
