# SPDX-License-Identifier: Apache-2.0
"""`open_run`: what a notebook sees of a run."""

import pytest

from relax_core.api.errors import ConfigError
from relax_core.api.run_commands import LogError, LogMetrics
from relax_core.observe.run_directory import RunDirectory
from relax_core.views import run as views_run
from relax_core.views.run import RunHealth, open_run


def test_a_run_is_read_back_as_it_was_written(tmp_path, write_run):
    run = open_run(write_run(tmp_path, steps=30))
    metrics = run.metrics()
    assert [record["step"] for record in metrics] == list(range(1, 31))
    assert metrics[-1]["eval/hold-out/mean"] == pytest.approx(metrics.column("eval/hold-out/mean")[0])
    assert metrics.points("eval/hold-out/count") == [(30, 64.0)]
    assert len(metrics.column("reward/mean")) == 30 and metrics.column("no/such") == []
    assert "schema" not in metrics[0] and "step" not in metrics.names()
    assert len(run.samples(3)) == 8 and run.samples(3)[0]["task_id"] == "add-3-0"
    assert run.samples(99) == [] and run.sample_steps()[-1] == 30
    assert run.config["model"]["path"] == "models/tiny"
    assert run.summary()["status"] == "finished" and run.status()["state"] == "finished"


def test_a_run_is_opened_by_name_and_without_one(tmp_path, write_run, monkeypatch):
    monkeypatch.setenv("RELAX_RUNS", str(tmp_path))
    path = write_run(tmp_path, steps=1)
    assert open_run(path.name).path == open_run().path == path


def test_reading_needs_no_lock_and_leaves_none(tmp_path, write_run):
    path = write_run(tmp_path, steps=1, ending=None)
    writer = RunDirectory.reopen(path)
    assert len(open_run(path).metrics()) == 1
    writer.append_metrics(2, 1.0, {"reward/mean": 0.5})
    writer.close()


def test_a_program_logs_into_a_live_run_at_a_bounded_rate(tmp_path, write_run, monkeypatch):
    run = open_run(write_run(tmp_path, steps=1))
    with pytest.raises(ConfigError, match="which is finished; only a live run records"):
        run.log_metrics({"user/a": 1.0})
    monkeypatch.setattr(views_run, "health", lambda *_: RunHealth("running"))
    with pytest.raises(ConfigError, match="log it as 'user/loss'"):
        run.log_metrics({"loss": 1.0})
    for step in range(199):
        run.log_metrics({"user/a": step}, step)
    run.log_error("a" * 3000, "frames")
    with pytest.raises(ConfigError, match="200 that the run has not taken; log less often"):
        run.log_error("one too many")
    *logged, error = RunDirectory.open(run.path).take_commands()
    assert logged == [LogMetrics({"user/a": float(step)}, step) for step in range(199)]
    assert error == LogError("a" * 2000, "frames")


def test_a_damaged_configuration_says_which_file(tmp_path, write_run):
    path = write_run(tmp_path, steps=1)
    (path / "config.toml").write_text("steps = = 3")
    with pytest.raises(ConfigError, match=r"config\.toml: got text that is not TOML"):
        _ = open_run(path).config
