# SPDX-License-Identifier: Apache-2.0
"""`relax train --resume --run-dir RUN`: which runs it continues, with which overrides, and which it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_core.api.errors import ConfigError
from relax_core.cli import runs

WORDS = ["my.toml", "optimizer.lr=0.5", "steps=40", "placement.actor.ranks=2"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls that would prepare a run: ("new", overrides) or ("resume", folder, overrides, unfinished)."""
    made: list[tuple[Any, ...]] = []

    def prepare(sources: list[str], overrides: list[str], run_dir: Path) -> SimpleNamespace:
        made.append(("new", sources, overrides, run_dir))
        return SimpleNamespace()

    def prepare_resume(run_dir: Path, overrides: list[str], *, unfinished: bool) -> SimpleNamespace:
        made.append(("resume", run_dir, overrides, unfinished))
        return SimpleNamespace()

    monkeypatch.setattr("relax_core.control.prepare.prepare", prepare)
    monkeypatch.setattr("relax_core.control.prepare.prepare_resume", prepare_resume)
    monkeypatch.setattr(runs, "_run", lambda *_: None)
    return made


def test_a_folder_without_a_run_gets_a_new_one(tmp_path: Path, calls: list[tuple[Any, ...]]) -> None:
    for folder in (tmp_path / "absent", tmp_path):
        runs.train(WORDS, run_dir=folder, runner="ray", continues=True)
        assert calls.pop() == ("new", ["my.toml"], [*WORDS[1:], "run.runner=ray"], folder)


def test_a_run_that_has_begun_continues_with_the_overrides_that_may_change(
    tmp_path: Path, calls: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").touch()
    for status in ("running", "failed", "preempted", "stopped"):
        (tmp_path / "summary.json").write_text(json.dumps({"status": status}))
        runs.train(WORDS, run_dir=tmp_path, runner="ray", continues=True)
        changes = ["steps=40", "placement.actor.ranks=2", "run.runner=ray"]
        assert calls.pop() == ("resume", tmp_path, changes, True), "also without a checkpoint"
        assert f"the run in {tmp_path} has begun and keeps its own optimizer.lr\n" in capsys.readouterr().err


def test_a_finished_run_is_left_as_it_is(
    tmp_path: Path, calls: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").touch()
    (tmp_path / "summary.json").write_text(json.dumps({"status": "finished", "steps": 6}))
    runs.train(WORDS, run_dir=tmp_path, continues=True)
    assert not calls and f"is finished; for more steps: relax resume {tmp_path} steps=N" in capsys.readouterr().err
    runs.train(WORDS, run_dir=tmp_path, continues=True, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"status": "finished", "steps": 6, "run_dir": str(tmp_path)}


def test_without_a_folder_there_is_nothing_to_continue() -> None:
    with pytest.raises(ConfigError, match=r"--resume: got no --run-dir; name the folder of the run: --run-dir RUN"):
        runs.train(WORDS, continues=True)


def test_without_resume_a_folder_with_a_run_is_not_continued(tmp_path: Path, calls: list[tuple[Any, ...]]) -> None:
    (tmp_path / "config.toml").touch()
    runs.train(WORDS, run_dir=tmp_path)
    assert calls.pop()[0] == "new", "which refuses the folder"
