# SPDX-License-Identifier: Apache-2.0
"""`open_run`: what a notebook sees of a run."""

import pytest

from relax_core.api.errors import ConfigError
from relax_core.observe.run_directory import RunDirectory
from relax_core.views.run import open_run


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


def test_a_damaged_configuration_says_which_file(tmp_path, write_run):
    path = write_run(tmp_path, steps=1)
    (path / "config.toml").write_text("steps = = 3")
    with pytest.raises(ConfigError, match=r"config\.toml: got text that is not TOML"):
        _ = open_run(path).config
