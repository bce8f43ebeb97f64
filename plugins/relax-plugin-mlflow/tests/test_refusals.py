# SPDX-License-Identifier: Apache-2.0
"""What the sink refuses before a run starts. These tests need no MLflow."""

import pytest
from relax_plugin_mlflow.sink import Mlflow, MlflowOptions

from relax_core.api import ConfigError


def with_packages(monkeypatch, *installed):
    monkeypatch.setattr("relax_plugin_mlflow.sink.find_spec", lambda name: name if name in installed else None)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_a_missing_package_is_refused_with_the_fix(monkeypatch):
    with_packages(monkeypatch)
    with pytest.raises(ConfigError, match=r"without the package mlflow; pip install 'relax-plugin-mlflow\[mlflow\]'"):
        Mlflow().check()


def test_only_a_database_needs_sqlalchemy(monkeypatch):
    with_packages(monkeypatch, "mlflow")
    Mlflow(MlflowOptions(uri="https://mlflow.example")).check()
    for uri in ("", "postgresql+psycopg://host/db"):
        with pytest.raises(ConfigError, match="without the package sqlalchemy"):
            Mlflow(MlflowOptions(uri=uri)).check()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example")
    Mlflow().check()


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns"])
def test_a_folder_is_refused_with_the_fix(monkeypatch, uri):
    with_packages(monkeypatch, "mlflow", "sqlalchemy", "alembic")
    with pytest.raises(ConfigError, match=r"sinks\.mlflow\.uri: .*mlruns.*; MLflow takes no folder; write sqlite:///"):
        Mlflow(MlflowOptions(uri=uri)).check()
    Mlflow(MlflowOptions(uri="sqlite:///runs/mlflow.db")).check()
