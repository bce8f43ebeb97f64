# SPDX-License-Identifier: Apache-2.0
"""What MLflow's client reads back. All runs but one share a database, since MLflow takes seconds to make one."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from relax_plugin_mlflow.sink import Mlflow, MlflowOptions

from relax_core.testing.sink import CONFIG, MEDIA, SAMPLES, SinkSuite, metrics, with_media

VARIABLE = "MLFLOW_TRACKING_URI"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a database in its own directory."""
    folder = tmp_path_factory.mktemp("own")
    write(folder, (1,))
    return folder


@pytest.fixture(scope="module", autouse=True)
def shared(own: Path) -> Iterator[str]:
    """Name the database of that run to all other runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, f"sqlite:///{own}/mlflow/mlflow.db")
        yield os.environ[VARIABLE]


def write(folder: Path, *starts: tuple[int, ...], **options: Any) -> None:
    for steps in starts:
        sink = Mlflow(MlflowOptions(**options))
        sink.open(str(folder), "my-run", {**CONFIG, "rewards": [{"name": "maths"}]})
        for step in steps:
            sink.samples(step, SAMPLES)
            sink.metrics(step, metrics(step))
        sink.close()


def run_of(folder: Path) -> Any:
    return MlflowClient(os.environ[VARIABLE]).get_run((folder / "mlflow" / "run-id").read_text())


def history(folder: Path, key: str) -> list[tuple[int, float]]:
    """Return the steps and values of a metric in the order in which they were logged."""
    points = MlflowClient(os.environ[VARIABLE]).get_metric_history(run_of(folder).info.run_id, key)
    return [(point.step, point.value) for point in sorted(points, key=lambda point: (point.timestamp, point.step))]


class TestMlflow(SinkSuite):
    component = "mlflow"
    deadline_s = 120.0

    @classmethod
    def read_back(cls, run_dir: Path) -> Mapping[str, Mapping[int, float]]:
        return {key: dict(history(run_dir, key)) for key in run_of(run_dir).data.metrics}


def test_a_run_lies_in_its_own_directory_as_default(own):
    run = run_of(own)
    assert (run.info.run_name, run.info.status) == ("my-run", "FINISHED")
    assert run.info.artifact_uri.startswith((own / "mlflow" / "artifacts").as_uri())
    assert run.data.params == {"steps": "4", "model.path": "models/tiny", "rewards.0.name": "maths"}
    assert MlflowClient(os.environ[VARIABLE]).get_experiment(run.info.experiment_id).name == "relax"


def test_a_resumed_run_continues_in_its_run_of_the_experiment(tmp_path):
    write(tmp_path, (1, 2), (2, 3), experiment="maths")
    assert history(tmp_path, "reward/mean") == [(1, 0.125), (2, 0.25), (2, 0.25), (3, 0.375)]
    client = MlflowClient(os.environ[VARIABLE])
    runs = client.search_runs([client.get_experiment_by_name("maths").experiment_id])
    assert [run.info.run_id for run in runs] == [run_of(tmp_path).info.run_id]


def test_a_run_that_another_server_does_not_have_begins_there(tmp_path):
    write(tmp_path, (1,))
    (tmp_path / "mlflow" / "run-id").write_text("0" * 32)
    write(tmp_path, (2,))
    assert history(tmp_path, "reward/mean") == [(2, 0.25)]


def test_each_delivery_of_transcripts_is_a_table(tmp_path):
    sink = Mlflow()
    sink.open(str(tmp_path), "run", CONFIG)
    sink.samples(3, SAMPLES)
    sink.samples(3, SAMPLES[:1])
    sink.close()
    client, run = MlflowClient(os.environ[VARIABLE]), run_of(tmp_path).info.run_id
    paths = [file.path for file in client.list_artifacts(run, "transcripts")]
    assert paths == ["transcripts/step-000003-1.json", "transcripts/step-000003-2.json"]
    table = json.loads(Path(client.download_artifacts(run, paths[0], str(tmp_path))).read_text())
    assert table["columns"] == ["task", "prompt", "response", "reward", "outcome"]
    assert table["data"] == [
        ["t-1", "user: What is <b>2 + 2</b>?", "4\n", 1.0, "finished"],
        ["t-2", "user: [image] π?\n\nassistant: 3\n\nuser: more", "3.1", 0.5, "finished"],
        ["t-3", "", None, None, "reward_timeout"],
    ]


def test_media_of_transcripts_are_artifacts(tmp_path):
    sink = Mlflow()
    sink.open(str(tmp_path), "run", CONFIG)
    for _ in range(2):  # a medium of a step is logged once
        sink.samples(4, [with_media(tmp_path)])
    sink.close()
    client, run = MlflowClient(os.environ[VARIABLE]), run_of(tmp_path).info.run_id
    paths = [file.path for file in client.list_artifacts(run, "media/step-000004")]
    assert [path.rpartition("/")[2] for path in paths] == ["audio-2.wav", "image-1.png", "video-3.webm"]
    read = [Path(client.download_artifacts(run, path, str(tmp_path))).read_bytes() for path in paths]
    assert read == [MEDIA["s.audio"], MEDIA["k.image"], MEDIA["v.video"]]


def test_names_that_mlflow_refuses_are_changed(tmp_path):
    sink = Mlflow()
    sink.open(str(tmp_path), "run", {"a[0]": 1})
    sink.metrics(1, {"mine/x@2": 1.0, "mine/nan": math.nan})
    sink.close()
    data = run_of(tmp_path).data
    assert data.params == {"a_0_": "1"}
    assert data.metrics["mine/x_2"] == 1.0 and math.isnan(data.metrics["mine/nan"])
