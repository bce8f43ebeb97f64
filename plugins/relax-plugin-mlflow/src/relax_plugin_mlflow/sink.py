# SPDX-License-Identifier: Apache-2.0
"""The MLflow sink: metrics, transcripts with media, and configuration on a tracking server, or in an SQLite file."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import Field

from relax_core.api import ConfigError, Options, Sink, sample_row
from relax_core.media.previews import SampleMedia

DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
PARAMS_AT_ONCE = 100
"""Largest number of parameters that MLflow takes in one call."""


class MlflowOptions(Options):
    uri: str = ""
    """Tracking server or database, such as `http://localhost:5000` or `sqlite:///runs/mlflow.db`; empty: the variable
    MLFLOW_TRACKING_URI, else the file `mlflow/mlflow.db` in the run directory."""
    experiment: str = "relax"
    """Experiment of the run; the sink makes an experiment that does not exist yet."""
    transcripts: bool = True
    """True: also log a table with a few transcripts of each step."""
    max_media: int = Field(default=4, ge=0)
    """Number of images, videos and sounds of each step's transcripts to log as well; 0 logs none."""


class Mlflow(Sink[MlflowOptions]):
    """A sink that logs to one run of MLflow; a resumed run continues in that run."""

    def __init__(self, options: MlflowOptions | None = None) -> None:
        super().__init__(options)
        self._client: Any = None
        self._run_id = ""
        self._tables = 0
        """Number of tables that this start has logged."""
        self._media = SampleMedia("", 0)

    def check(self) -> None:
        uri = self._uri(Path("run"))
        scheme = re.split(r"[:+]", uri)[0] if ":" in uri else ""
        needed = ["mlflow", *(["sqlalchemy", "alembic"] if scheme in DATABASES else [])]
        missing = [package for package in needed if find_spec(package) is None]
        if missing:
            fix = "pip install 'relax-plugin-mlflow[mlflow]'"
            raise ConfigError("sinks.mlflow", f"{uri!r} without the package {missing[0]}", fix)
        if scheme in ("", "file"):
            raise ConfigError(
                "sinks.mlflow.uri", repr(uri), "MLflow takes no folder; write sqlite:///FILE or http://HOST"
            )

    def open(self, run_dir: str, name: str, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # else it prints that it makes a database
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        self._media = SampleMedia(run_dir, self.options.max_media)
        folder = Path(run_dir).absolute() / "mlflow"
        folder.mkdir(exist_ok=True)
        uri, id_file = self._uri(Path(run_dir).absolute()), folder / "run-id"
        self._client = client = MlflowClient(uri)
        if id_file.exists():
            try:
                client.update_run(id_file.read_text(encoding="utf-8"), status="RUNNING")
                self._run_id = id_file.read_text(encoding="utf-8")
                return
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # `uri` now names another server: begin there
                    raise
        self._run_id = client.create_run(_experiment(client, self.options.experiment, uri), run_name=name).info.run_id
        id_file.write_text(self._run_id, encoding="utf-8")
        params = [Param(_key(key), str(value)) for key, value in _flat(config)]
        for first in range(0, len(params), PARAMS_AT_ONCE):
            client.log_batch(self._run_id, params=params[first : first + PARAMS_AT_ONCE])

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._run_id, [Metric(_key(key), value, now, step) for key, value in values.items()])

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        if not self.options.transcripts or not samples:
            return
        rows = [sample_row(sample) for sample in samples]
        self._tables += 1
        table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
        self._client.log_dict(self._run_id, table, f"transcripts/step-{step:06d}-{self._tables}.json")
        with tempfile.TemporaryDirectory(prefix="relax-mlflow-") as folder:
            for medium in self._media.take(step, samples):
                file = Path(folder) / f"{medium.kind}-{medium.number}.{medium.suffix}"
                file.write_bytes(medium.data)
                self._client.log_artifact(self._run_id, str(file), f"media/step-{step:06d}")

    def close(self) -> None:
        if self._client is not None and self._run_id:
            self._client.set_terminated(self._run_id)
        self._client, self._run_id = None, ""

    def _uri(self, run_dir: Path) -> str:
        given = self.options.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        return given or f"sqlite:///{run_dir}/mlflow/mlflow.db"


def _experiment(client: Any, name: str, uri: str) -> str:
    """Return the id of the experiment; create it if it is missing. With SQLite, its files lie beside the database."""
    from mlflow.exceptions import MlflowException

    existing = client.get_experiment_by_name(name)
    if existing is None:
        beside = None
        if uri.startswith("sqlite:///"):
            beside = (Path(uri.removeprefix("sqlite:///")).absolute().parent / "artifacts").as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=beside))
        except MlflowException:
            existing = client.get_experiment_by_name(name)  # another run may have made it in between
            if existing is None:
                raise
    return str(existing.experiment_id)


def _key(key: str) -> str:
    """Return a metric's or parameter's name with the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", key)


def _flat(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of a configuration under its path, such as `rewards.0.name`."""
    if isinstance(config, Mapping | list | tuple) and config:
        items = config.items() if isinstance(config, Mapping) else enumerate(config)
        for key, value in items:
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, config
