# SPDX-License-Identifier: Apache-2.0
"""The calls of rednote's metrics client: values and errors reach the run, and wrong ones are refused without an effect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_core.api import ClearMetrics, LogError, LogMetrics
from relax_core.observe.run_directory import MAX_WAITING, RunDirectory
from relax_core.views import run as views_run
from relax_core.views.run import RunHealth
from tests.control_api import call


@pytest.fixture
def run(write_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a run that looks alive."""
    monkeypatch.setattr(views_run, "health", lambda *_: RunHealth("running"))
    return write_run(tmp_path, steps=4)


def test_a_client_logs_reports_and_asks(run: Path) -> None:
    def post(route: str, **body: Any) -> str:
        answer = call(run, "POST", f"/metrics/{route}", json=body)
        assert (answer.status_code, answer.json()["status"]) == (200, "success"), answer.text
        return str(answer.json()["message"])

    said = post("log_metric", step=5, metric_name="reward/mean", metric_value=1, tags=None)
    assert said == "1 metrics logged for step 5, with names from user/"
    post("log_metrics_batch", step=5, metrics={"user/a": 0.5, "b": 2}, tags={"host": "one"})
    post("clear_metrics", step=None)
    post("log_error", error_message="no disk", error_traceback="frames")
    assert RunDirectory.open(run).take_commands() == [
        LogMetrics({"user/reward/mean": 1}, 5), LogMetrics({"user/a": 0.5, "user/b": 2}, 5), ClearMetrics(),
        LogError("no disk", "frames"),
    ]  # fmt: skip
    assert post("report_step", step=4) == "metrics of step 4 are recorded"
    assert post("report_step", step=5).endswith("are recorded with the step; the run has finished step 4")
    assert call(run, "GET", "/metrics/query_metrics?step=3").json()["metrics"]["step"] == 3
    assert call(run, "GET", "/metrics/query_metrics").json()["metrics"]["step"] == 4
    assert call(run, "GET", "/metrics/query_metrics?step=9").json()["metrics"] == {}
    assert RunDirectory.open(run).take_commands() == []


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("log_metric", '{"step": 1, "metric_value": 1}', "metric_name"),
        ("log_metric", '{"step": 1, "metric_name": "a"}', "user/a"),
        ("log_metric", '{"step": 1, "metric_name": "a b", "metric_value": 1}', "metrics"),
        ("log_metric", '{"step": 1, "metric_name": "a", "metric_value": NaN}', "body"),
        ("log_metric", '{"step": 1, "metric_name": "a", "metric_value": "text"}', "metric_value"),
        ("log_metrics_batch", '{"step": 1, "metrics": {"a": [{"ph": "X", "ts": 1}]}}', "user/a"),
        ("log_metrics_batch", '{"step": 1, "metrics": {}}', "metrics"),
        ("log_metrics_batch", '{"step": -1, "metrics": {"a": 1}}', "step"),
        ("log_error", "{}", "error_message"),
        ("report_step", "{}", "step"),
    ],
)
def test_wrong_values_are_refused_with_the_fix(run: Path, route: str, body: str, field: str) -> None:
    answer = call(run, "POST", f"/metrics/{route}", content=body)
    assert (answer.status_code, answer.json()["field"]) == (400, field) and answer.json()["fix"]
    assert RunDirectory.open(run).take_commands() == []


def test_a_run_that_is_behind_or_has_ended_takes_no_values(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"step": 1, "metrics": {"a": 1}}
    monkeypatch.setattr(RunDirectory, "waiting", lambda _: MAX_WAITING)
    assert call(run, "POST", "/metrics/log_metrics_batch", json=body).status_code == 503
    monkeypatch.undo()
    assert call(run, "POST", "/metrics/log_metrics_batch", json=body).status_code == 409
    health = call(run, "GET", "/metrics/health").json()
    assert (health["status"], health["wandb_enabled"]) == ("stopped", False)
